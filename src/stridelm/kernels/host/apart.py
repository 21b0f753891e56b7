"""Parts of a call that are compiled by themselves and called by address.

Numba compiles what a `prange` loop does into its function for threads, that into two wrappers, these into the function
with the loop, and that into its callers: five times in all. What is called by address is compiled once. It also exists
once, so its bits are the same in the process that compiles it and in those that load it (see arithmetic.py).
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,no-any-return"
from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from numba.core import cgutils, types
from numba.core.errors import TypingError
from numba.core.extending import intrinsic

from stridelm.compiled import njit
from stridelm.kernels.host.arithmetic import IN_ORDER


def apart(argument: types.Type) -> Callable[[Any], Callable[[], int]]:
    """Compile a function of one argument of this type. What is left of it gives the function's address, which is valid
    in this process: compiled when first asked for, and cached on disk between runs."""

    def decorate(function: Any) -> Callable[[], int]:
        compiled = njit(fastmath=IN_ORDER, error_model="numpy")(function)

        @cache
        def address() -> int:
            compiled.compile((argument,))
            made = compiled.overloads[argument,]
            pointer = made.library.get_pointer_to_function(made.fndesc.llvm_func_name)
            assert pointer, f"{function.__name__} has no address"
            return pointer

        return address

    return decorate


def caller(argument: types.Type) -> Any:
    """For compiled code: (address, argument) -> nothing, a call of a function that is compiled for this type."""

    @intrinsic
    def call(typing, address, given):
        if given != argument:
            raise TypingError(f"an argument of type {given} for a function of {argument}")

        def generate(context, builder, signature, arguments):
            convention = context.call_conv
            pointer = convention.get_function_type(types.none, (argument,)).as_pointer()
            function = builder.inttoptr(arguments[0], pointer)
            status, _ = convention.call_function(builder, function, types.none, (argument,), arguments[1:])
            with cgutils.if_unlikely(builder, status.is_error):
                convention.return_status_propagate(builder, status)
            return context.get_dummy_value()

        return types.none(types.int64, argument), generate

    return call
