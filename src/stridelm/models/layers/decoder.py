"""The dense decoder that llama, mistral, qwen2 and qwen3 share, over flat rows.

A row is a token with a position. Which other rows it may see is none of the model's business: it hands queries, keys
and values to `attend` and gets values back. Serving passes attention over pages, training passes dense attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

from stridelm.models.layers.linear import Linear
from stridelm.models.layers.norm import RMSNorm
from stridelm.models.layers.rope import Rope, RopeSpec, rotate


class Attend(Protocol):
    """Causal attention of one layer over rows and whatever KV the caller keeps."""

    def __call__(self, layer: int, q_NHD: torch.Tensor, k_NGD: torch.Tensor, v_NGD: torch.Tensor) -> torch.Tensor:
        """H query heads, G key/value heads; returns [N, H, D]."""
        ...


@dataclass(frozen=True)
class LayerKV:
    """What one layer keeps a token: its page group, its row layout and how far back it sees (None: everything)."""

    group: str
    kv_heads: int
    head_dim: int
    window: int | None = None

    def bytes_per_token(self, itemsize: int) -> int:
        return 2 * self.kv_heads * self.head_dim * itemsize


_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "max_length",
)
"""Fields of DecoderSpec that no model can do without."""


@dataclass(frozen=True)
class DecoderSpec:
    """A dense decoder's shape, read from a Hugging Face config by the architecture's own file."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: RopeSpec
    max_length: int
    windows: tuple[int | None, ...]
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tied: bool = False

    def __post_init__(self) -> None:
        for name in _SIZES:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_attention_heads {self.num_heads} is no multiple of num_key_value_heads {self.num_kv_heads}"
            )
        assert len(self.windows) == self.num_layers


@dataclass(frozen=True)
class WeightSlot:
    """Where a checkpoint's tensor goes: rows `start` to `stop` of the parameter `name`."""

    name: str
    start: int
    stop: int


class Attention(nn.Module):
    """Grouped-query attention; query, key and value projections are one product."""

    def __init__(self, spec: DecoderSpec, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.heads, self.kv_heads, self.head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        width = (self.heads + 2 * self.kv_heads) * self.head_dim
        self.qkv = Linear(spec.hidden_size, width, bias=spec.qkv_bias)
        self.o = Linear(self.heads * self.head_dim, spec.hidden_size, bias=spec.o_bias)
        self.q_norm = RMSNorm(self.head_dim, spec.norm_eps) if spec.qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, spec.norm_eps) if spec.qk_norm else None

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend) -> torch.Tensor:
        heads, kv_heads = self.heads, self.kv_heads
        rows_NHD = self.qkv(x).view(x.shape[0], heads + 2 * kv_heads, self.head_dim)
        qk, v = rows_NHD.split((heads + kv_heads, kv_heads), dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            qk = self._normalise(qk, self.q_norm, self.k_norm)
        q, k = rotate(qk, cos, sin).split((heads, kv_heads), dim=1)
        return self.o(attend(self.layer, q, k, v).flatten(1))

    def _normalise(self, qk_NHD: torch.Tensor, q_norm: RMSNorm, k_norm: RMSNorm) -> torch.Tensor:
        """Both norms in one pass: each head by its own length, queries and keys by their own weight."""
        weight = torch.cat((q_norm.weight.expand(self.heads, -1), k_norm.weight.expand(self.kv_heads, -1)))
        return F.rms_norm(qk_NHD, (self.head_dim,), None, q_norm.eps) * weight


class GatedMLP(nn.Module):
    """down(silu(gate x) * up x) (Shazeer 2020, arXiv 2002.05202); gate and up are one product."""

    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__()
        self.gate_up = Linear(spec.hidden_size, 2 * spec.intermediate_size, bias=spec.mlp_bias)
        self.down = Linear(spec.intermediate_size, spec.hidden_size, bias=spec.mlp_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """Pre-norm block: attention and MLP, each added to the residual stream."""

    def __init__(self, spec: DecoderSpec, layer: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(spec.hidden_size, spec.norm_eps)
        self.attention = Attention(spec, layer)
        self.mlp_norm = RMSNorm(spec.hidden_size, spec.norm_eps)
        self.mlp = GatedMLP(spec)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin, attend)
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    """ids and positions -> hidden states -> logits, over flat rows.

    `forward` gives the state after the final norm, [N, hidden]; `logits` turns chosen rows of it into [M, vocab].
    """

    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__()
        self.spec = spec
        # Given a weight it draws none, which on the meta device would import torch's compiler.
        weight = torch.empty(spec.vocab_size, spec.hidden_size)
        self.embed = nn.Embedding(spec.vocab_size, spec.hidden_size, _weight=weight)
        self.rope = Rope(spec.rope)
        self.blocks = nn.ModuleList(Block(spec, i) for i in range(spec.num_layers))
        self.norm = RMSNorm(spec.hidden_size, spec.norm_eps)
        self.head = Linear(spec.hidden_size, spec.vocab_size)
        if spec.tied:
            self.tie()

    def tie(self) -> None:
        """Let the head read the embedding's weight."""
        weight = self.embed.weight
        assert isinstance(weight, nn.Parameter)
        self.head.weight = weight

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        x = self.embed(ids)
        cos, sin = self.rope(positions, x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin, attend)
        return self.norm(x)

    def logits(self, hidden_MH: torch.Tensor) -> torch.Tensor:
        return self.head(hidden_MH)

    @property
    def kv_layout(self) -> tuple[LayerKV, ...]:
        """Each layer's KV, in layer order. One page group for now: windows are masked, not freed."""
        s = self.spec
        return tuple(LayerKV("main", s.num_kv_heads, s.head_dim, window) for window in s.windows)

    def checkpoint_slots(self) -> Iterator[tuple[str, WeightSlot]]:
        """Every tensor of a Hugging Face checkpoint of this family, and where it goes."""
        s = self.spec
        q, kv, mlp = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim, s.intermediate_size
        yield "model.embed_tokens.weight", WeightSlot("embed.weight", 0, s.vocab_size)
        for i in range(s.num_layers):
            theirs, ours = f"model.layers.{i}.", f"blocks.{i}."
            yield theirs + "input_layernorm.weight", WeightSlot(ours + "attention_norm.weight", 0, s.hidden_size)
            yield theirs + "post_attention_layernorm.weight", WeightSlot(ours + "mlp_norm.weight", 0, s.hidden_size)
            if s.qk_norm:
                yield theirs + "self_attn.q_norm.weight", WeightSlot(ours + "attention.q_norm.weight", 0, s.head_dim)
                yield theirs + "self_attn.k_norm.weight", WeightSlot(ours + "attention.k_norm.weight", 0, s.head_dim)
            for kind in ("weight", "bias") if s.qkv_bias else ("weight",):
                fused = f"{ours}attention.qkv.{kind}"
                yield f"{theirs}self_attn.q_proj.{kind}", WeightSlot(fused, 0, q)
                yield f"{theirs}self_attn.k_proj.{kind}", WeightSlot(fused, q, q + kv)
                yield f"{theirs}self_attn.v_proj.{kind}", WeightSlot(fused, q + kv, q + 2 * kv)
            for kind in ("weight", "bias") if s.o_bias else ("weight",):
                yield f"{theirs}self_attn.o_proj.{kind}", WeightSlot(f"{ours}attention.o.{kind}", 0, s.hidden_size)
            for kind in ("weight", "bias") if s.mlp_bias else ("weight",):
                fused = f"{ours}mlp.gate_up.{kind}"
                yield f"{theirs}mlp.gate_proj.{kind}", WeightSlot(fused, 0, mlp)
                yield f"{theirs}mlp.up_proj.{kind}", WeightSlot(fused, mlp, 2 * mlp)
                yield f"{theirs}mlp.down_proj.{kind}", WeightSlot(f"{ours}mlp.down.{kind}", 0, s.hidden_size)
        yield "model.norm.weight", WeightSlot("norm.weight", 0, s.hidden_size)
        if not s.tied:
            yield "lm_head.weight", WeightSlot("head.weight", 0, s.vocab_size)
