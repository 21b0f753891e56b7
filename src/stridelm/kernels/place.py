"""Lays out the rows of a drafter's own layers on the device, in one launch instead of about thirty, and finds the step
rows that they correspond to.

Legend: as in step_ops.py.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from stridelm.kernels.index_kernel import index_kernel

_SHORT, _LONG = 16, 1024
"""Rows that a program handles at a time: two binaries, for spans that decode and for prompts."""


@index_kernel
def place_lines(
    slots,
    starts,
    counts,
    stays,
    pages,
    firsts,
    storage,
    own,
    pool_slots,
    about,
    last,
    rows,
    nobody,
    stride_about,
    stride_stays,
    stride_pages,
    page_size,
    requests,
    STAYS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (R): a program places one request's rows."""
    request = tl.program_id(0)
    slot = tl.load(slots + request)
    slot = tl.where(slot < 0, nobody, slot)
    start = tl.maximum(tl.load(starts + request), 0)
    count = tl.load(counts + request)
    first = tl.load(firsts + request)
    bound = tl.load(firsts + request + 1, mask=request + 1 < requests, other=rows) - first
    tl.store(about + request, count.to(tl.int32))
    tl.store(about + stride_about + request, start.to(tl.int32))
    tl.store(last + request, tl.maximum(first + count - 1, 0))
    left = count
    if STAYS:
        left = tl.where(tl.load(stays + request * stride_stays) != 0, count, 0)
    for at in range(0, bound, BLOCK):
        offset = at + tl.arange(0, BLOCK)
        here = offset < bound
        index = start + offset
        kept = here & (offset < left)
        page = tl.load(pages + slot * stride_pages + index // page_size, mask=kept, other=0).to(tl.int64)
        row = first + offset
        tl.store(storage + row, index, mask=here)
        tl.store(own + row, offset - count, mask=here)
        tl.store(pool_slots + row, tl.where(kept, page * page_size + index % page_size, 0), mask=here)


def place(
    slots_R: torch.Tensor,
    starts_R: torch.Tensor,
    counts_R: torch.Tensor,
    stays_R: torch.Tensor | None,
    tables: dict[str, torch.Tensor],
    firsts_R: torch.Tensor,
    span_N: torch.Tensor,
    offset_N: torch.Tensor,
    longest: int,
    page_size: int,
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    requests, rows, device = len(slots_R), len(span_N), slots_R.device
    laid = torch.empty(2, rows, dtype=torch.int64, device=device)
    # Pad so that both rows start at 16-byte boundaries: attention is recompiled for other alignments.
    about = torch.empty(2, -(-requests // 4) * 4, dtype=torch.int32, device=device)[:, :requests]
    last = torch.empty(requests, dtype=torch.int64, device=device)
    pool_slots = {group: torch.empty(rows, dtype=torch.int64, device=device) for group in tables}
    for group, pages_SP in tables.items():  # usually one; the outputs that belong to no group are the same every time
        place_lines[(requests,)](
            slots_R,
            starts_R,
            counts_R,
            counts_R if stays_R is None else stays_R.view(torch.uint8),
            pages_SP,
            firsts_R,
            *laid.unbind(0),
            pool_slots[group],
            about,
            last,
            rows,
            len(pages_SP) - 1,
            about.stride(0),
            0 if stays_R is None else stays_R.stride(0),
            pages_SP.stride(0),
            page_size,
            requests,
            STAYS=stays_R is not None,
            BLOCK=_SHORT if longest <= _SHORT else _LONG,
        )
    return laid[0], laid[1], pool_slots, about, last


@index_kernel
def find_sources(
    indices,
    spans,
    offsets,
    tailed,
    firsts,
    reals,
    path,
    decision_index,
    decisions,
    sources,
    rows,
    step_rows,
    width,
    stride_path,
    stride_index,
    BLOCK: tl.constexpr,
):
    """Grid (N / BLOCK): a program finds the sources of BLOCK rows."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = row < rows
    span = tl.load(spans + row, mask=here, other=0)
    place = tl.load(indices + span, mask=here, other=0)
    offset = tl.load(offsets + row, mask=here, other=0) - tl.load(tailed + span, mask=here, other=0)
    first = tl.load(firsts + place, mask=here, other=0).to(tl.int64)
    source = tl.minimum(tl.maximum(offset, 0) + first, step_rows - 1)
    beyond = offset - tl.load(reals + place, mask=here, other=0)
    drafted = here & (beyond >= 0) & (width > 0)
    node = tl.load(path + place * stride_path + tl.minimum(beyond, width - 1), mask=drafted, other=-1)
    decision = tl.load(decision_index + place * stride_index + node + 1, mask=drafted, other=0).to(tl.int64)
    accepted = tl.load(decisions + tl.maximum(decision, 0), mask=drafted, other=0)
    tl.store(sources + row, tl.where(drafted, accepted, source), mask=here)


def sources(
    indices_R: torch.Tensor,
    span_N: torch.Tensor,
    offset_N: torch.Tensor,
    tailed_R: torch.Tensor,
    firsts_B: torch.Tensor,
    reals_B: torch.Tensor,
    path_BW: torch.Tensor,
    index_BK: torch.Tensor,
    decisions_M: torch.Tensor,
    step_rows: int,
) -> torch.Tensor:
    assert index_BK.stride(1) == 1 and (path_BW.shape[1] < 2 or path_BW.stride(1) == 1)
    rows = len(span_N)
    found = torch.empty(rows, dtype=torch.int64, device=span_N.device)
    block = 128
    find_sources[(triton.cdiv(rows, block),)](
        indices_R,
        span_N,
        offset_N,
        tailed_R,
        firsts_B,
        reals_B,
        path_BW,
        index_BK,
        decisions_M,
        found,
        rows,
        step_rows,
        path_BW.shape[1],
        path_BW.stride(0),
        index_BK.stride(0),
        BLOCK=block,
    )
    return found
