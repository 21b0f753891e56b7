"""Blocks that run as one compiled call on a CPU, for few rows: attention and a gated MLP, whose weights are packed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from stridelm.attention.base import Mix, PagedLayers
from stridelm.kernels.host.memory import NO_BIAS, NO_NORMS, array
from stridelm.kernels.ops import ACTIVATIONS
from stridelm.models.layers.attention import Attention
from stridelm.models.layers.block import Block, Stream
from stridelm.models.layers.linear import Linear
from stridelm.models.layers.mlp import GatedMLP
from stridelm.models.layers.products import PackedProduct
from stridelm.parallel.shard import ONE

if TYPE_CHECKING:
    from stridelm.kernels.host.product import FewRows


def compile_blocks(model: nn.Module) -> None:
    """Let each block that can be one call be one. After `set_products`."""
    for block in model.modules():
        if isinstance(block, Block):
            block.compiled = CompiledLayer.of(block)


class CompiledLayer:
    """A block's weights, as the compiled layer takes them (kernels/host/layer.py)."""

    def __init__(self, block: Block, attention: Attention, mlp: GatedMLP, products: list[FewRows]) -> None:
        assert block.mixer_norm is not None
        self.layer = block.layer
        self.max_rows = min(product.max_rows for product in products)
        linears = (attention.qkv, attention.o, mlp.gate_up, mlp.down)
        matrices = [
            each
            for product, linear in zip(products, linears, strict=True)
            for each in (product.weight, NO_BIAS if linear.bias is None else array(linear.bias))
        ]
        norms, rope = attention.qk_norm, attention.rope
        self._norms = (array(block.mixer_norm), array(block.mlp_norm))
        self._products = (
            *matrices,
            ACTIVATIONS.index(mlp.activation),
            NO_NORMS if norms is None else array(norms.view(2, -1)),
            np.float32(attention.eps),
        )
        self._rope = (array(rope.cos), array(rope.sin), attention.heads)

    @classmethod
    def of(cls, block: Block) -> CompiledLayer | None:
        """None if the block has other parts, or products that compiled code cannot call."""
        attention, mlp = block.mixer, block.mlp
        if not (isinstance(attention, Attention) and isinstance(mlp, GatedMLP)) or block.mixer_norm is None:
            return None
        linears = (attention.qkv, attention.o, mlp.gate_up, mlp.down)
        products = [few for few in map(_few, linears) if few is not None]
        able = len(products) == len(linears) and attention.shard == mlp.shard == ONE
        return cls(block, attention, mlp, products) if able else None

    def __call__(self, stream: Stream, positions_N: torch.Tensor, mix: Mix) -> bool:
        if not (0 < stream.x.shape[0] <= self.max_rows and isinstance(mix, PagedLayers)):
            return False
        x, delta, waiting = stream.parts()
        arguments = (
            array(x),
            array(delta),
            waiting,
            *self._norms,
            np.float32(stream.eps),
            *self._products,
            array(positions_N),
            *self._rope,
        )
        if not mix.run_layer(self.layer, arguments):
            return False
        stream.become(x, delta)
        return True


def _few(linear: Linear) -> FewRows | None:
    product = linear.product
    return product.few if isinstance(product, PackedProduct) else None
