"""What the CPU kernels share: storage formats and elementary functions that compile to vector instructions.

Every function here is compiled into its caller. bfloat16 arrays come as uint16, the upper half of a float32: numba has
no bfloat16.
"""

from __future__ import annotations

import threading
from functools import cache
from typing import Any

import numba as nb
import numpy as np
import torch
from numba import types
from numba.core.extending import overload, register_jitable
from numba.core.registry import cpu_target

from stridelm.compiled import njit

IN_ORDER = {"contract", "nsz"}
"""What the compiler may do: fuse a product and a sum into one instruction. Sums stay in the order written."""
BY_LANES = IN_ORDER | {"reassoc"}
"""The same, and a sum may be split over vector lanes: always in the same way for the same length.

Neither assumes that there are no NaNs: weights that were never loaded must show up."""


DTYPES = frozenset((torch.bfloat16, torch.float32))
"""What the kernels read and write. They compute in float32."""


_following = threading.local()
"""`threads`: the number that this thread last set."""


@cache
def compiles_for(feature: str) -> bool:
    """Whether the compiler takes this CPU to have a feature, by LLVM's name."""
    return f"+{feature}" in cpu_target.target_context.codegen().magic_tuple()[2].split(",")


def follow_torch() -> int:
    """Make Numba use as many threads as torch currently does, without changing torch's number; returns Numba's.

    Numba starts its workers at the first call and thereby sets OpenMP's number of threads, which torch shares: a
    process configured for one thread would continue with one per core.
    """
    threads = torch.get_num_threads()
    wanted = min(threads, nb.config.NUMBA_NUM_THREADS)
    if getattr(_following, "threads", 0) != wanted:
        nb.set_num_threads(wanted)
        _following.threads = wanted
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
    return wanted


def widen(stored: Any) -> Any:
    """A stored number as float32."""
    raise NotImplementedError("only in compiled code")


def narrow(x: Any, target: Any) -> Any:
    """float32 as an element of the array `target`, rounded to the nearest, ties to even."""
    raise NotImplementedError("only in compiled code")


@overload(widen, inline="always", strict=False)
def _widen(stored: Any) -> Any:
    if isinstance(stored, types.Integer):
        return lambda stored: np.uint32(np.uint32(stored) << np.uint32(16)).view(np.float32)
    return lambda stored: stored


@overload(narrow, inline="always", strict=False)
def _narrow(x: Any, target: Any) -> Any:
    if isinstance(target.dtype, types.Integer):
        return lambda x, target: _to_bfloat16(x)
    return lambda x, target: x


@register_jitable
def _to_bfloat16(x: Any) -> Any:
    bits = np.float32(x).view(np.uint32)
    rounded = np.uint32(bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.uint16(rounded) if x == x else np.uint16(0x7FC0)


@register_jitable
def exp(x: Any) -> Any:
    """e^x in float32 for x <= 88, within 2 units of the last place; 0 below -87.

    2^n * e^r with |r| <= ln(2) / 2, e^r by the polynomial of Cephes' expf (Moshier 1992). The library's exp is one call
    per number, which prevents a loop from being vectorised.
    """
    x = max(np.float32(x), np.float32(-87.0))
    n = np.floor(x * np.float32(1.44269504088896341) + np.float32(0.5))
    r = x - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    power = np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)
    return (p * r * r + r + np.float32(1.0)) * power


@register_jitable
def ordered(x: Any) -> Any:
    """Map float32 to int32 preserving the order, because a maximum of integers is vectorised. NaN is the largest."""
    bits = np.float32(x).view(np.int32)
    return np.int32(bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@register_jitable
def unordered(x: Any) -> Any:
    """The inverse of `ordered`: the float32 that it maps to x."""
    bits = np.int32(x ^ ((x >> np.int32(31)) & np.int32(0x7FFFFFFF)))
    return bits.view(np.float32)


def kernel(function: Any) -> Any:
    """Compile for this machine on first use, with `prange` loops spread over threads; cached on disk between runs."""
    return njit(parallel=True, fastmath=IN_ORDER, error_model="numpy")(function)


def in_order(function: Any) -> Any:
    """Compile a part of a kernel whose sums are added as written."""
    return _part(function, IN_ORDER)


def by_lanes(function: Any) -> Any:
    """Compile a part of a kernel whose sums are split over lanes."""
    return _part(function, BY_LANES)


def _part(function: Any, fastmath: set[str]) -> Any:
    """Force inlining into the caller. As a separate function it would exist twice in the process that compiles it,
    optimised separately and with sums split over different lanes, and the caller read from disk would use the other
    copy: the first run on a machine would have other bits than all later ones."""
    return nb.njit(fastmath=fastmath, error_model="numpy", forceinline=True)(function)
