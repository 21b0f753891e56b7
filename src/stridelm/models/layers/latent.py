"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

A row is cached as a latent c, from which head h would expand a key U_h c and a value V_h c, and a rotated key that all
heads share. Since q . (U_h c) = (U_h^T q) . c, the expansion may be applied to the query; and since weights sum to one
over rows, V_h to the weighted sum of latents. Which way a row goes is for the attention backend to say: with absorbed
expansions a latent is read once for all heads, with expanded keys and values a long prompt takes less arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from stridelm.attention.base import LatentInput, Mix
from stridelm.cache.layout import LatentKV, group_of
from stridelm.kernels.ops import LatentRope, Ops, Parts
from stridelm.kernels.row_forms import RowForm, Rows
from stridelm.models.layers.block import MixerSpec, Site, check_sizes
from stridelm.models.layers.head_linear import HeadLinear
from stridelm.models.layers.linear import Linear
from stridelm.models.layers.products import takes_few_rows
from stridelm.models.layers.rope import RopeSpec
from stridelm.models.layers.slots import ModelPart, Slots, Split
from stridelm.parallel.shard import ONE, Shard

NORM_EPS = 1e-6
"""Epsilon of the norms inside the mixer, whatever that of the block's norms is."""
KEYS, VALUES = 0, 1
"""Parts of the expansion."""


@dataclass(frozen=True, kw_only=True)
class LatentSpec(MixerSpec):
    """Heads that share one latent row per token. Raises ValueError for impossible sizes."""

    num_heads: int
    rank: int
    """Width of a latent."""
    nope_dim: int
    """Width of the part of a head's query and key that is not rotated."""
    rope_dim: int
    """Width of the part that is rotated."""
    value_dim: int
    q_rank: int | None = None
    """Width of the latent from which queries are made; None: they are projected directly."""
    rope: RopeSpec
    interleaved: bool = True
    """Rotated dimensions are paired with their neighbours."""
    bias: bool = False
    """Of the projections to latents, and of the output's."""
    scale: float
    """Factor applied to the product of a query and a key."""

    def __post_init__(self) -> None:
        check_sizes(
            num_attention_heads=self.num_heads,
            kv_lora_rank=self.rank,
            qk_nope_head_dim=self.nope_dim,
            qk_rope_head_dim=self.rope_dim,
            v_head_dim=self.value_dim,
            q_lora_rank=1 if self.q_rank is None else self.q_rank,
        )
        if self.rope_dim % 2:
            raise ValueError(f"qk_rope_head_dim {self.rope_dim} is odd; rotation needs pairs of dimensions")
        if self.rope.dim != self.rope_dim:
            raise ValueError("partial_rotary_factor other than 1 is not supported for latent attention")

    def state(self, shard: Shard = ONE) -> LatentKV:
        heads = shard.of("num_attention_heads", self.num_heads)
        widths = self.nope_dim, self.value_dim
        group = group_of(self.window)
        return LatentKV(group, self.window, heads, self.rank, self.rope_dim, self.scale, expands=widths)

    def build(self, site: Site) -> LatentAttention:
        return LatentAttention(self, site)


class LatentExpansion(HeadLinear):
    """What attention takes for an `Expansion`."""

    def absorb(self, q_NHD: torch.Tensor) -> torch.Tensor:
        return self.transposed(KEYS, q_NHD)

    def values(self, mixed_NHR: torch.Tensor) -> torch.Tensor:
        return self(VALUES, mixed_NHR)

    def absorbs_few(self, q_NHD: torch.Tensor) -> torch.Tensor | None:
        return self.matrices(KEYS) if takes_few_rows(q_NHD) else None

    def expand(self, latents_LR: torch.Tensor, first: int, last: int) -> torch.Tensor:
        height = sum(self.parts)
        weight = self.weight[first * height : last * height]
        return F.linear(latents_LR, weight).view(latents_LR.shape[0], last - first, height)


class LatentAttention(ModelPart):
    keeps_bits: ClassVar[bool] = True

    def __init__(self, spec: LatentSpec, site: Site) -> None:
        super().__init__()
        self.spec, self.layer, self.shard = spec, site.layer, site.shard
        self.heads = spec.state(self.shard).heads
        self.row_width = spec.rank + spec.rope_dim
        reads, stored = site.reads or site.width, site.weight_format
        rows, columns = Split.rows(site.shard), Split.columns(site.shard)
        # What reads the layer's input is one product where it can be: the projection to a latent row is so narrow that
        # by itself it would leave most of a GPU idle.
        queries, latents = spec.num_heads * (spec.nope_dim + spec.rope_dim), {"kv_a_proj_with_mqa": self.row_width}
        self.q: Linear | None = None
        self.q_norm: nn.Parameter | None = None
        if spec.q_rank is not None:
            latents = {"q_a_proj": spec.q_rank, **latents}
            self.q_norm = nn.Parameter(torch.empty(spec.q_rank))
            self.q = Linear(spec.q_rank, {"q_b_proj": queries}, weight_format=stored, split=rows)
        elif site.shard.world > 1 or spec.bias:  # queries are cut over ranks, and have no bias
            self.q = Linear(reads, {"q_proj": queries}, weight_format=stored, split=rows)
        else:
            latents = {"q_proj": queries, **latents}
        self.project = Linear(reads, latents, bias=spec.bias, weight_format=stored)
        self.latent_norm = nn.Parameter(torch.empty(spec.rank))
        self.expansion = LatentExpansion("kv_b_proj", spec.num_heads, spec.rank, (spec.nope_dim, spec.value_dim), rows)
        outs = {"o_proj": site.width}
        self.o = Linear(spec.num_heads * spec.value_dim, outs, bias=spec.bias, weight_format=stored, split=columns)
        self._rope = (site.ropes.of(spec.rope),)  # in a tuple: layers share it, so it must not become a submodule

    @property
    def row_form(self) -> RowForm | None:
        """That of all products with the layer's input."""
        form = self.project.row_form
        reads_too = self.q if self.q_norm is None else None
        return form if reads_too is None or reads_too.row_form is form else None

    def forward(self, x: Rows, positions_N: torch.Tensor, mix: Mix, ops: Ops) -> torch.Tensor:
        return self.shard.sum(self.o(self._mixed(x, positions_N, mix, ops)))

    def parts(self, x: Rows, positions_N: torch.Tensor, mix: Mix, ops: Ops) -> torch.Tensor | Parts:
        """The same, or its Parts."""
        return self.o.parts(self._mixed(x, positions_N, mix, ops))

    def _mixed(self, x: Rows, positions_N: torch.Tensor, mix: Mix, ops: Ops) -> torch.Tensor:
        spec, rope = self.spec, self._rope[0]
        made = self.project(x)
        q, rows_NC = made.split((made.shape[1] - self.row_width, self.row_width), dim=1)
        if self.q is not None:
            q = self.q(x if self.q_norm is None else self._normed(q, self.q_norm, ops))
        q_NHD = q.view(x.shape[0], self.heads, spec.nope_dim + spec.rope_dim)
        q_nope, q_turned = q_NHD.split((spec.nope_dim, spec.rope_dim), dim=2)
        latent_rope = LatentRope(positions_N, rope.cos, rope.sin, self.latent_norm, NORM_EPS, spec.interleaved)
        inputs = LatentInput(q_nope, q_turned, rows_NC, latent_rope, self.expansion)
        return mix(self.layer, inputs).flatten(1)

    def _normed(self, q: torch.Tensor, weight: torch.Tensor, ops: Ops) -> Rows:
        assert self.q is not None
        form = self.q.row_form
        if form is None:
            return ops.norm(q, weight, NORM_EPS)
        return ops.norm_quantised(q, weight, NORM_EPS, form)[1]

    def slots(self, theirs: str = "") -> Slots:
        yield from self._inner("project", theirs)
        if self.q_norm is not None:
            yield from self._own("q_norm", theirs + "q_a_layernorm.weight")
        if self.q is not None:
            yield from self._inner("q", theirs)
        yield from self._own("latent_norm", theirs + "kv_a_layernorm.weight")
        yield from self._inner("expansion", theirs)
        yield from self._inner("o", theirs)
