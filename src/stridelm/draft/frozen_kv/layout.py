"""Reads an assistant's directory, in the layout of transformers' `Gemma4AssistantForCausalLM`, and says which of a
target's layers it reads.

Its `text_config` is that of a Gemma 4 whose layers all share the keys and values of others: the target's last layers
with entries of their own, one for each type of layer. Nothing in it is bound to a Gemma 4 as the target: the layers
that are read need only have heads of the same widths and the same rotation.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from stridelm.draft.base import TargetInfo
from stridelm.draft.frozen_kv.head import EMBEDDING, HEAD
from stridelm.draft.frozen_kv.ordered import Centroids
from stridelm.draft.given import Given
from stridelm.models.gemma4_text import reading_layers
from stridelm.models.layers.attention import HeadsSpec
from stridelm.models.layers.block import check_sizes
from stridelm.models.layers.decoder import DecoderSpec
from stridelm.models.layers.hf import common_fields
from stridelm.models.layers.rope import RopeSpec
from stridelm.models.loader import build_empty, load_config
from stridelm.models.ties import same_matrix

logger = logging.getLogger(__name__)

KINDS = ("gemma4_assistant", "gemma4_unified_assistant")
"""Model types of assistants. They differ in nothing that is read here."""
ORDER = "masked_embedding.token_ordering"
REMEDY = "give the assistant that was trained for this model"
UNREAD: dict[str, Any] = {
    "enable_moe_block": False,
    "use_double_wide_mlp": False,
    "hidden_size_per_layer_input": 0,
    "use_bidirectional_attention": None,
}
"""Fields of assistants that compute something else, with the only value that is supported."""


@dataclass(frozen=True, eq=False)
class Layout:
    """An assistant as its directory describes it."""

    given: Given
    text: Any
    """A `Gemma4TextConfig`."""
    target_width: int
    """Width of the target's hidden states."""
    centroids: Centroids | None
    """None: every token has a logit."""
    tied: bool
    """The output head's matrix is stored as the embedding alone, which nothing else reads."""

    @classmethod
    def of(cls, given: Given) -> Layout | None:
        """None if the directory holds no assistant. Raises ValueError for a config.json that makes no sense."""
        if given.config.get("model_type") not in KINDS:
            return None
        config, text = given.config, _text(given)
        try:
            check_sizes(backbone_hidden_size=config.get("backbone_hidden_size"))
            centroids = _centroids(config, text.vocab_size)
        except ValueError as error:
            raise ValueError(f"{given.path}/config.json: {error}; copy it again") from error
        return cls(given, text, config["backbone_hidden_size"], centroids, _tied(given))

    def misfit(self, target: TargetInfo) -> str | None:
        """Why it does not fit this target, with the remedy; None if it does."""
        if target.config is None or target.path is None:
            return "there is no model"
        path = self.given.path
        if self.target_width != target.config.hidden_size:
            have = f"{self.target_width} and the model {target.config.hidden_size}"
            return f"{path} is for hidden states of width {have}; {REMEDY}"
        if self.text.vocab_size != target.vocab_size:
            return f"{path} has logits for {self.text.vocab_size} tokens and the model {target.vocab_size}; {REMEDY}"
        return _misfit(self, target.path.resolve())

    def tensors(self, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights, by name."""
        return self.given.tensors(device, lambda name: name != ORDER)

    def ids(self) -> torch.Tensor:
        """[C, V / C] int64 the tokens of each centroid. Raises ValueError if they are not all tokens, each once."""
        assert self.centroids is not None
        vocab_size, path = self.text.vocab_size, self.given.path
        for _, ids in self.given.tensors(torch.device("cpu"), lambda name: name == ORDER):
            if ids.shape != (vocab_size,) or not torch.equal(ids.long().sort().values, torch.arange(vocab_size)):
                raise ValueError(f"{path}: {ORDER} is not a permutation of the {vocab_size} tokens; copy it again")
            return ids.long().view(self.centroids.count, -1)
        raise ValueError(f"the weights in {path} do not fit its config.json; missing: {ORDER}; copy both again")


@lru_cache(maxsize=64)
def layout_of(given: Given) -> Layout | None:
    """`Layout.of`, once for each directory that is read."""
    return Layout.of(given)


def spec_of(text: Any, target: DecoderSpec) -> DecoderSpec:
    """The spec of an assistant's layers, each of which reads a layer of the target. text: a `Gemma4TextConfig`. Raises
    ValueError for fields that no assistant can have, and for a target without such layers."""
    sources = sources_in(target)
    lacking = sorted(set(text.layer_types) - set(sources))
    if lacking:
        have = ", ".join(sorted(sources)) or "none"
        raise ValueError(f"it reads keys and values of {', '.join(lacking)} layers, and the model's are {have}")
    return DecoderSpec(**common_fields(text, ()), layers=reading_layers(text, sources))


def sources_in(target: DecoderSpec) -> dict[str, int]:
    """Type of layer -> the last layer of that type that keeps keys and values of its own."""
    own = [
        (i, layer.mixer)
        for i, layer in enumerate(target.layers)
        if isinstance(layer.mixer, HeadsSpec) and layer.mixer.reads is None
    ]
    return {"full_attention" if mixer.window is None else "sliding_attention": i for i, mixer in own}


def _text(given: Given) -> Any:
    from transformers import Gemma4TextConfig

    file, stated = given.path / "config.json", given.config.get("text_config")
    if not isinstance(stated, Mapping):
        raise ValueError(f"{file}: text_config is {stated!r} and not an object; copy it again")
    other = [f"{name} {stated[name]!r}" for name, only in UNREAD.items() if stated.get(name, only) != only]
    if other:
        raise ValueError(f"{file}: {', '.join(other)} is not supported; give an assistant that was trained without")
    try:
        text = Gemma4TextConfig(**{"hidden_size_per_layer_input": 0, **stated, "num_kv_shared_layers": 0})
    # transformers raises many kinds of error for a wrong field; whichever it is, the user needs the file's name.
    except Exception as error:
        raise ValueError(f"{file} does not describe an assistant: {error}") from error
    shared = stated.get("num_kv_shared_layers") or text.num_hidden_layers
    if shared != text.num_hidden_layers:
        have = f"num_kv_shared_layers {shared} of {text.num_hidden_layers}"
        raise ValueError(f"{file}: {have} leave layers with keys of their own, which no assistant has; copy it again")
    return text


def _tied(given: Given) -> bool:
    """Whether the head's matrix is stored as the embedding alone: where both are there, the head is the head."""
    path = given.path
    if not given.config.get("tie_word_embeddings", True):
        return False
    if HEAD in given.shapes and EMBEDDING in given.shapes and not same_matrix(path, EMBEDDING, path, HEAD):
        logger.warning(
            "%s: config.json says tie_word_embeddings, but %s differs from %s; the former is used",
            path,
            HEAD,
            EMBEDDING,
        )
    return HEAD not in given.shapes


def _centroids(config: Mapping[str, Any], vocab_size: int) -> Centroids | None:
    if not config.get("use_ordered_embeddings"):
        return None
    count, best = config.get("num_centroids"), config.get("centroid_intermediate_top_k")
    check_sizes(num_centroids=count, centroid_intermediate_top_k=best)
    assert isinstance(count, int) and isinstance(best, int)
    if vocab_size % count:
        raise ValueError(f"num_centroids {count} does not divide the {vocab_size} tokens")
    if best > count:
        raise ValueError(f"centroid_intermediate_top_k {best} is over num_centroids {count}")
    return Centroids(count, best)


@lru_cache(maxsize=64)
def _misfit(layout: Layout, target: Path) -> str | None:
    path, served = layout.given.path, build_empty(load_config(target), target).spec
    try:
        spec = spec_of(layout.text, served)
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        return f"{path}/config.json does not describe an assistant of this model: {error}; {REMEDY}"
    for number, layer in enumerate(spec.layers):
        ours = layer.mixer
        assert isinstance(ours, HeadsSpec) and ours.reads is not None
        theirs = served.layers[ours.reads].mixer
        assert isinstance(theirs, HeadsSpec)
        reads = f"layer {number} of {path} is to read layer {ours.reads} of the model"
        if (ours.num_kv_heads, ours.head_dim) != (theirs.num_kv_heads, theirs.head_dim):
            mine, others = (f"{each.num_kv_heads} KV heads of {each.head_dim}" for each in (ours, theirs))
            return f"{reads}, which has {others} and not {mine}; {REMEDY}"
        if not _turn_alike(ours.rope, theirs.rope):
            return f"{reads}, whose keys are rotated otherwise; {REMEDY}"
        if ours.window is not None and theirs.window is not None and not 1 < ours.window <= theirs.window:
            return f"{reads}, which has a window of {theirs.window} tokens, through one of {ours.window}; {REMEDY}"
    return None


def _turn_alike(ours: RopeSpec, theirs: RopeSpec) -> bool:
    """Whether positions rotate keys of both by the same angles."""
    (mine, factor), (others, other) = ours.frequencies(), theirs.frequencies()
    same = ours.dim == theirs.dim and ours.limit == theirs.limit and factor == other
    return same and torch.allclose(mine, others, rtol=1e-5, atol=0)
