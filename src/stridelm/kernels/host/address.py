"""Addresses of arrays, and arrays at addresses, for compiled code that reads more tensors than a call should have
arguments.

Nothing here keeps the memory alive: whoever passes an address has to.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,attr-defined"
from __future__ import annotations

import numba as nb
from llvmlite import ir
from numba.core import types
from numba.core.extending import intrinsic, register_jitable


def start_of(context, builder, signature, arguments, index):
    """For intrinsics: the address, as of bytes, of the first element of the array that is argument `index`."""
    array = context.make_array(signature.args[index])(context, builder, arguments[index])
    return builder.bitcast(array.data, ir.IntType(8).as_pointer())


@register_jitable
def halves(address, shape):
    """uint16, as which bfloat16 is stored."""
    return nb.carray(_halves(address), shape)


@register_jitable
def words(address, shape):
    """uint32."""
    return nb.carray(_words(address), shape)


@register_jitable
def integers(address, shape):
    """int64."""
    return nb.carray(_integers(address), shape)


@register_jitable
def page_ids(address, shape):
    """int32."""
    return nb.carray(_page_ids(address), shape)


@register_jitable
def floats(address, shape):
    """float32."""
    return nb.carray(_floats(address), shape)


def _pointer(kind):
    """Compiled into the address as a pointer to numbers of this kind."""

    @intrinsic
    def pointer(typing, address):
        def generate(context, builder, signature, arguments):
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(kind)(types.int64), generate

    return pointer


_halves, _words, _floats = _pointer(types.uint16), _pointer(types.uint32), _pointer(types.float32)
_integers, _page_ids = _pointer(types.int64), _pointer(types.int32)
