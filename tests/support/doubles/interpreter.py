"""Triton's interpreter, which runs kernels on a CPU when TRITON_INTERPRET=1 is set before triton is imported.

It computes with numpy, and a law about a kernel must not depend on how numpy's libraries add: OpenBLAS uses different
loops for different numbers of rows, and which ones depends on the processor. So products are computed here, and sums
read their rows from memory in one fixed layout. Any remaining difference between two runs comes from the kernel.
"""

from __future__ import annotations

import contextlib
import math
import os
from typing import Any

import numpy as np
import pytest
import torch

INTERPRETED = pytest.mark.interpreted
"""The mark of tests that run Triton kernels on a CPU; conftest.py skips them if TRITON_INTERPRET is not set."""
ON = os.environ.get("TRITON_INTERPRET") == "1"

Array = np.ndarray[Any, Any]


def product(a: Array, b: Array, start: Array) -> Array:
    """start + a @ b, an element's terms added to `start` one after another: the bits of a row depend on that row alone,
    not on the number of rows beside it or on their memory layout."""
    a, b, total = a.astype(start.dtype), b.astype(start.dtype), start.copy()
    for k in range(a.shape[-1]):
        total += a[..., :, k, None] * b[..., None, k, :]
    return total


def _make_products() -> None:
    from triton.language import float16
    from triton.runtime import interpreter

    def numbers(x: Any) -> Array:
        if x.dtype.primitive_bitwidth > 8:
            return np.asarray(x.data)
        return np.asarray(interpreter._convert_float(x.data, x.dtype, float16, None).view(np.float16))

    def create_dot(self: Any, a: Any, b: Any, d: Any, *settings: Any) -> Any:
        return interpreter.TensorHandle(product(numbers(a), numbers(b), d.data), d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot


def _make_eight_bits() -> None:
    """Triton's own rounding to eight bits does not carry into the exponent: it makes 16 of 31.9."""
    from triton.language import float8e4nv, float32
    from triton.runtime import interpreter

    library = interpreter._convert_float

    def convert(data: Array, of: Any, to: Any, rounding: Any) -> Array:
        if to is not float8e4nv or of is not float32:
            return np.asarray(library(data, of, to, rounding))
        rounded = torch.from_numpy(np.ascontiguousarray(data).view(np.float32)).to(torch.float8_e4m3fn)
        return np.asarray(rounded.view(torch.uint8).numpy()).reshape(data.shape)

    interpreter._convert_float = convert


def _lay_sums() -> None:
    """numpy adds contiguous numbers in pairs and strided ones in sequence, so the summed axis is made contiguous."""
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
    """Triton up to 3.6 makes loop bounds of its scalars, one-element arrays, with int(), which numpy 2.4 refuses."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patched


def _patch_once() -> None:
    """Triton patches its language again at each call of a device function, which takes longer than most of them; inside
    a kernel that has been done."""
    import triton.language as tl
    from triton.runtime import interpreter

    patch = interpreter._patch_lang

    def patched(fn: Any) -> Any:
        langs = [value for value in fn.__globals__.values() if value is tl or value is tl.core]
        originals = [member for lang in langs for member in (lang.load, lang.tensor.__add__)]
        if originals and not any(tl.core.is_builtin(member) for member in originals):
            return interpreter._LangPatchScope()  # whoever patched it restores it
        return patch(fn)

    interpreter._patch_lang = patched


def _drop_unread_checks() -> None:
    """Triton computes whether each sum of integers overflows, a third of a kernel's time, and then looks at the answer
    only if it debugs."""
    from triton.language.semantic import TritonSemantic

    check = TritonSemantic.binary_op_sanitize_overflow_impl

    def checked(self: Any, lhs: Any, rhs: Any, operation: Any) -> None:
        if self.builder.options.debug:
            check(self, lhs, rhs, operation)

    TritonSemantic.binary_op_sanitize_overflow_impl = checked


def _keep_types() -> None:
    """Triton makes a table of all types each time it looks for numpy's of one of its own."""
    from triton.language import pointer_type
    from triton.runtime import interpreter

    library = interpreter._get_np_dtype
    known: dict[str, Any] = {}

    def numpys(of: Any) -> Any:
        scalar = of.scalar
        if isinstance(scalar, pointer_type):
            return library(scalar)
        if scalar.name not in known:
            known[scalar.name] = library(scalar)
        return known[scalar.name]

    interpreter._get_np_dtype = numpys


def _share_shapes() -> None:
    """Triton wraps and checks the sizes of the axes of each value and of its type anew, a quarter of a kernel's time;
    here they are those of the first of their shape."""
    from triton.language import core

    of_values: dict[tuple[int, ...], tuple[Any, Any]] = {}
    of_types: dict[tuple[Any, ...], dict[str, Any]] = {}
    block_type = core.block_type.__init__

    def begin_value(self: Any, handle: Any, of: Any) -> None:
        sizes = tuple(of.shape) if of.is_block() else ()
        if sizes not in of_values:
            of_values[sizes] = core.constexpr(math.prod(sizes)), core.tuple([core.constexpr(size) for size in sizes])
        self.handle, self.type, self.dtype = handle, of, of.scalar
        self.numel, self.shape = of_values[sizes]

    def begin_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(
            each.value if isinstance(each, core.constexpr) else each for each in core._unwrap_if_constexpr(shape)
        )
        key = element_ty.name, *sizes
        if key not in of_types:
            block_type(self, element_ty, shape)
            of_types[key] = {"shape": self.shape, "numel": self.numel, "name": self.name}
        self.__dict__.update(of_types[key], element_ty=element_ty)

    core.tensor.__init__ = begin_value
    core.block_type.__init__ = begin_type


if ON:
    with contextlib.suppress(ImportError):  # without triton, the tests report that themselves
        _make_products()
        _make_eight_bits()
        _lay_sums()
        _teach_numpy()
        _patch_once()
        _drop_unread_checks()
        _keep_types()
        _share_shapes()
