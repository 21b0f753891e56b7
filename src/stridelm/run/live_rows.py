"""Drops rows that turned out to be padding, for attention on the host: there checking costs nothing, and computing them
would."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from stridelm.batch import ForwardBatch


def reached(tables: dict[str, torch.Tensor], most: int, page_size: int) -> dict[str, torch.Tensor]:
    """Page tables cut to storage [0, most), because attention on the host reads whole tables."""
    return {group: pages[:, : -(-most // page_size)] for group, pages in tables.items()}


def without_padding(batch: ForwardBatch) -> ForwardBatch:
    """The batch without the rows that turned out to be padding, whose results are not needed. The page tables that it
    was given with are cut in place."""
    geometry = batch.geometry
    geometry.tables = reached(geometry.tables, geometry.max_keys, geometry.page_size)
    live_N = (geometry.draft_rows.numpy() < 0) | (geometry.ancestors.numpy() != 0)
    if live_N.all() and (batch.decision_index.numpy() >= 0).all():  # there is no padding
        return batch
    if not live_N.all():
        batch = _only(batch, torch.from_numpy(live_N))
    index = batch.decision_index.numpy()
    exists = index >= 0
    nodes = np.flatnonzero(exists)
    renumbered = np.full_like(index, -1)
    renumbered[exists] = np.arange(len(nodes))

    def chosen(each_M: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(each_M.numpy()[nodes])

    return replace(
        batch,
        grid=False,
        decisions=chosen(batch.decisions),
        decision_span=chosen(batch.decision_span),
        decision_draft=chosen(batch.decision_draft),
        decision_index=torch.from_numpy(renumbered),
        decision_host=batch.decision_host[nodes],
        every_row=False,
    )


def _only(batch: ForwardBatch, live_N: torch.Tensor) -> ForwardBatch:
    """The batch with only its live rows."""
    geometry, here, place = batch.geometry, live_N.nonzero()[:, 0], live_N.cumsum(0) - 1
    spans = torch.repeat_interleave(torch.tensor(geometry.bounds))[here]
    bounds = torch.bincount(spans, minlength=len(geometry.bounds))
    geometry = replace(
        geometry,
        bounds=tuple(bounds.tolist()),
        firsts=(bounds.cumsum(0) - bounds).to(torch.int32),
        draft_rows=geometry.draft_rows[here],
        ancestors=geometry.ancestors[here],
        positions=geometry.positions[here],
        kept={},
    )
    return replace(
        batch,
        ids=batch.ids[here],
        positions=geometry.positions,
        slots={group: slots[here] for group, slots in batch.slots.items()},
        geometry=geometry,
        decisions=place[batch.decisions],
        prompt_rows=None if batch.prompt_rows is None else place[batch.prompt_rows],
    )
