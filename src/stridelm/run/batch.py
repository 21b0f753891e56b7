"""Builds one ragged batch from plan and draft.

The rows are laid out by the plan's bounds, on every device. How many of a span's rows are real, where they start and
which draft rows are valid is read on the device from the token table, so that a step can be built before the verdict of
the previous one has arrived. Rows beyond those that a span turns out to have are padding: they write to the null slot
and are never read. On a CPU, where checking is free, they are dropped before anything is computed for them.

Legend: R spans, N rows, W draft width, K = W + 1 nodes of a span, M = R K decision rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from stridelm.batch import Draft, ForwardBatch, Geometry
from stridelm.run.state import PageTables, TokenTable
from stridelm.types import Span
from stridelm.upload import upload


@dataclass(frozen=True, eq=False)
class RowLayout:
    """Where rows are placed: a function of the bounds alone, so it is the same in every replay of a step."""

    bounds: tuple[int, ...]
    """Maximum rows of each span."""
    span_N: torch.Tensor
    offset_N: torch.Tensor
    firsts_R: torch.Tensor
    reals_R: torch.Tensor
    """Maximum real rows of each span."""
    drafts_R: torch.Tensor
    """Maximum draft rows of each span."""
    decides_R: torch.Tensor
    """bool."""
    draft_M: torch.Tensor
    """Draft row of each decision row, -1 for the last real row."""
    span_M: torch.Tensor
    host_M2: np.ndarray
    """Span and draft row of each decision row."""
    first32_R: torch.Tensor
    """int32 `firsts`, as attention reads them."""
    nothing_N: torch.Tensor
    """int64 zeros: no ancestors."""
    kept: dict[Any, object] = field(default_factory=dict)
    """Cache for what attention derives from this layout."""


def row_layout(shape: tuple[tuple[int, int, bool], ...], width: int, device: torch.device) -> RowLayout:
    """shape: (maximum real rows, maximum draft rows, decides) of each span."""
    reals, drafts, decides = (np.array(column) for column in zip(*shape, strict=True))
    bounds = reals + drafts
    firsts = np.cumsum(bounds) - bounds
    span = np.repeat(np.arange(len(shape)), bounds)
    nodes = np.tile(np.arange(width + 1), len(shape))
    span_of_node = np.repeat(np.arange(len(shape)), width + 1)

    def tensor(values: np.ndarray) -> torch.Tensor:
        return upload(values, device)

    return RowLayout(
        bounds=tuple(bounds.tolist()),
        span_N=tensor(span),
        offset_N=tensor(np.arange(len(span)) - firsts[span]),
        firsts_R=tensor(firsts),
        reals_R=tensor(reals),
        drafts_R=tensor(drafts),
        decides_R=tensor(decides.astype(bool)),
        draft_M=tensor(nodes - 1),
        span_M=tensor(span_of_node),
        host_M2=np.stack((span_of_node, nodes - 1), 1),
        first32_R=tensor(firsts.astype(np.int32)),
        nothing_N=tensor(np.zeros_like(span)),
    )


def packed(layout: RowLayout, reals_R: torch.Tensor, drafts_R: torch.Tensor, rows: int) -> RowLayout:
    """The layout with spans of these lengths one after another, in fewer rows than their bounds add up to: lengths that
    only the device knows. `rows` must be enough for all; the rows left over are padding of the last span."""
    counts = reals_R + drafts_R
    ends = counts.cumsum(0)
    firsts = ends - counts
    row = torch.arange(rows, device=counts.device)
    span = torch.searchsorted(ends, row, right=True).clamp(max=len(counts) - 1)
    return replace(
        layout,
        span_N=span,
        offset_N=(row - firsts[span]).clamp(max=max(layout.bounds)),
        firsts_R=firsts,
        reals_R=reals_R,
        drafts_R=drafts_R,
        first32_R=firsts.to(torch.int32),
        nothing_N=torch.zeros_like(span),
    )


def shape_of(spans: tuple[Span, ...]) -> tuple[tuple[int, int, bool], ...]:
    return tuple((span.real, span.draft, span.decides) for span in spans)


def build(
    spans: tuple[Span, ...],
    layout: RowLayout,
    draft: Draft,
    table: TokenTable,
    pages: PageTables,
    request_slots: torch.Tensor,
    page_size: int,
    max_keys: int,
) -> ForwardBatch:
    """The batch of one step. request_slots: [R] rows of the tables, -1 for padding; max_keys: an upper bound
    on every span's end."""
    # A tree shape that all requests share is expanded: stride 0 between requests, but not between its rows.
    assert draft.width < 2 or all(
        part.stride(1) == 1 for part in (draft.tokens, draft.depths, draft.ancestors, draft.valid)
    )
    found = {
        group: table.ops.lay_out(
            request_slots,
            table.known,
            table.committed,
            table.tokens,
            pages_SP,
            layout.firsts_R,
            layout.reals_R,
            layout.drafts_R,
            layout.decides_R,
            layout.span_N,
            layout.offset_N,
            draft,
            max(layout.bounds),
            page_size,
        )
        for group, pages_SP in pages.tables.items()
    }
    laid, about, nodes = next(iter(found.values()))  # page groups differ only in their pool slots
    ids, positions, _, ancestors, draft_rows = laid.unbind(0)
    firsts, counts, starts, reals = about.unbind(0)
    geometry = Geometry(
        bounds=layout.bounds,
        firsts=firsts,
        counts=counts,
        starts=starts,
        reals=reals,
        draft_rows=draft_rows,
        ancestors=ancestors,
        positions=positions,
        tables=pages.of(request_slots),
        page_size=page_size,
        max_keys=max_keys,
        is_chain=draft.is_chain,
        ends=tuple(span.end for span in spans),
    )
    return ForwardBatch(
        ids=ids,
        positions=positions,
        slots={group: rows[2] for group, (rows, _, _) in found.items()},
        geometry=geometry,
        spans=spans,
        request_slots=request_slots,
        decisions=nodes[0],
        decision_span=layout.span_M,
        decision_draft=layout.draft_M,
        decision_index=nodes[1].view(-1, draft.width + 1),
        decision_host=layout.host_M2,
        reals=reals.to(torch.int64),
        decides=layout.decides_R,
        grid=True,
        every_row=len(layout.span_N) == len(layout.span_M)
        and all(span.real == 1 and span.draft == draft.width for span in spans),
        prompt_rows=_prompt_rows(spans, layout.bounds, request_slots.device),
    )


def _prompt_rows(spans: tuple[Span, ...], bounds: tuple[int, ...], device: torch.device) -> torch.Tensor | None:
    """Rows where prompts are scored. A prompt's spans are exact: they do not depend on rows in flight."""
    if not any(span.request.params.reads_prompt for span in spans):
        return None
    rows: list[int] = []
    first = 0
    for span, bound in zip(spans, bounds, strict=True):
        if span.request.params.reads_prompt:
            scored = min(span.real, len(span.request.prompt_ids) - 1 - span.start)
            rows += range(first, first + max(0, scored))
        first += bound
    return upload(rows, device)
