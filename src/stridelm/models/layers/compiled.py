"""Blocks that run as one compiled call on a CPU, for few rows: attention and a gated MLP, whose weights are packed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from stridelm.attention.base import Mix, PagedLayers
from stridelm.kernels.host import columns
from stridelm.kernels.ops import ACTIVATIONS
from stridelm.kernels.row_forms import Rows, dense_of
from stridelm.models.layers.attention import Attention
from stridelm.models.layers.block import Block, HasBlocks, Stream
from stridelm.models.layers.linear import DENSE, Linear, set_products
from stridelm.models.layers.mlp import GatedMLP
from stridelm.models.layers.products import PackedProduct
from stridelm.parallel.shard import ONE

if TYPE_CHECKING:
    from stridelm.kernels.host.product import FewRows


def make_ready(model: nn.Module, *, deterministic: bool) -> None:
    """Freeze a model or a head that has its weights, and choose how it is run. Raises ValueError as `set_products`."""
    model.requires_grad_(False).eval()
    _fill_up_blocks(model)
    set_products(model, deterministic=deterministic)
    _compile_blocks(model)


def _fill_up_blocks(model: nn.Module) -> None:
    """Give MLPs as many inner features as compiled calls take at once."""
    for module in model.modules():
        mlp = module.mlp if isinstance(module, Block) else None
        if isinstance(mlp, GatedMLP) and mlp.gate_up.format is DENSE and mlp.down.format is DENSE:
            if mlp.down.weight.device.type == "cpu" and mlp.down.weight.dtype == torch.bfloat16:
                mlp.fill_up(columns.MLP_WIDTHS)


def _compile_blocks(model: nn.Module) -> None:
    """Let each block that can be one call be one, and all of a model's or a head's too."""
    for module in model.modules():
        if isinstance(module, Block):
            module.compiled = CompiledLayers.of([module])
        elif isinstance(module, HasBlocks):
            module.compiled = CompiledLayers.of([block for block in module.blocks if isinstance(block, Block)])


class CompiledLayers:
    """Consecutive blocks, with their weights as the compiled call takes them (kernels/host/layer.py)."""

    def __init__(self, blocks: Sequence[Block], parts: Sequence[_Parts]) -> None:
        self.layers = tuple(block.layer for block in blocks)
        self.max_rows = min(product.max_rows for part in parts for product in part.products)
        self._blocks, self._parts = blocks, parts
        self._reads = any(block.mixer_norm is None for block in blocks)
        self._changes_sums = any(block.spec.norms_after or block.spec.scaled for block in blocks)
        self._some: dict[tuple[int, int], CompiledLayers] = {(0, len(blocks)): self}

    @classmethod
    def of(cls, blocks: Sequence[Block]) -> CompiledLayers | None:
        """None if a block has other parts, or products that compiled code cannot call."""
        parts = [part for part in map(_Parts.of, blocks) if part is not None]
        return cls(blocks, parts) if parts and len(parts) == len(blocks) else None

    @cached_property
    def _table(self) -> np.ndarray[Any, Any]:
        """Made by the first call: a head's rotary tables are computed after its products are chosen."""
        return np.array([part.row() for part in self._parts])

    def some(self, start: int, stop: int) -> CompiledLayers:
        if (start, stop) not in self._some:
            self._some[start, stop] = CompiledLayers(self._blocks[start:stop], self._parts[start:stop])
        return self._some[start, stop]

    def __call__(
        self,
        stream: Stream,
        positions_N: torch.Tensor,
        mix: Mix,
        norm_H: torch.Tensor | None = None,
        wanted_M: torch.Tensor | None = None,
        read_NC: Rows | None = None,
    ) -> torch.Tensor | None:
        if not (0 < stream.x.shape[0] <= self.max_rows and isinstance(mix, PagedLayers)):
            return None
        if self._reads and not (isinstance(read_NC, torch.Tensor) and len(self.layers) == 1):
            return None
        if wanted_M is not None and not (len(wanted_M) and len(self.layers) == 1):
            return None
        if self._changes_sums and (norm_H is None or stream.waits):  # only the call itself does what it defers
            return None
        x, delta, waiting = stream.parts()
        assert not (self._reads and waiting)
        kept = x if wanted_M is None else x.new_empty(len(wanted_M), x.shape[1])
        out = delta if norm_H is None else torch.empty_like(kept)
        dtype = torch.bfloat16
        call = [
            *x.shape,
            columns.address(positions_N, torch.int64),
            columns.bits(stream.eps),
            columns.address(x, dtype),
            columns.address(delta, dtype),
            int(waiting),
            0 if norm_H is None else columns.address(norm_H, dtype),
            columns.address(out, dtype),
            0 if wanted_M is None else columns.address(wanted_M, torch.int64),
            len(kept),
            columns.address(kept, dtype),
            *((0, 0) if read_NC is None else (columns.address(dense_of(read_NC), dtype), read_NC.shape[1])),
        ]
        if not mix.run_layers(self.layers, self._table, call, wanted_M):
            return None
        stream.become(kept, delta[: len(kept)])
        return out


class _Parts:
    """What a block consists of, if it is attention and a gated MLP."""

    def __init__(self, block: Block, attention: Attention, mlp: GatedMLP, products: list[FewRows]) -> None:
        self.block, self.attention, self.mlp, self.products = block, attention, mlp, products

    @classmethod
    def of(cls, block: Block) -> _Parts | None:
        attention, mlp = block.mixer, block.mlp
        if not (isinstance(attention, Attention) and isinstance(mlp, GatedMLP)):
            return None
        linears = (attention.qkv, attention.o, mlp.gate_up, mlp.down)
        products = [few for few in map(_few, linears) if few is not None]
        plain = attention.spec.plain and block.spec.given is None and attention.shard == mlp.shard == ONE
        able = plain and len(products) == len(linears) and products[2].splits_into(2)
        return cls(block, attention, mlp, products) if able else None

    def row(self) -> list[int]:
        """Of the table."""
        qkv, o, gate_up, down = self.products
        attention, mlp, rope = self.attention, self.mlp, self.attention.rope
        found = {
            columns.MIXER_NORM: _address(self.block.mixer_norm),
            columns.QKV: qkv.address,
            columns.QKV_BIAS: _address(attention.qkv.bias),
            columns.QK_NORMS: _address(attention.qk_norm),
            columns.QK_EPS: columns.bits(attention.eps),
            columns.COS: _address(rope.cos),
            columns.SIN: _address(rope.sin),
            columns.ROTATED: rope.spec.dim,
            columns.HEADS: attention.heads,
            columns.KV_HEADS: attention.kv_heads,
            columns.HEAD_SIZE: attention.head_dim,
            columns.OUT: o.address,
            columns.OUT_BIAS: _address(attention.o.bias),
            columns.MLP_NORM: _address(self.block.mlp_norm),
            columns.GATE_UP: gate_up.address,
            columns.GATE_UP_BIAS: _address(mlp.gate_up.bias),
            columns.MLP_WIDTH: gate_up.outputs // 2,
            columns.ACTIVATION: ACTIVATIONS.index(mlp.activation),
            columns.DOWN: down.address,
            columns.DOWN_BIAS: _address(mlp.down.bias),
            columns.AFTER_MIXER: _address(self.block.after_mixer),
            columns.AFTER_MLP: _address(self.block.after_mlp),
            columns.FACTOR: _address(self.block.scalar),
        }
        return [found[column] for column in range(len(found))]


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else columns.address(tensor, tensor.dtype)


def _few(linear: Linear) -> FewRows | None:
    product = linear.product
    return product.few if isinstance(product, PackedProduct) else None
