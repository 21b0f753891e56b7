"""Rows for a drafter's own layers: laid out, placed in the target's pages, and run.

A drafter's KV entries use the storage indices of their request, in a separate pool with the target's page ids. So its
KV needs no tables and no ledger: wherever the target has pages for a request, so does the drafter.

Legend: R requests, N rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from stridelm.arena import Arena
from stridelm.attention.base import AttentionBackend
from stridelm.batch import Geometry
from stridelm.cache.layout import FULL, LayerStates, bytes_per_token
from stridelm.cache.pool import MemoryBudget, free_memory
from stridelm.kernels.ops import Ops
from stridelm.kernels.plain_step import pool_slots
from stridelm.kernels.step_ops import StepOps
from stridelm.models.layers.decoder import Decoder
from stridelm.run.batch import RowLayout, row_layout
from stridelm.run.eager import EagerRunner, PagedMix
from stridelm.run.live_rows import reached
from stridelm.run.state import PageTables, Tables
from stridelm.types import MAX_DRAFT_ROWS

FEW_ROWS = 8
"""On a CPU, up to so many rows are all run to the end: to lay out those that go on takes longer than the others do."""
MAX_CAPTURED = 2 * (MAX_DRAFT_ROWS + 1)
"""Maximum rows per request that a captured step may run through a head: a tail, the last token, and a draft."""


class Head(Protocol):
    """Layers with KV of their own."""

    ops: Ops

    @property
    def layer_states(self) -> LayerStates: ...


@dataclass(frozen=True)
class TargetRuntime:
    """The running target, for drafters with layers of their own."""

    runner: EagerRunner
    tables: PageTables
    page_size: int
    dtype: torch.dtype
    stored: Callable[[LayerStates], LayerStates]
    """Layers as this engine stores them."""
    deterministic: bool
    ops: StepOps
    arena: Arena
    patience: int = 0
    """Most rows for which a head may leave its KV to a later step."""

    @property
    def model(self) -> Decoder:
        return self.runner.model

    @property
    def attention(self) -> AttentionBackend:
        return self.runner.attention


def head_layout(bounds: tuple[int, ...], arena: Arena) -> RowLayout:
    """bounds: maximum rows of each request."""
    if len(set(bounds)) == 1 and bounds[0] <= MAX_CAPTURED:
        return arena.keep(_even, len(bounds), bounds[0])
    return arena.recent(row_layout, tuple((bound, 0, True) for bound in bounds), 0)


def _even(requests: int, rows: int, device: torch.device) -> RowLayout:
    return row_layout(((rows, 0, True),) * requests, 0, device)


@dataclass(frozen=True)
class HeadRows:
    """N rows of R requests, each request's rows contiguous."""

    span_N: torch.Tensor
    """int64 request of each row."""
    offset_N: torch.Tensor
    """int64 index of each row among its request's rows."""
    position_N: torch.Tensor
    """int64; for rows outside a tree, also their storage index."""
    slots: dict[str, torch.Tensor]
    """Page group -> [N] pool slot; padding has the null slot."""
    geometry: Geometry
    last_R: torch.Tensor
    """int64 each request's last row; arbitrary if it has none."""

    def only(self, stay_N: torch.Tensor) -> HeadRows:
        """The same rows, of which only those in `stay_N` write entries."""
        return replace(self, slots={group: torch.where(stay_N, slot, 0) for group, slot in self.slots.items()})


def place(
    rows: RowLayout,
    slots_R: torch.Tensor,
    starts_R: torch.Tensor,
    counts_R: torch.Tensor | None,
    runtime: TargetRuntime,
    most: int,
    stays_R: torch.Tensor | None = None,
    *,
    tables: Tables | None = None,
) -> HeadRows:
    """Place `counts` rows of each request from storage index `starts` on (0 if it is negative), at most as many as the
    layout has room for; None fills the layout. Each row sees all entries up to its own.

    most: an exclusive upper bound on every request's last index. stays_R: bool, requests whose rows write entries; None
    for all. tables: of these requests, if the caller has them. The rest of the layout is padding, which is left out if
    attention runs on the host.
    """
    counts_R = rows.reals_R if counts_R is None else counts_R
    tables = runtime.tables.of(slots_R) if tables is None else tables
    if not runtime.attention.reads_device:
        return _placed_for_host(rows, slots_R, starts_R, counts_R, runtime, most, stays_R, tables)
    storage, own, slots, about, last = runtime.ops.place(
        slots_R,
        starts_R,
        counts_R,
        stays_R,
        runtime.tables.tables,
        rows.firsts_R,
        rows.span_N,
        rows.offset_N,
        max(rows.bounds),
        runtime.page_size,
    )
    geometry = _geometry(rows, tables, about[1], about[0], about[0], own, rows.nothing_N, storage, runtime, most)
    return HeadRows(rows.span_N, rows.offset_N, storage, slots, geometry, last)


def _placed_for_host(
    rows: RowLayout,
    slots_R: torch.Tensor,
    starts_R: torch.Tensor,
    counts_R: torch.Tensor,
    runtime: TargetRuntime,
    most: int,
    stays_R: torch.Tensor | None,
    tables: Tables,
) -> HeadRows:
    """The same rows without padding."""
    laid, slots, about, last = runtime.ops.place_live(
        slots_R, starts_R, counts_R, stays_R, runtime.tables.tables, runtime.page_size
    )
    span, offset, storage, own, seen = laid.unbind(0)
    first32_R, start32_R, count32_R = about.unbind(0)
    bounds = tuple(counts_R.tolist())
    if bounds != rows.bounds:
        rows = replace(rows, bounds=bounds, first32_R=first32_R, kept={})
    geometry = _geometry(rows, tables, start32_R, count32_R, count32_R, own, seen, storage, runtime, most)
    return HeadRows(span, offset, storage, slots, geometry, last)


def place_nodes(
    rows: RowLayout,
    slots_R: torch.Tensor,
    base_R: torch.Tensor,
    first: int,
    level: int,
    ancestors_RE: torch.Tensor,
    runtime: TargetRuntime,
    most: int,
) -> HeadRows:
    """Place E nodes of each request's tree in storage, at `base` + `first` to `base` + `first` + E - 1. Each sees all
    entries before the base, and the nodes set in its bitmask; its position is that of its level, 1 being the base's."""
    span, offset = rows.span_N, rows.offset_N
    storage = base_R[span] + first + offset
    positions = base_R[span] + level - 1
    nodes = torch.full_like(base_R, ancestors_RE.shape[1])
    # A request's row i is stored at start + i, and its draft begins at start + real, so `real` is negative here:
    # `first` nodes of the tree are stored before the first of these rows.
    reals = torch.full_like(base_R, -first)
    start_R, own, seen = base_R + first, first + offset, ancestors_RE.flatten()
    tables = runtime.tables.of(slots_R)
    geometry = _geometry(rows, tables, start_R, nodes, reals, own, seen, positions, runtime, most)
    slots = _pool_slots(slots_R[span], storage, torch.ones_like(span, dtype=torch.bool), runtime)
    last = rows.firsts_R + nodes - 1
    return HeadRows(span, offset, positions, slots, geometry, last)


def last_of(
    rows: HeadRows,
    back: int,
    slots_R: torch.Tensor,
    ends_R: torch.Tensor,
    runtime: TargetRuntime,
    most: int,
    tables: Tables,
) -> LastRows:
    """Of rows placed with these arguments, each request's last, whose storage index is `ends`, or the one `back` before
    it; arbitrary if there is none."""
    at = (rows.last_R - back).clamp(min=0) if back else rows.last_R
    if not runtime.attention.reads_device and len(rows.span_N) <= FEW_ROWS:
        return LastRows(at, None)
    one_each = head_layout((1,) * len(slots_R), runtime.arena)
    alone = place(one_each, slots_R, ends_R - back if back else ends_R, None, runtime, most, tables=tables)
    return LastRows(at, alone.geometry)


def none_of(rows: HeadRows) -> LastRows:
    """No row's output is needed, only the entries that all write."""
    return LastRows(rows.span_N[:0], rows.geometry)


@dataclass(frozen=True)
class LastRows:
    """Rows whose output is needed, not only the entries that they write: one per request, or none."""

    rows_R: torch.Tensor
    """int64 index among all rows that are run."""
    geometry: Geometry | None
    """Geometry of these rows alone; None if all rows are run to the end, because they are so few on a CPU that leaving
    some out takes longer."""


def _pool_slots(
    owner_N: torch.Tensor, storage_N: torch.Tensor, live_N: torch.Tensor, runtime: TargetRuntime
) -> dict[str, torch.Tensor]:
    return {
        group: pool_slots(pages, owner_N, storage_N, live_N, runtime.page_size)
        for group, pages in runtime.tables.tables.items()
    }


def _geometry(
    rows: RowLayout,
    tables: Tables,
    starts_R: torch.Tensor,
    counts_R: torch.Tensor,
    reals_R: torch.Tensor,
    draft_rows_N: torch.Tensor,
    ancestors_N: torch.Tensor,
    positions_N: torch.Tensor,
    runtime: TargetRuntime,
    most: int,
) -> Geometry:
    if not runtime.attention.reads_device:  # the host reads all of a table
        tables = reached(tables, most, runtime.page_size)
    return Geometry(
        bounds=rows.bounds,
        firsts=rows.first32_R,
        counts=counts_R.to(torch.int32),
        starts=starts_R.to(torch.int32),
        reals=reals_R.to(torch.int32),
        draft_rows=draft_rows_N,
        ancestors=ancestors_N,
        positions=positions_N,
        tables=tables,
        page_size=runtime.page_size,
        max_keys=most,
        is_chain=True,
        kept=rows.kept,
    )


class HeadRunner:
    """A head's own KV pool, and attention over it."""

    def __init__(self, head: Head, runtime: TargetRuntime) -> None:
        """Raises ValueError if there is no room for the pool, or attention cannot serve the head."""
        self._head = head
        self._serving = runtime
        device = runtime.model.norm.device
        states = runtime.stored(head.layer_states)
        runtime.attention.check(states, runtime.dtype)
        page_bytes = runtime.page_size * bytes_per_token(states, runtime.dtype)
        pool = runtime.runner.pool
        MemoryBudget(device, free_memory(device)).check(pool.pages[FULL], page_bytes)
        self.pool = pool.beside(states, runtime.ops)

    def mix(self, rows: HeadRows, last_rows: LastRows | None = None) -> PagedMix:
        """What the head calls to mix its own layer i for these rows. All rows write their entries; if `last_rows` with
        a geometry are given, only those attend, and the result is theirs."""
        geometry, wanted = rows.geometry, None
        if last_rows is not None and last_rows.geometry is not None:
            geometry, wanted = last_rows.geometry, last_rows.rows_R
        prepared = self._serving.attention.prepare(geometry)
        return PagedMix(self.pool, self._head.ops, prepared, rows.slots, wanted)
