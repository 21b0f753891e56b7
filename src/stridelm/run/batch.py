"""Plan and draft become one ragged batch.

The layout is the plan's: which rows there are is known from the spans' bounds alone, and draft rows that turn out not
to live are padding (null slot, empty mask). Only on a CPU, where looking costs nothing, are they left out instead.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from stridelm.cache.pages import padded_tables
from stridelm.cache.transaction import Transaction
from stridelm.run.state import TokenTable
from stridelm.types import CANDIDATE, Draft, ForwardBatch, Geometry, Span


@dataclass(slots=True)
class _Layout:
    """Each row's span, its offset among the real rows, and its draft row (-1 for real rows), on the host."""

    span: np.ndarray
    offset: np.ndarray
    draft: np.ndarray
    counts: np.ndarray
    starts: np.ndarray
    reals: np.ndarray

    @property
    def storage(self) -> np.ndarray:
        """Each row's index into its request's storage."""
        base = self.starts[self.span]
        return base + np.where(self.draft < 0, self.offset, self.reals[self.span] + self.draft)


def build(
    spans: tuple[Span, ...],
    draft: Draft,
    table: TokenTable,
    request_slots: torch.Tensor,
    transaction: Transaction,
    groups: tuple[str, ...],
    page_size: int,
) -> ForwardBatch:
    """The batch of one step. request_slots: [R] rows of the token table."""
    device = request_slots.device
    layout = _layout(spans, draft)
    tables = {group: transaction.tables(group) for group in groups}
    span = torch.from_numpy(layout.span).to(device)
    row_draft = torch.from_numpy(layout.draft).to(device)
    storage = torch.from_numpy(layout.storage).to(device)
    slots = {g: torch.from_numpy(_pool_slots(layout, t, page_size)).to(device) for g, t in tables.items()}
    owner = request_slots[span]
    geometry = Geometry(
        counts=layout.counts.tolist(),
        starts=layout.starts.tolist(),
        reals=layout.reals.tolist(),
        draft_rows=row_draft,
        ancestors=torch.zeros_like(storage),
        positions=storage,
        ordered=torch.zeros_like(storage, dtype=torch.bool),
        page_tables=tables,
        page_size=page_size,
    )
    ids = table.tokens[owner, storage]
    if draft.width:
        ids, slots = _fill_draft_rows(layout, draft, geometry, span, ids, slots)
    decisions, spans_of, index = _decisions(layout, spans, draft.width)
    return ForwardBatch(
        ids=ids,
        positions=geometry.positions,
        slots=slots,
        geometry=geometry,
        spans=spans,
        request_slots=request_slots,
        decisions=torch.from_numpy(decisions).to(device),
        decision_span=torch.from_numpy(spans_of).to(device),
        decision_draft=torch.from_numpy(layout.draft[decisions]).to(device),
        decision_index=torch.from_numpy(index).to(device),
        decision_host=np.stack((spans_of, layout.draft[decisions]), 1),
        reals=torch.from_numpy(layout.reals).to(device),
        decides=torch.tensor([span.decides for span in spans], device=device),
        prompt_rows=_prompt_rows(layout, spans, device),
    )


def _layout(spans: tuple[Span, ...], draft: Draft) -> _Layout:
    starts = np.array([s.start for s in spans], dtype=np.int64)
    reals = np.array([s.real for s in spans], dtype=np.int64)
    bounds = np.array([s.draft for s in spans], dtype=np.int64)
    room = np.arange(draft.width) < bounds[:, None]
    if draft.valid.device.type == "cpu":
        room &= draft.valid.numpy()
    draft_span, draft_row = np.nonzero(room)
    real_span = np.repeat(np.arange(len(spans)), reals)
    first = np.cumsum(reals) - reals
    offset = np.arange(len(real_span)) - first[real_span]
    # Real rows come first within a span: a stable sort by span interleaves the two lists.
    order = np.argsort(np.concatenate((real_span, draft_span)), kind="stable")
    return _Layout(
        span=np.concatenate((real_span, draft_span))[order],
        offset=np.concatenate((offset, np.zeros_like(draft_row)))[order],
        draft=np.concatenate((np.full_like(offset, -1), draft_row))[order],
        counts=reals + room.sum(1),
        starts=starts,
        reals=reals,
    )


def _pool_slots(layout: _Layout, tables: list[list[int]], page_size: int) -> np.ndarray:
    """[N] slot of each row in the page group's pool."""
    storage = layout.storage
    return padded_tables(tables)[layout.span, storage // page_size] * page_size + storage % page_size


def _fill_draft_rows(
    layout: _Layout,
    draft: Draft,
    geometry: Geometry,
    span: torch.Tensor,
    ids: torch.Tensor,
    slots: dict[str, torch.Tensor],
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Write the draft rows' ids, positions and ancestry into the geometry; padding rows get the null slot."""
    drafted = geometry.draft_rows >= 0
    place = (span, geometry.draft_rows.clamp(min=0))
    valid = draft.valid[place] & drafted
    last_real = torch.from_numpy((layout.starts + layout.reals - 1)[layout.span]).to(span.device)
    geometry.positions = torch.where(drafted, last_real + draft.depths[place], geometry.positions)
    geometry.ancestors = torch.where(valid, draft.ancestors[place], geometry.ancestors)
    if not draft.is_chain:
        in_place = (torch.ones_like(span) << (geometry.draft_rows + 1)) - 1
        geometry.ordered = valid & (draft.roles[place] == CANDIDATE) & (geometry.ancestors != in_place)
        geometry.has_ordered = True
    ids = torch.where(drafted, draft.tokens[place], ids)
    return ids, {group: torch.where(valid | ~drafted, s, 0) for group, s in slots.items()}


def _decisions(layout: _Layout, spans: tuple[Span, ...], width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(rows that decide [M], their spans [M], decision row of each node [R, width + 1])."""
    decides = np.array([s.decides for s in spans])
    last = (layout.draft < 0) & (layout.offset == layout.reals[layout.span] - 1) & decides[layout.span]
    rows = np.nonzero(last | (layout.draft >= 0))[0]
    index = np.full((len(spans), width + 1), -1, dtype=np.int64)
    index[layout.span[rows], layout.draft[rows] + 1] = np.arange(len(rows))
    return rows, layout.span[rows], index


def _prompt_rows(layout: _Layout, spans: tuple[Span, ...], device: torch.device) -> torch.Tensor | None:
    wanted = [s.request.params.reads_prompt for s in spans]
    if not any(wanted):
        return None
    ends = np.array([len(s.request.prompt_ids) for s in spans])
    scored = np.array(wanted)[layout.span] & (layout.draft < 0) & (layout.storage + 1 < ends[layout.span])
    return torch.from_numpy(np.nonzero(scored)[0]).to(device)
