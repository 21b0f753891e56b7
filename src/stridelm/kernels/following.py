"""How a head follows the target on a GPU: each operation is one launch instead of three to ten, but that rows of more
sources than a launch takes are gathered by several.

Legend: as in step_ops.py.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from stridelm.kernels.aside import MOST
from stridelm.kernels.index_kernel import index_kernel, row_kernel

_ROWS, _BLOCK = 128, 1024
"""Rows, or columns of a row, that a program handles."""


@index_kernel
def count_behind(slots, indices, reals, kept, waiting, committed, out, stride_kept, requests, nobody):
    """Grid (R)."""
    request = tl.program_id(0)
    slot = tl.load(slots + request)
    slot = tl.where(slot < 0, nobody, slot)
    place = tl.load(indices + request)
    waits, end = tl.load(waiting + slot), tl.load(committed + slot)
    count = waits + tl.load(reals + place) + tl.load(kept + place * stride_kept)
    tl.store(out + request, waits)
    tl.store(out + requests + request, count)
    tl.store(out + 2 * requests + request, end - count)
    tl.store(out + 3 * requests + request, end - 1)


def behind(
    slots_R: torch.Tensor,
    indices_R: torch.Tensor,
    reals_B: torch.Tensor,
    kept_B: torch.Tensor,
    waiting_S: torch.Tensor,
    committed_S: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    assert all(each.is_contiguous() for each in (slots_R, indices_R, reals_B, waiting_S, committed_S))
    requests, nobody = len(slots_R), len(committed_S) - 1
    out = torch.empty(4, requests, dtype=torch.int64, device=slots_R.device)
    count_behind[(requests,)](
        slots_R,
        indices_R,
        reals_B,
        kept_B,
        waiting_S,
        committed_S,
        out,
        kept_B.stride(0),
        requests,
        nobody,
        num_warps=1,
    )
    return out[0], out[1], out[2], out[3]


@index_kernel
def find_next(tokens, slots, spans, positions, out, ahead, rows, stride_tokens, nobody, BLOCK: tl.constexpr):
    """Grid (N / BLOCK)."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = row < rows
    slot = tl.load(slots + tl.load(spans + row, mask=here, other=0), mask=here, other=0)
    slot = tl.where(slot < 0, nobody, slot)
    place = tl.load(positions + row, mask=here, other=0) + ahead
    tl.store(out + row, tl.load(tokens + slot * stride_tokens + place, mask=here, other=0), mask=here)


def next_tokens(
    tokens_SL: torch.Tensor, slots_R: torch.Tensor, span_N: torch.Tensor, positions_N: torch.Tensor, ahead: int
) -> torch.Tensor:
    assert slots_R.is_contiguous() and span_N.is_contiguous() and positions_N.is_contiguous()
    out = torch.empty_like(span_N)
    find_next[(triton.cdiv(len(span_N), _ROWS),)](
        tokens_SL,
        slots_R,
        span_N,
        positions_N,
        out,
        ahead,
        len(span_N),
        tokens_SL.stride(0),
        len(tokens_SL) - 1,
        BLOCK=_ROWS,
    )
    return out


@row_kernel("one", "two", "three", "out", "width", "at", "stride")
def gather_rows(one, two, three, out, rows, width, at, stride, SOURCES: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (N, width / BLOCK): a program copies a part of one row, to columns from `at` on."""
    to = tl.program_id(0).to(tl.int64) * stride + at
    row = tl.load(rows + tl.program_id(0)) * width
    offset = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = offset < width
    tl.store(out + to + offset, tl.load(one + row + offset, mask=here), mask=here)
    if SOURCES > 1:
        tl.store(out + to + width + offset, tl.load(two + row + offset, mask=here), mask=here)
    if SOURCES > 2:
        tl.store(out + to + 2 * width + offset, tl.load(three + row + offset, mask=here), mask=here)


def side_by_side(sources: Sequence[torch.Tensor], rows_N: torch.Tensor) -> torch.Tensor:
    assert all(source.is_contiguous() and source.shape == sources[0].shape for source in sources)
    rows, width = len(rows_N), sources[0].shape[1]
    out = torch.empty(rows, len(sources) * width, dtype=sources[0].dtype, device=rows_N.device)
    for first in range(0, len(sources), MOST):
        some = sources[first : first + MOST]
        gather_rows[(rows, triton.cdiv(width, _BLOCK))](
            *(some[min(number, len(some) - 1)] for number in range(MOST)),
            out,
            rows_N,
            width,
            first * width,
            out.stride(0),
            SOURCES=len(some),
            BLOCK=_BLOCK,
        )
    return out


@row_kernel("kept", "newest", "width")
def store_newest(kept, newest, ready, slots, decides, indices, counts, least, width, BLOCK: tl.constexpr):
    """Grid (R, width / BLOCK): a program copies a part of one request's row."""
    request = tl.program_id(0)
    slot = tl.load(slots + request)
    if slot < 0:
        return
    offset = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = offset < width
    from_row, to_row = request.to(tl.int64) * width, slot * width
    tl.store(kept + to_row + offset, tl.load(newest + from_row + offset, mask=here), mask=here)
    if tl.program_id(1) == 0:
        decided = tl.load(decides + tl.load(indices + request)) != 0
        tl.store(ready + slot, (decided & (tl.load(counts + request) >= least)).to(tl.uint8))


def keep_newest(
    kept_SW: torch.Tensor,
    ready_S: torch.Tensor,
    slots_R: torch.Tensor,
    newest_RW: torch.Tensor,
    decides_B: torch.Tensor,
    indices_R: torch.Tensor,
    counts_R: torch.Tensor,
    least: int,
) -> None:
    small = (ready_S, slots_R, decides_B, indices_R, counts_R)
    assert all(each.is_contiguous() for each in (kept_SW, newest_RW, *small))
    requests, width = newest_RW.shape
    store_newest[(requests, triton.cdiv(width, _BLOCK))](
        kept_SW,
        newest_RW,
        ready_S.view(torch.uint8),
        slots_R,
        decides_B.view(torch.uint8),
        indices_R,
        counts_R,
        least,
        width,
        BLOCK=_BLOCK,
    )


@row_kernel("kept", "out", "width")
def load_newest(
    kept, out, ready, known, slots, out_ready, places, first, levels, requests, nobody, width, BLOCK: tl.constexpr
):
    """Grid (R, width / BLOCK): a program copies a part of one request's row."""
    request = tl.program_id(0)
    slot = tl.load(slots + request)
    slot = tl.where(slot < 0, nobody, slot)
    offset = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = offset < width
    from_row, to_row = slot * width, request.to(tl.int64) * width
    tl.store(out + to_row + offset, tl.load(kept + from_row + offset, mask=here), mask=here)
    if tl.program_id(1) == 0:
        tl.store(out_ready + request, tl.load(ready + slot))
        length = tl.load(known + slot) + first
        for level in range(levels):
            tl.store(places + level * requests + request, length + level)


def recall(
    kept_SW: torch.Tensor,
    ready_S: torch.Tensor,
    known_S: torch.Tensor,
    slots_R: torch.Tensor,
    first: int,
    levels: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    assert all(each.is_contiguous() for each in (kept_SW, ready_S, known_S, slots_R))
    requests, width = len(slots_R), kept_SW.shape[1]
    kept_RW = torch.empty(requests, width, dtype=kept_SW.dtype, device=kept_SW.device)
    ready_R = torch.empty(requests, dtype=torch.bool, device=kept_SW.device)
    place_LR = torch.empty(levels, requests, dtype=torch.int64, device=kept_SW.device)
    load_newest[(requests, triton.cdiv(width, _BLOCK))](
        kept_SW,
        kept_RW,
        ready_S.view(torch.uint8),
        known_S,
        slots_R,
        ready_R.view(torch.uint8),
        place_LR,
        first,
        levels,
        requests,
        len(kept_SW) - 1,
        width,
        BLOCK=_BLOCK,
    )
    return kept_RW, ready_R, place_LR
