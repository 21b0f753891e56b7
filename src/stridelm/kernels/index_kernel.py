"""Kernels over small tensors of indices, of which one binary serves all sizes and addresses.

Triton compiles a kernel again for every combination of pointers and integers that are, or are not, multiples of 16.
For indices nothing is gained by that, and a request would wait for the compiler whenever a new combination turns up.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import triton


def index_kernel(kernel: Callable[..., None]) -> Any:
    """`triton.jit` for such a kernel: only its `constexpr` parameters select a binary."""
    parameters = inspect.signature(kernel).parameters.values()
    return triton.jit(do_not_specialize=[p.name for p in parameters if "constexpr" not in str(p.annotation)])(kernel)
