"""Latents that are expanded into keys and values of heads, for the rows of long spans.

A head multiplies a row's query by an entry's key, and the entry's value by the weight. With absorbed expansions that
takes 2 rank + rope multiplications, with expanded ones key + rope + value: 1,088 and 320 in published models. But the
expansion of an entry takes rank * (key + value) for each head, whoever reads it. A row that attends to expanded entries
needs no absorbed products, which take as many, so that a span pays for the entries before its own:

    pays if     rows * (2 rank - key - value)  >  rank * (key + value)        rows > 171 in published models

So the way that a row goes depends on how its prompt is cut, and with it the row's bits: never where equal bits are
promised.

Expanded entries live for one layer, in a tensor in which the spans lie one after another. It is bounded: heads are
taken in as many passes as needed, since heads do not meet in attention.

Legend: L entries seen by the expanded spans, each span's filled up to whole pages; M rows of some spans, D and V widths
of a head's expanded key and value, K width of the part that all heads share.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil
from typing import ClassVar

import numpy as np
import torch

from stridelm.attention.base import AttentionBackend, Expansion, LatentMixer, Pairs
from stridelm.batch import Geometry
from stridelm.cache.layout import LatentKV
from stridelm.kernels.entries import read
from stridelm.upload import upload

MAX_EXPANDED = 256 << 20
"""Bytes that expanded entries may take. One head's always fit, as long as there are no more than MAX_ENTRIES."""
MAX_ENTRIES = 1 << 17
"""Maximum entries that a step expands; rows of spans that would exceed it go the other way."""


class ExpandingLatents(LatentMixer):
    """Expands the latents that the rows of long spans see, where equal bits are not promised."""

    lead: ClassVar[float] = 1.5
    """How many times the rows at which arithmetic is equal a span must have, since expanded entries are also written
    and read. On one core of an AMD EPYC 192 rows are 1.2x as fast after 512 entries and 0.8x after 8,192, and 256 are
    1.4x and 0.9x."""

    def __init__(self, backend: AttentionBackend, geometry: Geometry) -> None:
        self._backend, self._geometry = backend, geometry
        self._parts: dict[tuple[str, int], _Parts | None] = {}

    @classmethod
    def can_expand(cls, state: LatentKV) -> bool:
        """Whether there is a kernel for such keys and values."""
        return True

    @classmethod
    def least_rows(cls, state: LatentKV) -> int | None:
        """The fewest rows of a span for which entries are expanded; None: they never are. With a window, rows would not
        see most of them."""
        if state.expands is None or state.window is not None or not cls.can_expand(state):
            return None
        saved = 2 * state.rank - sum(state.expands)
        return ceil(cls.lead * state.rank * sum(state.expands) / saved) if saved > 0 else None

    @classmethod
    def workspace(cls, state: LatentKV, dtype: torch.dtype, deterministic: bool, rows: int, reach: int) -> int:
        least = None if deterministic else cls.least_rows(state)
        if least is None or state.expands is None:
            return 0
        entries = min(MAX_ENTRIES, rows // least * reach)
        gathered = entries * (state.rank + state.rope_dim) * (dtype.itemsize + (state.stored or dtype).itemsize)
        one_head = entries * _head_width(state) * dtype.itemsize
        # Beside them are copies of the queries of other spans' rows.
        queries = rows * state.heads * (state.expands[0] + state.rope_dim) * dtype.itemsize
        return gathered + min(one_head * state.heads, max(one_head, MAX_EXPANDED)) + queries

    @classmethod
    def pairs(cls, state: LatentKV, deterministic: bool, geometry: Geometry) -> Pairs:
        least = None if deterministic else cls.least_rows(state)
        if least is None or state.expands is None:
            return super().pairs(state, deterministic, geometry)
        spans = [(geometry.bounds[span], geometry.ends[span]) for span in long_spans(geometry, least)]
        saved = (2 * state.rank - sum(state.expands)) / (2 * state.rank + state.rope_dim)
        absorbed = sum(rows * end for rows, end in spans)
        return Pairs(absorbed, saved * sum((rows - least) * end for rows, end in spans))

    def attend_expanded(
        self,
        state: LatentKV,
        q_MHD: torch.Tensor,
        turned_MHK: torch.Tensor,
        both_LHX: torch.Tensor,
        tails_LK: torch.Tensor,
    ) -> torch.Tensor:
        """[M, H, V]: attend with the step's rows, with as many heads as there are in `both`: keys and, after them,
        values. tails: the part of keys that all heads share."""
        raise NotImplementedError

    def values(
        self,
        state: LatentKV,
        q_NHD: torch.Tensor,
        turned_NHK: torch.Tensor,
        latents_PC: torch.Tensor,
        expansion: Expansion,
    ) -> torch.Tensor:
        parts = self._parts_of(state)
        if parts is None:
            return super().values(state, q_NHD, turned_NHK, latents_PC, expansion)
        long, others, slots_L = parts.long, parts.others, parts.slots_L
        if others is None:
            return _over_expanded(long.mixer, slots_L, state, q_NHD, turned_NHK, latents_PC, expansion)
        others_MHV = others.mixer.values(state, *others.of(q_NHD, turned_NHK), latents_PC, expansion)
        long_MHV = _over_expanded(long.mixer, slots_L, state, *long.of(q_NHD, turned_NHK), latents_PC, expansion)
        out_NHV = long_MHV.new_empty(len(q_NHD), *long_MHV.shape[1:])
        return out_NHV.index_copy_(0, long.rows_M, long_MHV).index_copy_(0, others.rows_M, others_MHV)

    def expands_some(self, state: LatentKV) -> bool:
        """Whether some of the step's rows attend to expanded entries."""
        return self._parts_of(state) is not None

    def _parts_of(self, state: LatentKV) -> _Parts | None:
        """The step in two, which its layers share; None: no row attends to expanded entries."""
        least = None if self._backend.deterministic else self.least_rows(state)
        if least is None:
            return None
        key = state.group, least
        if key not in self._parts:
            long = long_spans(self._geometry, least)
            self._parts[key] = self._cut(state.group, long) if long else None
        return self._parts[key]

    def _cut(self, group: str, long: list[int]) -> _Parts:
        geometry = self._geometry
        others = [span for span in range(len(geometry.bounds)) if span not in set(long)]
        slots_L, tables = lay_out_entries(geometry, group, long)
        rows_M, of_long = only(geometry, long)
        part = _Part(rows_M, type(self)(self._backend, replace(of_long, tables={group: tables})))
        if not sum(geometry.bounds[span] for span in others):
            return _Parts(slots_L, part, None)
        rows_M, of_others = only(geometry, others)
        return _Parts(slots_L, part, _Part(rows_M, type(self)(self._backend, replace(of_others, ends=()))))


@dataclass(frozen=True, eq=False)
class _Part:
    """Some spans of a step."""

    rows_M: torch.Tensor
    """int64 rows of the batch."""
    mixer: ExpandingLatents
    """Of these spans alone."""

    def of(self, q_NHD: torch.Tensor, turned_NHK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return q_NHD.index_select(0, self.rows_M), turned_NHK.index_select(0, self.rows_M)


@dataclass(frozen=True, eq=False)
class _Parts:
    slots_L: torch.Tensor
    """int64 pool slots of the entries that are expanded."""
    long: _Part
    """Its tables are of the expanded entries."""
    others: _Part | None


def _over_expanded(
    mixer: ExpandingLatents,
    slots_L: torch.Tensor,
    state: LatentKV,
    q_MHD: torch.Tensor,
    turned_MHK: torch.Tensor,
    latents_PC: torch.Tensor,
    expansion: Expansion,
) -> torch.Tensor:
    seen_LC = read(latents_PC, slots_L).to(q_MHD.dtype)
    if state.key_scale != 1.0:
        seen_LC.mul_(state.key_scale)
    latents_LR, tails_LK = seen_LC.split((state.rank, state.rope_dim), dim=1)
    found = [
        mixer.attend_expanded(
            state,
            q_MHD[:, first:last],
            turned_MHK[:, first:last],
            expansion.expand(latents_LR, first, last),
            tails_LK,
        )
        for first, last in passes(state, len(seen_LC), q_MHD.element_size())
    ]
    return found[0] if len(found) == 1 else torch.cat(found, dim=1)


def passes(state: LatentKV, entries: int, itemsize: int) -> Iterator[tuple[int, int]]:
    """(first head, one past the last) of each pass."""
    fit = max(1, MAX_EXPANDED // (entries * _head_width(state) * itemsize))
    size = ceil(state.heads / ceil(state.heads / fit))
    for first in range(0, state.heads, size):
        yield first, min(first + size, state.heads)


def long_spans(geometry: Geometry, least: int) -> list[int]:
    """The spans with so many rows, as far as there is room for what they see."""
    found: list[int] = []
    if len(geometry.ends) != len(geometry.bounds):
        return found
    room = MAX_ENTRIES // geometry.page_size
    for span, (rows, end) in enumerate(zip(geometry.bounds, geometry.ends, strict=True)):
        pages = -(-end // geometry.page_size)
        if rows >= least and pages <= room:
            room -= pages
            found.append(span)
    return found


def lay_out_entries(geometry: Geometry, group: str, spans: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """([L] int64 pool slots of all that these spans see, one span after another; [spans, pages] int32 page table over
    entries in that order)."""
    device, size = geometry.firsts.device, geometry.page_size
    counts = np.array([-(-geometry.ends[span] // size) for span in spans])
    firsts = np.cumsum(counts) - counts
    pages = np.arange(counts.sum()) - np.repeat(firsts, counts)
    owner, page = upload(np.stack((np.repeat(np.array(spans), counts), pages)), device)
    page_L = geometry.tables[group][owner, page].to(torch.int64)
    slots_L = (page_L[:, None] * size + torch.arange(size, device=device)).flatten()
    own = np.arange(counts.max())
    tables = np.where(own < counts[:, None], firsts[:, None] + own, 0)
    return slots_L, upload(tables.astype(np.int32), device)


def only(geometry: Geometry, spans: list[int]) -> tuple[torch.Tensor, Geometry]:
    """(int64 rows of these spans, the step of these alone)."""
    device, bounds = geometry.firsts.device, np.array(geometry.bounds)
    assert bounds.sum() == len(geometry.positions), "rows are not laid out by the bounds"
    rows_M = upload(np.flatnonzero(np.isin(np.repeat(np.arange(len(bounds)), bounds), spans)), device)
    span_R, lengths = upload(np.array(spans), device), bounds[spans]
    return rows_M, replace(
        geometry,
        bounds=tuple(lengths.tolist()),
        firsts=upload((np.cumsum(lengths) - lengths).astype(np.int32), device),
        counts=geometry.counts[span_R],
        starts=geometry.starts[span_R],
        reals=geometry.reals[span_R],
        draft_rows=geometry.draft_rows[rows_M],
        ancestors=geometry.ancestors[rows_M],
        positions=geometry.positions[rows_M],
        tables={group: table[span_R] for group, table in geometry.tables.items()},
        max_keys=max(geometry.ends[span] for span in spans),
        ends=tuple(geometry.ends[span] for span in spans),
        kept={},
    )


def _head_width(state: LatentKV) -> int:
    """Numbers that a head's key and value have."""
    assert state.expands is not None
    return sum(state.expands)
