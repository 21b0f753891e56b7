"""Products of few rows with a bfloat16 weight, from the memory in which oneDNN has packed it.

For few rows a product is as fast as its weight can be read. oneDNN takes 15 microseconds more for each call, and its
calls cannot be made from compiled code (layer.py).

Legend: N rows, I inputs, O outputs; a weight is pairs of inputs: [O / 32, I / 32, 16, 32] with AMX, [O / 64, I / 32,
16, 64] with AVX512-BF16 alone.
"""

# mypy: disable-error-code="no-untyped-def,call-arg,unreachable"
from __future__ import annotations

import ctypes
from typing import Any, ClassVar

import numpy as np
import torch
from numba import prange

from stridelm.kernels.host import simd
from stridelm.kernels.host.arithmetic import follow_torch, in_order, kernel, narrow, widen
from stridelm.kernels.host.memory import NO_BIAS, array


@in_order
def multiply_block(block, ahead, x_NI, weight_OIPB, bias_O, sums_NB, out_NO, first):
    """Write the products with one block of outputs to columns of `out` from `first` on, as far as it has any. The
    thread's tiles are configured; sums: float32, overwritten. ahead: how many blocks later the thread's next one is."""
    simd.multiply(x_NI, weight_OIPB, block, min(block + ahead, weight_OIPB.shape[0] - 1), sums_NB)
    for row in range(out_NO.shape[0]):
        for i in range(min(simd.OUTPUTS, out_NO.shape[1] - first)):
            total = sums_NB[row, i]
            if bias_O.shape[0]:
                total += widen(bias_O[block * simd.OUTPUTS + i])
            out_NO[row, first + i] = narrow(total, out_NO)


@kernel
def product(x_NI, weight_OIPB, bias_O, out_NO):
    """x W^T + bias, which may be empty. N is at most FewRows.max_rows."""
    rows = out_NO.shape[0]
    configuration = simd.configuration(rows)
    for block in prange(weight_OIPB.shape[0]):
        sums = np.empty((rows, simd.OUTPUTS), np.float32)
        simd.configure(configuration)
        multiply_block(block, 1, x_NI, weight_OIPB, bias_O, sums, out_NO, block * simd.OUTPUTS)
        simd.release()


class FewRows:
    """A weight that oneDNN has packed, as the kernel reads it."""

    max_rows: ClassVar[int] = simd.LAYER_ROWS

    def __init__(self, weight_OIPB: np.ndarray[Any, Any], outputs: int) -> None:
        self.weight, self.outputs = weight_OIPB, outputs

    @classmethod
    def of(cls, packed: torch.Tensor, shape: torch.Size) -> FewRows | None:
        """packed: shares its memory, so it must be kept. None if this CPU has no instructions for it, or the weight
        cannot be packed as the kernel needs it. Whether it is packed like that oneDNN does not say: it has to be
        tried."""
        (outputs, inputs), pairs = shape, 2 * simd.PAIRS
        blocks = (-(-outputs // simd.OUTPUTS), inputs // pairs, simd.PAIRS, simd.OUTPUTS)
        nbytes = torch.ops.mkldnn._nbytes(packed)
        if inputs % pairs or nbytes != 4 * np.prod(blocks) or not simd.is_available():
            return None
        memory = (ctypes.c_uint32 * (nbytes // 4)).from_address(torch.ops.mkldnn.data_ptr(packed))
        return cls(np.frombuffer(memory, np.uint32).reshape(blocks), outputs)

    @property
    def address(self) -> int:
        return self.weight.ctypes.data

    def is_fast(self, rows: int) -> bool:
        """Whether so many rows by themselves are multiplied at least as fast as by oneDNN."""
        return 0 < rows <= simd.ROWS and rows * self.outputs <= simd.FEW

    def splits_into(self, parts: int) -> bool:
        """Whether so many equal parts of the outputs each begin with a block."""
        return self.outputs % (parts * simd.OUTPUTS) == 0

    def __call__(self, x_NI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
        out = x_NI.new_empty(x_NI.shape[0], self.outputs)
        follow_torch()
        product(array(x_NI.contiguous()), self.weight, NO_BIAS if bias_O is None else array(bias_O), array(out))
        return out
