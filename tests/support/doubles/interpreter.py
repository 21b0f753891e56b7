"""Triton's interpreter, which runs kernels on a CPU when TRITON_INTERPRET=1 is set before triton is imported.

It computes with numpy, and a law about a kernel must not rest on how numpy's libraries add: OpenBLAS takes another loop
for another number of rows, and which loops those are depends on the processor. So products are made here, and sums read
their rows from memory laid out in one way. What is left to differ between two runs of a kernel is the kernel.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

import numpy as np
import pytest

INTERPRETED = pytest.mark.interpreted
"""The mark of tests that run Triton kernels on a CPU; conftest.py skips them where they cannot be run."""
ON = os.environ.get("TRITON_INTERPRET") == "1"

Array = np.ndarray[Any, Any]


def product(a: Array, b: Array, start: Array) -> Array:
    """start + a @ b, an element's terms added to `start` one after another: the bits of a row depend on that row alone,
    however many stand beside it and however they lie in memory."""
    a, b, total = a.astype(start.dtype), b.astype(start.dtype), start.copy()
    for k in range(a.shape[-1]):
        total += a[..., :, k, None] * b[..., None, k, :]
    return total


def _make_products() -> None:
    from triton.runtime import interpreter

    library = interpreter.InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, d: Any, *settings: Any) -> Any:
        if 8 in (a.dtype.primitive_bitwidth, b.dtype.primitive_bitwidth):  # stored as integers that stand for floats
            return library(self, a, b, d, *settings)
        return interpreter.TensorHandle(product(a.data, b.data, d.data), d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot


def _lay_sums() -> None:
    """numpy adds the numbers that lie side by side in pairs and the others in turn, so they are laid side by side."""
    from triton.runtime import interpreter

    def laid(self: Any, input: Any) -> Any:
        data = input.handle.data
        if self.axis is None:
            total = np.sum(np.ascontiguousarray(data), keepdims=self.keep_dims)
        else:
            total = np.sum(np.ascontiguousarray(np.moveaxis(data, self.axis, -1)), axis=-1)
            total = np.expand_dims(total, self.axis) if self.keep_dims else total
        return self.to_tensor(total, input.dtype)

    interpreter.ReduceOps.sum = laid


def _teach_numpy() -> None:
    """Triton up to 3.6 turns its scalars, arrays of one element, into loop bounds by int(), which numpy 2.4 refuses."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patched


if ON:
    with contextlib.suppress(ImportError):  # the tests say themselves that there is no triton
        _make_products()
        _lay_sums()
        _teach_numpy()
