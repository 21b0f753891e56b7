"""Grouped-query attention (Ainslie et al. 2023, arXiv 2305.13245) with rotary positions, shared by most decoders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import nn

from stridelm.attention.base import HeadsInput, Mix
from stridelm.cache.layout import HeadsKV, LayerState, Shared
from stridelm.kernels.ops import Ops, Parts, QKRope
from stridelm.kernels.row_forms import RowForm, Rows
from stridelm.models.layers.block import MixerSpec, Site, check_sizes
from stridelm.models.layers.linear import Linear
from stridelm.models.layers.rope import Rope, RopeSpec
from stridelm.models.layers.slots import ModelPart, Slots, Split, WeightSlot
from stridelm.parallel.shard import ONE, Shard


@dataclass(frozen=True, kw_only=True)
class HeadsSpec(MixerSpec):
    """Heads of queries, keys and values. Raises ValueError for impossible sizes."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeSpec
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    """Queries and keys are normalised head by head before they are rotated."""
    value_norm: bool = False
    """Values are normalised head by head too, without a weight."""
    keys_as_values: bool = False
    """The keys' projections are also the values', which have no matrix."""
    reads: int | None = None
    """Number of an earlier layer whose keys and values are read; such a layer makes only queries."""
    scale: float | None = None
    """Factor applied to the product of a query and a key; None: the inverse of head_dim's square root."""

    def __post_init__(self) -> None:
        check_sizes(num_attention_heads=self.num_heads, num_key_value_heads=self.num_kv_heads, head_dim=self.head_dim)
        check_sizes(sliding_window=1 if self.window is None else self.window)
        assert self.qk_norm or not self.value_norm
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_attention_heads {self.num_heads} is no multiple of num_key_value_heads {self.num_kv_heads}"
            )
        if not 0 < self.rope.dim <= self.head_dim or self.rope.dim % 2:
            raise ValueError(
                f"head_dim {self.head_dim} and partial_rotary_factor give {self.rope.dim} rotated dimensions; rotation "
                f"needs pairs of them, at least one and at most the whole head"
            )

    @property
    def stored(self) -> tuple[str, ...]:
        """The names of the matrices that make what is stored."""
        if self.reads is not None:
            return ()
        return ("k_proj",) if self.keys_as_values else ("k_proj", "v_proj")

    @property
    def plain(self) -> bool:
        """Whether keys and values are both projected, if it makes any, and values stored as they are."""
        return not self.stored or (len(self.stored) == 2 and not self.value_norm)

    @property
    def unread(self) -> tuple[str, ...]:
        return () if self.reads is None else ("k_proj.", "v_proj.", "k_norm.", "v_norm.")

    def alone(self) -> HeadsSpec:
        return replace(self, window=None, reads=None)

    @property
    def needs(self) -> Mapping[str, Any]:
        return {"normed_heads": self.qk_norm}

    def state(self, shard: Shard = ONE) -> LayerState:
        heads = shard.of("num_attention_heads", self.num_heads)
        kv_heads = shard.of("num_key_value_heads", self.num_kv_heads)
        own = HeadsKV.of(heads, kv_heads, self.head_dim, self.window, scale=self.scale)
        return own if self.reads is None else Shared(own.group, own.window, self.reads, own)

    def build(self, site: Site) -> Attention:
        return Attention(self, site)


class Attention(ModelPart):
    """Query, key and value projections are one product."""

    keeps_bits: ClassVar[bool] = True

    def __init__(self, spec: HeadsSpec, site: Site) -> None:
        super().__init__()
        self.spec, self.layer, self.eps, self.shard = spec, site.layer, site.eps, site.shard
        self.width = site.width
        self.heads, self.head_dim = site.shard.of("num_attention_heads", spec.num_heads), spec.head_dim
        self.kv_heads = site.shard.of("num_key_value_heads", spec.num_kv_heads) if spec.stored else 0
        reads, stored = site.reads or site.width, site.weight_format
        q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        rows, columns = Split.rows(site.shard), Split.columns(site.shard)
        outs = {"q_proj": q, **dict.fromkeys(spec.stored, kv)}
        self.qkv = Linear(reads, outs, bias=spec.qkv_bias, weight_format=stored, split=rows)
        self.o = Linear(q, {"o_proj": site.width}, bias=spec.o_bias, weight_format=stored, split=columns)
        normed = (2 if spec.stored else 1) * self.head_dim
        self.qk_norm = nn.Parameter(torch.empty(normed)) if spec.qk_norm else None
        self._rope = (site.ropes.of(spec.rope),)  # in a tuple: layers share it, so it must not become a submodule

    @property
    def rope(self) -> Rope:
        return self._rope[0]

    @property
    def row_form(self) -> RowForm | None:
        return self.qkv.row_form

    def forward(self, x: Rows, positions_N: torch.Tensor, mix: Mix, ops: Ops) -> torch.Tensor:
        mixed_NC = self._mixed(x, positions_N, mix)
        return self.shard.sum(self.o(mixed_NC)) if len(mixed_NC) else mixed_NC.new_empty(0, self.width)

    def parts(self, x: Rows, positions_N: torch.Tensor, mix: Mix, ops: Ops) -> torch.Tensor | Parts:
        """The same, or its Parts."""
        mixed_NC = self._mixed(x, positions_N, mix)
        return self.o.parts(mixed_NC) if len(mixed_NC) else mixed_NC.new_empty(0, self.width)

    def _mixed(self, x: Rows, positions_N: torch.Tensor, mix: Mix) -> torch.Tensor:
        """The heads' values; of no rows if the rows were only to be stored."""
        rope = self.rope
        qk = QKRope(
            self.heads,
            self.kv_heads,
            positions_N,
            rope.cos,
            rope.sin,
            self.qk_norm,
            self.eps,
            self.spec.value_norm,
            self.spec.keys_as_values,
        )
        rows = x.shape[0]
        qkv_NXD = self.qkv(x).view(rows, qk.projected, self.head_dim)
        return mix(self.layer, HeadsInput(qkv_NXD, qk)).flatten(1)

    def slots(self, theirs: str = "") -> Slots:
        if self.qk_norm is not None:
            yield theirs + "q_norm.weight", WeightSlot("qk_norm", 0, self.head_dim)
            if self.kv_heads:
                yield theirs + "k_norm.weight", WeightSlot("qk_norm", self.head_dim, 2 * self.head_dim)
        yield from self._inner("qkv", theirs)
        yield from self._inner("o", theirs)
