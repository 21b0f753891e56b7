"""AMX instructions for compiled code: products of small tiles of bfloat16, summed in float32 (Intel, Instruction Set
Extensions Programming Reference, chapter 3).

Tiles are registers that each thread configures before it uses them and releases afterwards. A TDPBF16PS adds the
products of 32 inputs to each sum: even inputs one after another, odd ones likewise, then both to the sum. So a sum's
bits depend on the order of its inputs alone, whatever the number of rows, and are those of oneDNN's AMX kernels.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"
from __future__ import annotations

from functools import cache

import numpy as np
import torch
from llvmlite import ir
from numba.core import cgutils, types
from numba.core.extending import intrinsic, register_jitable

from stridelm.kernels.host.address import start_of

ROWS = LAYER_ROWS = 16
"""Most rows of a tile, and so of a product by itself and of layers that are one call."""
PAIRS = 16
"""Pairs of inputs in a block: a tile has 64 bytes per row."""
OUTPUTS = 32
"""Outputs in a block, in two tiles."""
FEW = 4096
"""Outputs of all rows together, up to which a product by itself is faster than oneDNN's: it rounds them one by one."""

_BYTE, _LONG = ir.IntType(8), ir.IntType(64)
_SUMS, _ROWS, _WEIGHTS = (0, 1), 2, (3, 4)
"""Numbers of the tiles."""


@cache
def is_available() -> bool:
    """Whether this CPU has AMX for bfloat16, and the operating system lets this process use it."""
    supported = getattr(torch.cpu, "_is_amx_tile_supported", bool)() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return bool(supported and torch.cpu._init_amx())


@register_jitable
def configuration(rows):
    """[64] uint8, for tiles of so many rows."""
    found = np.zeros(64, np.uint8)
    found[0] = 1  # the palette of eight tiles
    for tile in range(5):
        found[16 + 2 * tile] = 64  # bytes per row
        found[48 + tile] = rows if tile <= _ROWS else PAIRS
    return found


@intrinsic
def configure(typing, configuration):
    """Configure this thread's tiles."""

    def generate(context, builder, signature, arguments):
        _call(builder, "ldtilecfg", start_of(context, builder, signature, arguments, 0))
        return context.get_dummy_value()

    return types.void(configuration), generate


@intrinsic
def release(typing):
    def generate(context, builder, signature, arguments):
        _call(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def multiply(typing, x_NI, weight_OIPB, block, following, sums_NB):
    """Write the products of all rows with one block of outputs to `sums`; `following` is not looked at. x_NI: uint16;
    weight_OIPB: uint32, each a pair of inputs, in blocks of PAIRS pairs by OUTPUTS outputs; sums_NB: float32. I is a
    multiple of 2 PAIRS."""

    def generate(context, builder, signature, arguments):
        x, weight, sums = (start_of(context, builder, signature, arguments, i) for i in (0, 1, 4))
        array = context.make_array(signature.args[1])(context, builder, arguments[1])
        blocks = cgutils.unpack_tuple(builder, array.shape)[1]
        row_bytes, block_bytes = builder.mul(blocks, _LONG(4 * PAIRS)), _LONG(4 * PAIRS * OUTPUTS)
        weight = builder.gep(weight, [builder.mul(builder.mul(arguments[2], blocks), block_bytes)])
        for tile in _SUMS:
            _call(builder, "tilezero", _BYTE(tile))
        with cgutils.for_range(builder, blocks) as loop:
            rows = builder.gep(x, [builder.mul(loop.index, _LONG(4 * PAIRS))])
            _call(builder, "tileloadd64", _BYTE(_ROWS), rows, row_bytes)
            for half, (total, part) in enumerate(zip(_SUMS, _WEIGHTS)):
                at = builder.add(builder.mul(loop.index, block_bytes), _LONG(2 * OUTPUTS * half))
                _call(builder, "tileloadd64", _BYTE(part), builder.gep(weight, [at]), _LONG(4 * OUTPUTS))
                _call(builder, "tdpbf16ps", _BYTE(total), _BYTE(_ROWS), _BYTE(part))
        for half, total in enumerate(_SUMS):
            at = builder.gep(sums, [_LONG(2 * OUTPUTS * half)])
            _call(builder, "tilestored64", _BYTE(total), at, _LONG(4 * OUTPUTS))
        return context.get_dummy_value()

    return types.void(x_NI, weight_OIPB, types.intp, types.intp, sums_NB), generate


def _call(builder, name, *arguments):
    kind = ir.FunctionType(ir.VoidType(), [each.type for each in arguments])
    builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}"), arguments)
