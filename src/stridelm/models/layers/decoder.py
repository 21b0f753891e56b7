"""The dense decoder that llama, mistral, qwen2 and qwen3 share, over flat rows.

A row is a token with a position. Which other rows it may see is none of the model's business: it hands what a layer
mixes to `mix` and gets each row's share back. Serving passes attention over pages, training passes dense attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import nn

from stridelm.attention.base import HeadsInput, Mix
from stridelm.cache.layout import HeadsKV, LayerStates
from stridelm.kernels.ops import ACTIVATIONS, Ops, QKRope
from stridelm.kernels.plain import PlainOps
from stridelm.models.layers.linear import Linear
from stridelm.models.layers.rope import Rope, RopeSpec
from stridelm.types import OVERRUN


class Tap(Protocol):
    """Shown the residual stream on its way through the layers, by whoever wants more than the last state."""

    def __call__(self, layer: int, x_NH: torch.Tensor) -> None:
        """x: what layer `layer` reads, before its norm. It is overwritten afterwards: copy what you keep."""
        ...


@dataclass(frozen=True, eq=False)  # hashed by identity: the compiler hashes what it traces
class ModelInput:
    """N rows on their way through a model."""

    ids_N: torch.Tensor
    """int64."""
    positions_N: torch.Tensor
    """int64."""
    mix: Mix
    tap: Tap | None = None


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
    activation: str = "silu"
    """Of the MLP's gate, one of kernels.ops.ACTIVATIONS."""
    extra_modules: int = 0
    """Modules for further tokens that the checkpoint carries beside its layers. They are no part of this decoder."""

    def __post_init__(self) -> None:
        for name in _SIZES:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_attention_heads {self.num_heads} is no multiple of num_key_value_heads {self.num_kv_heads}"
            )
        assert len(self.windows) == self.num_layers and self.activation in ACTIVATIONS


Angles = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Positions [N], and cosines and sines by position [L, D / 2]."""


@dataclass(frozen=True)
class WeightSlot:
    """Where a checkpoint's tensor goes: rows `start` to `stop` of the parameter `name`."""

    name: str
    start: int
    stop: int


class Attention(nn.Module):
    """Grouped-query attention; query, key and value projections are one product."""

    def __init__(self, spec: DecoderSpec, layer: int, reads: int | None = None) -> None:
        """reads: width of what comes in; the hidden size if not given."""
        super().__init__()
        self.layer = layer
        self.heads, self.kv_heads, self.head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        width = (self.heads + 2 * self.kv_heads) * self.head_dim
        self.qkv = Linear(reads or spec.hidden_size, width, bias=spec.qkv_bias)
        self.o = Linear(self.heads * self.head_dim, spec.hidden_size, bias=spec.o_bias)
        self.qk_norm = nn.Parameter(torch.empty(2 * self.head_dim)) if spec.qk_norm else None
        self.eps = spec.norm_eps

    def forward(self, x: torch.Tensor, angles: Angles, mix: Mix) -> torch.Tensor:
        qkv_NXD = self.qkv(x).view(x.shape[0], self.heads + 2 * self.kv_heads, self.head_dim)
        rope = QKRope(self.heads, self.kv_heads, *angles, self.qk_norm, self.eps)
        return self.o(mix(self.layer, HeadsInput(qkv_NXD, rope)).flatten(1))


class GatedMLP(nn.Module):
    """down(activation(gate x) * up x); gate and up are one product."""

    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__()
        self.activation = spec.activation
        self.gate_up = Linear(spec.hidden_size, 2 * spec.intermediate_size, bias=spec.mlp_bias)
        self.down = Linear(spec.intermediate_size, spec.hidden_size, bias=spec.mlp_bias)

    def forward(self, x: torch.Tensor, ops: Ops) -> torch.Tensor:
        return self.down(self.gate_up.gated(x, ops, self.activation))


class Block(nn.Module):
    """Pre-norm block: attention and MLP, each added to the residual stream by the norm that follows."""

    def __init__(self, spec: DecoderSpec, layer: int) -> None:
        super().__init__()
        self.attention_norm = nn.Parameter(torch.empty(spec.hidden_size))
        self.attention = Attention(spec, layer)
        self.mlp_norm = nn.Parameter(torch.empty(spec.hidden_size))
        self.mlp = GatedMLP(spec)


def block_slots(s: DecoderSpec, theirs: str, ours: str) -> Iterator[tuple[str, WeightSlot]]:
    """The tensors of one block, under the prefixes that the checkpoint and the module give it."""
    yield theirs + "input_layernorm.weight", WeightSlot(ours + "attention_norm", 0, s.hidden_size)
    yield from inner_slots(s, theirs, ours)


def inner_slots(s: DecoderSpec, theirs: str, ours: str) -> Iterator[tuple[str, WeightSlot]]:
    """The same without the norm in front."""
    q, kv, mlp = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim, s.intermediate_size
    yield theirs + "post_attention_layernorm.weight", WeightSlot(ours + "mlp_norm", 0, s.hidden_size)
    if s.qk_norm:
        fused = ours + "attention.qk_norm"
        yield theirs + "self_attn.q_norm.weight", WeightSlot(fused, 0, s.head_dim)
        yield theirs + "self_attn.k_norm.weight", WeightSlot(fused, s.head_dim, 2 * s.head_dim)
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


class Decoder(nn.Module):
    """ids and positions -> hidden states -> logits, over flat rows.

    `forward` gives the state after the final norm, [N, hidden]; `logits` turns chosen rows of it into [M, vocab].
    `ops` computes what is done row by row; serving exchanges it for the device's own.
    """

    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__()
        self.spec = spec
        self.ops: Ops = PlainOps()
        # Given a weight it draws none, which on the meta device would import torch's compiler.
        weight = torch.empty(spec.vocab_size, spec.hidden_size)
        self.embed = nn.Embedding(spec.vocab_size, spec.hidden_size, _weight=weight)
        # Steps may reach beyond the context; what they find there is cut.
        self.rope = Rope(spec.rope, spec.max_length + OVERRUN)
        self.blocks = nn.ModuleList(Block(spec, i) for i in range(spec.num_layers))
        self.norm = nn.Parameter(torch.empty(spec.hidden_size))
        self.head = Linear(spec.hidden_size, spec.vocab_size)
        if spec.tied:
            self.tie()

    def tie(self) -> None:
        """Let the head read the embedding's weight."""
        weight = self.embed.weight
        assert isinstance(weight, nn.Parameter)
        self.head.weight = weight

    def forward(self, rows: ModelInput) -> torch.Tensor:
        ops, eps = self.ops, self.spec.norm_eps
        angles = (rows.positions_N, self.rope.cos, self.rope.sin)
        blocks = cast("list[Block]", list(self.blocks))
        norms_behind = [block.attention_norm for block in blocks[1:]] + [self.norm]
        x = self.embed(rows.ids_N)
        h = ops.norm(x, blocks[0].attention_norm, eps)
        for layer, (block, norm) in enumerate(zip(blocks, norms_behind, strict=True)):
            if rows.tap is not None:
                rows.tap(layer, x)
            x, h = ops.add_norm(x, block.attention(h, angles, rows.mix), block.mlp_norm, eps)
            x, h = ops.add_norm(x, block.mlp(h, ops), norm, eps)
        return h

    def logits(self, hidden_MH: torch.Tensor) -> torch.Tensor:
        return self.head(hidden_MH)

    @property
    def layer_states(self) -> LayerStates:
        """What each layer remembers."""
        s = self.spec
        return tuple(HeadsKV.of(s.num_heads, s.num_kv_heads, s.head_dim, window) for window in s.windows)

    def checkpoint_slots(self) -> Iterator[tuple[str, WeightSlot]]:
        """Every tensor of a Hugging Face checkpoint of this family, and where it goes."""
        s = self.spec
        yield "model.embed_tokens.weight", WeightSlot("embed.weight", 0, s.vocab_size)
        for i in range(s.num_layers):
            yield from block_slots(s, f"model.layers.{i}.", f"blocks.{i}.")
        yield "model.norm.weight", WeightSlot("norm", 0, s.hidden_size)
        if not s.tied:
            yield "lm_head.weight", WeightSlot("head.weight", 0, s.vocab_size)
