"""Which rows of a step go through all of a model's layers.

After the last layer that stores entries, layers read what earlier ones have stored: to a later step nothing of a row is
left there. So a row goes on only if this step needs its last state: it may decide a token, its prompt is scored, or the
request's drafter reads it. Of a prompt's chunk in the middle that is no row at all, and of its last chunk one.

    span                     rows that go on
    does not decide          none
    decides                  its last real row, its draft rows
    whole                    all: its prompt is scored, or its drafter folds the state of every row

The rows that go on are a step of their own for attention: spans that begin where theirs were cut. How many real rows a
span has is read on the device, so the plan's bounds suffice to lay them out.

Legend: R spans of the step, S spans of which rows go on, N rows of the step, M rows that go on.
"""

from __future__ import annotations

import numpy as np
import torch

from stridelm.batch import ForwardBatch, Geometry, Onward
from stridelm.types import Span
from stridelm.upload import upload


def onward(batch: ForwardBatch) -> Onward | None:
    """None if all rows of the step go on."""
    if batch.whole is None:
        return None
    cut = np.array([_cut(span, whole) for span, whole in zip(batch.spans, batch.whole, strict=True)])
    if not cut.any():
        return None
    bounds = np.array(batch.row_counts) - cut
    places = np.flatnonzero(bounds > 0)
    bounds, every = bounds[places], cut[places] == 0
    firsts = np.cumsum(bounds) - bounds
    owner = np.repeat(np.arange(len(places)), bounds)
    device = batch.ids.device
    span_S, every_S, first_S = upload(np.stack((places, every, firsts)), device).unbind(0)
    owner_M, offset_M = upload(np.stack((owner, np.arange(len(owner)) - firsts[owner])), device).unbind(0)
    geometry = batch.geometry
    # What is cut off a span that decides ends before its last real row; of one that turned out to be padding, nothing.
    skipped_S = torch.where(every_S > 0, 0, (batch.reals[span_S] - 1).clamp(min=0))
    rows_M = (geometry.firsts[span_S] + skipped_S)[owner_M] + offset_M
    return Onward(rows_M, _of_rows(geometry, rows_M, span_S, skipped_S.to(torch.int32), first_S, bounds))


def _cut(span: Span, whole: bool) -> int:
    """How many rows of a span do not go on, at most."""
    return 0 if whole else span.real - 1 if span.decides else span.rows


def _of_rows(
    geometry: Geometry,
    rows_M: torch.Tensor,
    span_S: torch.Tensor,
    skipped_S: torch.Tensor,
    first_S: torch.Tensor,
    bounds: np.ndarray,
) -> Geometry:
    """The geometry of these rows alone. skipped: int32 real rows of each span before its first here."""
    return Geometry(
        bounds=tuple(bounds.tolist()),
        firsts=first_S.to(torch.int32),
        counts=geometry.counts[span_S] - skipped_S,
        starts=geometry.starts[span_S] + skipped_S,
        reals=geometry.reals[span_S] - skipped_S,
        draft_rows=geometry.draft_rows[rows_M],
        ancestors=geometry.ancestors[rows_M],
        positions=geometry.positions[rows_M],
        tables={group: pages[span_S] for group, pages in geometry.tables.items()},
        page_size=geometry.page_size,
        max_keys=geometry.max_keys,
        is_chain=geometry.is_chain,
    )
