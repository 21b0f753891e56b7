"""Reads an EAGLE head's directory, in the layout of SafeAILab and SpecForge, or in that of `speculators`.

EAGLE-1 heads come with the config.json of a one-layer llama; only their tensors identify them. Tensor names are
normalised: SafeAILab's and SpecForge's EAGLE-3 heads call their layer "midlayer", and some prefix all names with
"model.".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from stridelm.draft.base import TargetInfo
from stridelm.draft.given import Given
from stridelm.models.layers.decoder import DecoderSpec
from stridelm.models.layers.hf import common_fields, dense_layers

VOCABULARY = ("d2t", "t2d")
FOREIGN = ("architectures", "model_type", "layer_types", "max_window_layers")
"""Fields that heads copy from their targets and that do not describe a single llama layer."""
TAPS = "eagle_aux_hidden_state_layer_ids"
REMEDY = "give the head that was trained for this model"
UNREAD = {"fc_norm": False, "use_aux_norm": False, "norm_before_fc": False, "norm_output": False}
"""Fields of EAGLE-3 heads that compute something else, with the only value that is supported."""


@dataclass(frozen=True)
class Layout:
    """A head as its directory describes it."""

    given: Given
    layer: dict[str, Any]
    """The config of its one layer."""
    shapes: dict[str, torch.Size]
    """By normalised name."""

    @classmethod
    def of(cls, given: Given) -> Layout | None:
        """None if the directory holds no EAGLE head. Raises ValueError for a config.json that makes no sense."""
        shapes = {spelling(name): shape for name, shape in given.shapes.items()}
        if len(shapes.get("fc.weight", ())) != 2 or not any(name.startswith("layers.0.self_attn.") for name in shapes):
            return None
        return cls(given, _part(given, "transformer_layer_config") or given.config, shapes)

    @property
    def is_third(self) -> bool:
        """Whether it is an EAGLE-3 head, recognised by the norm that only EAGLE-3 has."""
        return "layers.0.hidden_norm.weight" in self.shapes

    @property
    def own_embedding(self) -> bool:
        return "embed_tokens.weight" in self.shapes

    @property
    def bias(self) -> bool:
        return "fc.bias" in self.shapes

    @property
    def draft_vocab(self) -> int:
        return self.shapes["lm_head.weight"][0]

    @property
    def norm_before_residual(self) -> bool:
        return bool(self.given.config.get("norm_before_residual", False))

    def taps(self, layers: int) -> tuple[int, ...]:
        """Layers whose inputs an EAGLE-3 head reads, for a target with `layers` layers.

        Two conventions are published under one name: at the top of config.json, where vLLM's `speculators` writes the
        list, it has layers whose inputs are read; inside `eagle_config`, where SpecForge does and SGLang looks, layers
        whose outputs are. Raises ValueError for what is no list of layers.
        """
        named, offset = self.given.config.get(TAPS), 0
        if not named:
            named, offset = _part(self.given, "eagle_config").get(TAPS), 1
        if named and not (isinstance(named, list) and all(isinstance(layer, int) for layer in named)):
            raise ValueError(f"{self.given.path}/config.json: {TAPS} takes a list of layers; got {named!r}")
        return tuple(layer + offset for layer in named) if named else (2, layers // 2, layers - 3)

    def spec(self) -> DecoderSpec:
        """The spec of the layer. Raises ValueError for fields that no layer can have."""
        from transformers import LlamaConfig

        known = {name: value for name, value in self.layer.items() if name not in FOREIGN}
        try:
            config = LlamaConfig(**{**known, "num_hidden_layers": 1, "tie_word_embeddings": False})
            biased = bool(config.attention_bias)
            return DecoderSpec(**common_fields(config), layers=dense_layers(config, qkv_bias=biased, o_bias=biased))
        # transformers raises many kinds of error for a wrong field; whichever it is, the user needs the file's name.
        except Exception as error:
            raise ValueError(f"{self.given.path}/config.json does not describe an EAGLE head: {error}") from error

    def misfit(self, target: TargetInfo) -> str | None:
        """Why the head does not fit this target, with the remedy; None if it does."""
        config, path = target.config, self.given.path
        verifier = _part(self.given, "speculators_config").get("verifier") or {}
        trained_for, served = (set(of or ()) for of in (verifier.get("architectures"), config.architectures))
        if trained_for and served and not trained_for & served:
            return f"{path} is for {', '.join(trained_for)}, this model is {', '.join(served)}"
        if "layers.0.self_attn.q_proj.weight" not in self.shapes or any(".experts." in name for name in self.shapes):
            return f"{path} has a layer with latent attention or experts; heads with a dense llama layer are supported"
        width = config.hidden_size
        joined = self.shapes["fc.weight"]
        hidden = self.layer.get("hidden_size", joined[0])
        if not self.own_embedding and hidden != width:
            return f"{path} has hidden size {hidden} and the model {width}; {REMEDY}"
        if self.layer.get("vocab_size", target.vocab_size) != target.vocab_size:
            size = self.layer["vocab_size"]
            return f"{path} is for a vocabulary of {size} tokens, the model's has {target.vocab_size}; {REMEDY}"
        if self.is_third:
            return self._reads_other_taps(config) or self._has_other_output(target.vocab_size)
        if joined[1] != 2 * width:
            return f"{path} reads hidden states of width {joined[1] - joined[0]}, not {width}; {REMEDY}"
        return None

    def _reads_other_taps(self, target: Any) -> str | None:
        """Why an EAGLE-3 head cannot read the hidden states of a model with this config."""
        config, path, width = self.given.config, self.given.path, target.hidden_size
        if not _part(self.given, "eagle_config").get("use_aux_hidden_state", True):
            return f"{path} reads the last hidden state alone (use_aux_hidden_state), which EAGLE-3 heads here do not"
        stated = config.get("target_hidden_size") or width
        if stated != width:
            return f"{path} is for a model of hidden size {stated}, this one has {width}; {REMEDY}"
        taps, layers, joined = self.taps(target.num_hidden_layers), target.num_hidden_layers, self.shapes["fc.weight"]
        wrong = [layer for layer in taps if not 0 <= layer < layers]
        if wrong:
            return (
                f"{path} reads the inputs of layers {', '.join(map(str, taps))} and the model has layers 0 to "
                f"{layers - 1}; {REMEDY}, or name its layers in {TAPS}"
            )
        count = config.get("num_aux_hidden_states") or len(taps)
        if count != len(taps):
            return f"{path} reads {count} hidden states and names {len(taps)} layers; name them in {TAPS}"
        if joined[1] != len(taps) * width:
            actual = f"{len(taps)} hidden states of this model have {len(taps) * width}"
            return f"{path} reads {joined[1]} numbers per row, {actual}; {REMEDY}"
        return None

    def _has_other_output(self, vocab_size: int) -> str | None:
        """Why an EAGLE-3 head's logits cannot be mapped to a vocabulary of this size, or are computed otherwise."""
        config, path = self.given.config, self.given.path
        other = [f"{field} {config[field]!r}" for field, only in UNREAD.items() if config.get(field, only) != only]
        if other:
            return f"{path}/config.json: {', '.join(other)} is not supported; give a head that was trained without"
        if "lm_head.weight" not in self.shapes:
            return f"{path} has no lm_head.weight; copy the head again"
        stated = config.get("draft_vocab_size") or self.draft_vocab
        if stated != self.draft_vocab:
            return f"{path}/config.json says draft_vocab_size {stated}, lm_head has {self.draft_vocab}; copy it again"
        if self.draft_vocab != vocab_size and "d2t" not in self.shapes:
            return (
                f"{path} has logits for {self.draft_vocab} of {vocab_size} tokens and has no d2t, which maps them; "
                f"copy the head again"
            )
        return None

    def ids(self, vocab_size: int) -> torch.Tensor:
        """[Vd] the target's id of each token in the head's vocabulary. Raises ValueError for an id that the target does
        not have."""
        ids = torch.arange(self.draft_vocab)
        for name, tensor in self.given.tensors(torch.device("cpu"), lambda name: spelling(name) == "d2t"):
            if tensor.shape != ids.shape:
                raise ValueError(f"{self.given.path}: {name} has {list(tensor.shape)} entries, not {list(ids.shape)}")
            ids = ids + tensor.to(torch.int64)
        if not bool(((ids >= 0) & (ids < vocab_size)).all()) or len(ids.unique()) != len(ids):
            raise ValueError(
                f"{self.given.path}: d2t leads outside the vocabulary, or to one token twice; copy it again"
            )
        return ids

    def tensors(self, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights, by normalised name."""
        for name, tensor in self.given.tensors(device):
            if spelling(name) not in VOCABULARY:
                yield spelling(name), tensor


def _part(given: Given, name: str) -> dict[str, Any]:
    """An object inside config.json, empty if it is not there. Raises ValueError if it is something else."""
    part = given.config.get(name) or {}
    if not isinstance(part, dict):
        raise ValueError(f"{given.path}/config.json: {name} is {part!r} and not an object; copy the head again")
    return part


def spelling(name: str) -> str:
    """A tensor's normalised name."""
    return name.removeprefix("model.").replace("midlayer.", "layers.0.", 1)
