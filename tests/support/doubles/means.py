"""A kind of layer that the engine does not ship: each row gets the mean of the rows it sees. Used to test what must
hold for any kind, and for a model that mixes such layers with attention layers that differ from one another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, LlamaConfig

from stridelm import LLM
from stridelm.attention import BACKENDS
from stridelm.attention.base import AttentionBackend, Entries, Mix, Mixer
from stridelm.attention.host_view import HostView
from stridelm.attention.reference import ReferenceAttention, ReferenceHeads
from stridelm.attention.tiles import storage_slots
from stridelm.batch import Geometry
from stridelm.cache.layout import HeadsKV, LayerState, group_of
from stridelm.kernels.ops import Ops
from stridelm.models import MODELS
from stridelm.models.layers.attention import HeadsSpec
from stridelm.models.layers.block import LayerSpec, MixerSpec, Site
from stridelm.models.layers.decoder import Decoder, DecoderSpec
from stridelm.models.layers.hf import common_fields, dense_layers
from stridelm.models.layers.linear import Linear
from stridelm.models.layers.slots import ModelPart, Slots
from stridelm.parallel.shard import ONE, Shard
from stridelm.types import MAX_DRAFT_ROWS
from support.checkpoints.models import SMALL
from support.doubles.stand import Stand

MEANS = "means"
"""The name of the model type, and of the backend that can serve it."""
LAYERS: tuple[dict[str, Any], ...] = (
    {"num_heads": 4, "num_kv_heads": 2},
    {"width": 24},
    {"num_heads": 6, "num_kv_heads": 1, "head_dim": 8, "window": 9},
    {"width": 40, "window": 5},
)


@dataclass(frozen=True)
class MeanState(LayerState):
    """One vector per token."""

    width: int

    def tensors(self) -> Mapping[str, tuple[int, ...]]:
        return {"rows": (self.width,)}


@dataclass(frozen=True, kw_only=True)
class MeanSpec(MixerSpec):
    name: str = "mean"
    width: int

    def state(self, shard: Shard = ONE) -> MeanState:
        return MeanState(group_of(self.window), self.window, self.width)

    def build(self, site: Site) -> Mean:
        return Mean(self, site)


class Mean(ModelPart):
    """A projection, the mean, and a projection back."""

    keeps_bits: ClassVar[bool] = True

    def __init__(self, spec: MeanSpec, site: Site) -> None:
        super().__init__()
        self.layer = site.layer
        self.v = Linear(site.width, {"v_proj": spec.width})
        self.o = Linear(spec.width, {"o_proj": site.width})

    def forward(self, x: torch.Tensor, positions_N: torch.Tensor, mix: Mix, ops: Ops) -> torch.Tensor:
        return self.o(mix(self.layer, self.v(x)))

    def slots(self, theirs: str = "") -> Slots:
        yield from self._inner("v", theirs)
        yield from self._inner("o", theirs)


class MeansMixer(Mixer[MeanState]):
    """Each row by itself, its entries in order of position, in float64: neighbours cannot affect it."""

    def __init__(self, backend: AttentionBackend, geometry: Geometry) -> None:
        self.view = HostView.of(geometry)

    def mix(
        self,
        state: MeanState,
        inputs: torch.Tensor,
        entries: Entries,
        slots_N: torch.Tensor,
        ops: Ops,
        wanted_M: torch.Tensor | None = None,
    ) -> torch.Tensor:
        entries["rows"].index_copy_(0, slots_N, inputs)
        seen = [slots[-state.window :] if state.window else slots for slots in self._seen(state.group)]
        return torch.stack([entries["rows"][slots].double().mean(0) for slots in seen]).to(inputs.dtype)

    def _seen(self, group: str) -> Iterator[torch.Tensor]:
        """Pool slots of the entries that each row sees, in order of position."""
        view, g, row = self.view, self.view.geometry, 0
        for count, start, real, table in zip(view.counts, view.starts, view.reals, view.tables(group)):
            for number in range(count):
                own, base = int(g.draft_rows[row]), start + real
                path = [j for j in range(MAX_DRAFT_ROWS) if int(g.ancestors[row]) >> j & 1]
                last = start + number + 1 if own < 0 else base + 1 + max(path)
                slots = torch.from_numpy(storage_slots(table, last, g.page_size))
                yield slots if own < 0 else torch.cat((slots[:base], slots[[base + j for j in path]]))
                row += 1


class MeansAttention(ReferenceAttention):
    mixers: ClassVar = {HeadsKV: ReferenceHeads, MeanState: MeansMixer}


class MeansConfig(LlamaConfig):
    model_type = MEANS


AutoConfig.register(MEANS, MeansConfig)


def build(config: Any) -> Decoder:
    """A decoder with a layer for each of `LAYERS`."""
    dense, layers = dense_layers(config), []
    for layer, shape in zip(dense, LAYERS, strict=True):
        assert isinstance(layer.mixer, HeadsSpec)
        rope = replace(layer.mixer.rope, dim=shape.get("head_dim", layer.mixer.head_dim))
        mixer = MeanSpec(**shape) if "width" in shape else replace(layer.mixer, rope=rope, **shape)
        layers.append(LayerSpec(mixer, layer.mlp))
    return Decoder(DecoderSpec(**common_fields(config), layers=tuple(layers)))


def write_means(path: Path) -> Path:
    """A checkpoint with random weights whose logits are peaked."""
    config = MeansConfig(**{**SMALL, "num_hidden_layers": len(LAYERS)})
    config.save_pretrained(path)
    numbers = torch.Generator().manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    model = build(config)
    for name, slot in model.slots():
        shape = model.get_parameter(slot.name)[slot.start : slot.stop].shape
        drawn = torch.randn(shape, generator=numbers) * 3 / shape[-1] ** 0.5
        tensors[name] = drawn if len(shape) > 1 else 1 + 0.2 * drawn
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


@dataclass
class MeansStand(Stand):
    """Such a checkpoint on the backend that can serve it."""

    def llm(self, **options: Any) -> LLM:
        return super().llm(**{"attention": MEANS, **options})

    @cached_property
    def heads(self) -> list[str]:
        return []


def dense_mix(model: Decoder) -> Mix:
    """The model's `mix` for one whole text: a second, independent implementation of the layers."""

    def mix(layer: int, inputs: Any) -> torch.Tensor:
        from stridelm.kernels.plain import roped

        state, rows = model.layer_states[layer], len(inputs if torch.is_tensor(inputs) else inputs.qkv_NXD)
        apart = torch.arange(rows)[:, None] - torch.arange(rows)
        sees = (apart >= 0) & (apart < (state.window or rows))
        if isinstance(state, MeanState):
            return (sees.to(inputs.dtype) / sees.sum(1, keepdim=True)) @ inputs
        assert isinstance(state, HeadsKV)
        q, k, v = roped(inputs.qkv_NXD, inputs.rope)
        k, v = (x.repeat_interleave(state.heads // state.kv_heads, 1) for x in (k, v))
        scores = torch.einsum("nhd,mhd->hnm", q, k) * state.scale
        return torch.einsum("hnm,mhd->nhd", scores.masked_fill(~sees, float("-inf")).softmax(-1), v)

    return mix


@contextmanager
def means_registered() -> Iterator[None]:
    """Model type and backend are registered while the context lasts."""
    MODELS.add(MEANS, build)
    BACKENDS.add(MEANS, MeansAttention)
    try:
        yield
    finally:
        BACKENDS.remove(MEANS)
        MODELS.remove(MEANS)
