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
        """None if the directory holds no EAGLE head."""
        shapes = {spelling(name): shape for name, shape in given.shapes.items()}
        if "fc.weight" not in shapes or "layers.0.self_attn.q_proj.weight" not in shapes:
            return None
        return cls(given, given.config.get("transformer_layer_config") or given.config, shapes)

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
        """Layers whose inputs an EAGLE-3 head reads, for a target with `layers` layers."""
        config = self.given.config
        inner = config.get("eagle_config") or {}
        key = "eagle_aux_hidden_state_layer_ids"
        named = config.get(key) or inner.get(key)
        if named and not (isinstance(named, list) and all(isinstance(layer, int) for layer in named)):
            raise ValueError(f"{self.given.path}/config.json: {key} takes a list of layers; got {named!r}")
        return tuple(named) if named else (2, layers // 2, layers - 3)

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
        verifier = (self.given.config.get("speculators_config") or {}).get("verifier") or {}
        trained_for, served = (set(of or ()) for of in (verifier.get("architectures"), config.architectures))
        if trained_for and served and not trained_for & served:
            return f"{path} is for {', '.join(trained_for)}, this model is {', '.join(served)}"
        width = config.hidden_size
        joined = self.shapes["fc.weight"]
        hidden = joined[0]
        remedy = "give the head that was trained for this model"
        if not self.own_embedding and hidden != width:
            return f"{path} has hidden size {hidden} and the model {width}; {remedy}"
        if self.layer.get("vocab_size", target.vocab_size) != target.vocab_size:
            size = self.layer["vocab_size"]
            return f"{path} is for a vocabulary of {size} tokens, the model's has {target.vocab_size}; {remedy}"
        if not self.is_third:
            return (
                None
                if joined[1] == 2 * width
                else f"{path} reads hidden states of width {joined[1] - hidden}, not {width}; {remedy}"
            )
        taps, layers = self.taps(config.num_hidden_layers), config.num_hidden_layers
        wrong = [layer for layer in taps if not 0 <= layer < layers]
        if wrong:
            return (
                f"{path} reads the inputs of layers {', '.join(map(str, taps))} and the model has layers 0 to "
                f"{layers - 1}; {remedy}, or name its layers in eagle_aux_hidden_state_layer_ids"
            )
        if joined[1] != len(taps) * width:
            actual = f"{len(taps)} hidden states of this model have {len(taps) * width}"
            return f"{path} reads {joined[1]} numbers per row, {actual}; {remedy}"
        if "lm_head.weight" not in self.shapes:
            return f"{path} has no lm_head.weight; copy the head again"
        if self.draft_vocab != target.vocab_size and "d2t" not in self.shapes:
            return (
                f"{path} has logits for {self.draft_vocab} of {target.vocab_size} tokens and has no d2t, which maps "
                f"them; copy the head again"
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


def spelling(name: str) -> str:
    """A tensor's normalised name."""
    return name.removeprefix("model.").replace("midlayer.", "layers.0.", 1)
