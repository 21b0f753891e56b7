"""Sets rows of a step aside for a head that reads them later, on the device, in one launch instead of about fifteen.

Of more sources than a launch takes, each launch copies some.

Legend: as in step_ops.py.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton.language as tl

from stridelm.kernels.index_kernel import row_kernel

MOST = 3
"""Sources that a launch takes: as many layers as EAGLE-3 reads."""
_BLOCK, _WARPS = 1024, 4


@row_kernel("one", "two", "three", "kept", "width", "at", "stride_slot", "stride_row")
def copy_rows(
    one,
    two,
    three,
    kept,
    rows,
    ready,
    slots,
    firsts,
    reals,
    indices,
    width,
    at,
    stride_slot,
    stride_row,
    SOURCES: tl.constexpr,
    LAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (R): a program copies one request's rows, to columns from `at` on. The last launch counts them."""
    request = tl.program_id(0)
    slot = tl.load(slots + request)
    if slot < 0:
        return
    place = tl.load(indices + request)
    first = tl.load(firsts + place).to(tl.int64)
    real = tl.load(reals + place)
    column = tl.load(rows + slot)
    for row in range(first, first + real):
        to = kept + slot * stride_slot + (column + row - first) * stride_row + at
        for start in range(0, width, BLOCK):
            offset = start + tl.arange(0, BLOCK)
            here = offset < width
            tl.store(to + offset, tl.load(one + row * width + offset, mask=here), mask=here)
            if SOURCES > 1:
                tl.store(to + width + offset, tl.load(two + row * width + offset, mask=here), mask=here)
            if SOURCES > 2:
                tl.store(to + 2 * width + offset, tl.load(three + row * width + offset, mask=here), mask=here)
    if LAST:
        tl.debug_barrier()  # a warp that has not read the column yet must not see the next one
        tl.store(rows + slot, column + real)
        tl.store(ready + slot, tl.zeros([], tl.uint8))


def set_aside(
    kept_SPW: torch.Tensor,
    rows_S: torch.Tensor,
    ready_S: torch.Tensor,
    slots_R: torch.Tensor,
    firsts_B: torch.Tensor,
    reals_B: torch.Tensor,
    indices_R: torch.Tensor,
    sources: Sequence[torch.Tensor],
) -> None:
    assert all(source.is_contiguous() and source.shape == sources[0].shape for source in sources)
    width = sources[0].shape[1]
    for first in range(0, len(sources), MOST):
        some = sources[first : first + MOST]
        copy_rows[(len(slots_R),)](
            *(some[min(number, len(some) - 1)] for number in range(MOST)),
            kept_SPW,
            rows_S,
            ready_S.view(torch.uint8),
            slots_R,
            firsts_B,
            reals_B,
            indices_R,
            width,
            first * width,
            *kept_SPW.stride()[:2],
            SOURCES=len(some),
            LAST=first + MOST >= len(sources),
            BLOCK=_BLOCK,
            num_warps=_WARPS,
        )
