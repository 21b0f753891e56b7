"""Lays out a step's rows on the device, in one launch instead of about forty.

Legend: as in step_ops.py.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton.language as tl

from stridelm.batch import Draft
from stridelm.kernels.index_kernel import NODES, index_kernel

_SHORT, _LONG = 16, 1024
"""Rows that a program handles at a time: two binaries, for spans that decode and for prompts."""


@index_kernel
def lay_spans(
    slots,
    known,
    computed,
    tokens,
    pages,
    firsts,
    most_real,
    most_draft,
    decides,
    draft_tokens,
    draft_depths,
    draft_ancestors,
    draft_live,
    ids,
    positions,
    pool_slots,
    ancestors,
    draft_rows,
    spans,
    decisions,
    index,
    rows,
    nobody,
    stride_tokens,
    stride_pages,
    stride_draft_tokens,
    stride_depths,
    stride_ancestors,
    stride_live,
    width,
    page_size,
    spans_count,
    BLOCK: tl.constexpr,
):
    """Grid (R): a program lays out one span's rows and decision rows."""
    span = tl.program_id(0)
    slot = tl.load(slots + span)
    slot = tl.where(slot < 0, nobody, slot)
    start = tl.load(computed + slot)
    real = tl.minimum(tl.load(known + slot) - start, tl.load(most_real + span))
    room = tl.minimum(tl.load(most_draft + span), width)
    first = tl.load(firsts + span)
    # All rows up to the next span: in a replayed step a request may have fewer rows than the graph was captured with.
    bound = tl.load(firsts + span + 1, mask=span + 1 < spans_count, other=rows) - first
    tl.store(spans + span, first.to(tl.int32))
    tl.store(spans + spans_count + span, (real + tl.load(most_draft + span)).to(tl.int32))
    tl.store(spans + 2 * spans_count + span, start.to(tl.int32))
    tl.store(spans + 3 * spans_count + span, real.to(tl.int32))

    for at in range(0, bound, BLOCK):
        offset = at + tl.arange(0, BLOCK)
        here = offset < bound
        own = offset - real
        storage = start + offset
        drafted = here & (own >= 0) & (own < room)
        valid = drafted & (tl.load(draft_live + span * stride_live + own, mask=drafted, other=0) != 0)
        is_real = here & (own < 0)
        token = tl.load(tokens + slot * stride_tokens + storage, mask=is_real, other=0)
        token += tl.load(draft_tokens + span * stride_draft_tokens + own, mask=drafted, other=0)
        depth = tl.load(draft_depths + span * stride_depths + own, mask=drafted, other=0)
        position = tl.where(drafted, start + real - 1 + depth, storage)
        seen = tl.load(draft_ancestors + span * stride_ancestors + own, mask=valid, other=0)
        alive = is_real | valid
        page = tl.load(pages + slot * stride_pages + storage // page_size, mask=alive, other=0).to(tl.int64)
        row = first + offset
        tl.store(ids + row, token, mask=here)
        tl.store(positions + row, position, mask=here)
        tl.store(pool_slots + row, tl.where(alive, page * page_size + storage % page_size, 0), mask=here)
        tl.store(ancestors + row, seen, mask=here)
        tl.store(draft_rows + row, own, mask=here)

    node = tl.arange(0, NODES)
    exists = node <= width
    decision = span * (width + 1) + node
    alive = tl.load(draft_live + span * stride_live + node - 1, mask=exists & (node > 0), other=1) != 0
    valid = (tl.load(decides + span) != 0) & (node <= tl.load(most_draft + span)) & alive
    row = tl.minimum(tl.maximum(first + real - 1 + node, 0), rows - 1)
    tl.store(decisions + decision, row, mask=exists)
    tl.store(index + decision, tl.where(valid, decision, -1).to(tl.int64), mask=exists)


def lay_out(
    slots_R: torch.Tensor,
    known_S: torch.Tensor,
    committed_S: torch.Tensor,
    tokens_SL: torch.Tensor,
    pages_SP: torch.Tensor,
    firsts_R: torch.Tensor,
    reals_R: torch.Tensor,
    drafts_R: torch.Tensor,
    decides_R: torch.Tensor,
    span_N: torch.Tensor,
    offset_N: torch.Tensor,
    draft: Draft,
    longest: int,
    page_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, width, spans, device = len(span_N), draft.width, len(slots_R), slots_R.device
    trees = (draft.tokens, draft.depths, draft.ancestors, draft.valid.view(torch.uint8))
    laid = torch.empty(5, rows, dtype=torch.int64, device=device)
    about = torch.empty(4, spans, dtype=torch.int32, device=device)
    nodes = torch.empty(2, spans * (width + 1), dtype=torch.int64, device=device)
    lay_spans[(spans,)](
        slots_R,
        known_S,
        committed_S,
        tokens_SL,
        pages_SP,
        firsts_R,
        reals_R,
        drafts_R,
        decides_R.view(torch.uint8),
        *trees,
        *laid.unbind(0),
        about,
        *nodes.unbind(0),
        rows,
        len(known_S) - 1,
        tokens_SL.stride(0),
        pages_SP.stride(0),
        *(each.stride(0) for each in trees),
        width,
        page_size,
        spans,
        BLOCK=_SHORT if longest <= _SHORT else _LONG,
    )
    return laid, about, nodes
