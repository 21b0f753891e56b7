"""Kernels of which one binary serves steps of all sizes.

Triton compiles a kernel again for every combination of pointers and integers that are, or are not, multiples of 16, and
of integers that are 1. For indices, and for what a row reads once, nothing is gained by that, and a request would wait
for the compiler whenever a new combination turns up: row 3 of a table of int64 lies elsewhere than row 4.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

from stridelm.types import MAX_DRAFT_ROWS

NODES = tl.constexpr(triton.next_power_of_2(MAX_DRAFT_ROWS + 1))
"""Lanes for the last real row and the draft rows of any draft: its width changes from step to step."""


def row_kernel(*wide: str) -> Callable[[Callable[..., None]], Any]:
    """`triton.jit` for a kernel over rows of a step. Only these of its parameters, long rows and what says where they
    are, and the `constexpr` ones select a binary."""

    def made(kernel: Callable[..., None]) -> Any:
        parameters = inspect.signature(kernel).parameters.values()
        others = [p.name for p in parameters if "constexpr" not in str(p.annotation) and p.name not in wide]
        return triton.jit(do_not_specialize=others)(kernel)

    return made


index_kernel = row_kernel()
"""`triton.jit` for a kernel over small tensors of indices."""
