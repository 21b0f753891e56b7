"""The forward pass alone, captured: for steps that are not captured whole.

Prompt chunks beside decoding requests, mixtures of drafters, edited logits and log-probabilities keep the host busy
around the forward pass; within it nothing depends on them. So the model's layers are captured for a number of rows and
of spans, and the step's own rows, lengths, page tables and attention tiles are copied in. What is missing to the
captured size is padding: rows that write to the null slot, and tiles without rows.

With many rows the device is busy for longer than the host needs to launch kernels, and nothing is captured.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from stridelm.attention.triton import SHORT, Launch, heights, tiles_of
from stridelm.kernels.attention import max_rows_per_tile
from stridelm.run.eager import EagerRunner, Logits
from stridelm.run.graphs import GraphPool, reach_of
from stridelm.types import DeviceGeometry, ForwardBatch
from stridelm.upload import upload

ROWS = (*range(16, 129, 16), *range(160, 257, 32), *range(320, 513, 64), *range(640, 1025, 128))
"""Sizes that a step's rows are padded to."""
SPANS = (16, 64, 256, 1024)
NOWHERE = 1 << 30
"""First row of a tile that has none."""


@dataclass(frozen=True)
class Kind:
    """What a forward pass is captured for."""

    rows: int
    spans: int
    heights: tuple[tuple[bool, int], ...]
    """For each launch of attention: whether it is for short spans, and the rows of its tiles."""
    reach: int
    """A bound on every span's end."""


class Segment:
    """One captured forward pass with its inputs."""

    def __init__(self, runner: EagerRunner, pool: GraphPool, kind: Kind, like: DeviceGeometry, most: int) -> None:
        """most: rows that a tile may have at most."""
        device = like.firsts.device
        self._kind = kind
        self._groups = tuple(like.tables)
        self._rows = torch.zeros(3 + len(self._groups), kind.rows, dtype=torch.int64, device=device)
        """Ids, positions, ancestors, and pool slots of each page group."""
        self._spans = torch.zeros(4, kind.spans, dtype=torch.int32, device=device)
        self._tables = {
            group: torch.zeros(kind.spans, table.shape[1], dtype=torch.int32, device=device)
            for group, table in like.tables.items()
        }
        self._tiles = [table.clone() for table in _tiles((), kind, device)]
        firsts, counts, starts, reals = self._spans
        ids, positions, ancestors, *slots = self._rows
        geometry = DeviceGeometry(
            bounds=(),
            firsts=firsts,
            counts=counts,
            starts=starts,
            reals=reals,
            draft_rows=ancestors,
            ancestors=ancestors,
            positions=positions,
            tables=self._tables,
            page_size=like.page_size,
            max_keys=kind.reach,
            straight=True,
        )
        launches = zip(self._tiles, kind.heights, strict=True)
        geometry.kept[most] = tuple(Launch(table[0], table[1], height) for table, (_, height) in launches)
        by_group = dict(zip(self._groups, slots, strict=True))
        self._graph, self._hidden_NH = pool.capture(lambda: runner.hidden(ids, positions, by_group, geometry))

    def replay(self, batch: ForwardBatch, geometry: DeviceGeometry) -> torch.Tensor:
        """[N, H] final states of the batch's rows, overwritten by the next replay."""
        rows, spans = batch.ids.shape[0], geometry.firsts.shape[0]
        slots = [batch.slots[group] for group in self._groups]
        self._rows[:, :rows] = torch.stack((batch.ids, batch.positions, geometry.ancestors, *slots))
        self._rows[:, rows:].zero_()
        self._spans[:, :spans] = torch.stack((geometry.firsts, geometry.counts, geometry.starts, geometry.reals))
        for group, table in self._tables.items():
            table[:spans] = geometry.tables[group]
        for ours, theirs in zip(self._tiles, _tiles(geometry.bounds, self._kind, self._rows.device), strict=True):
            ours.copy_(theirs)
        self._graph.replay()
        return self._hidden_NH[:rows]


class Segments:
    """The captured forward passes of an engine, each captured when it is first needed."""

    def __init__(self, runner: EagerRunner, pool: GraphPool, max_length: int, *, deterministic: bool) -> None:
        self._runner, self._pool, self._max_length = runner, pool, max_length
        self._deterministic = deterministic
        self._segments: dict[Kind, Segment] = {}
        spec = runner.model.spec
        dtype = runner.pool.keys[0].dtype
        self._most = max_rows_per_tile(spec.num_heads // spec.num_kv_heads, dtype, deterministic)

    def forward(self, batch: ForwardBatch) -> Logits:
        """What `EagerRunner.forward` gives."""
        segment = self._segment(batch)
        if segment is None:
            return self._runner.forward(batch)
        assert isinstance(batch.geometry, DeviceGeometry)
        return self._runner.logits(segment.replay(batch, batch.geometry), batch)

    def _segment(self, batch: ForwardBatch) -> Segment | None:
        geometry = batch.geometry
        assert isinstance(geometry, DeviceGeometry)
        # In deterministic mode rows on side branches have tiles of their own, which are not captured.
        if batch.ids.shape[0] > ROWS[-1] or (self._deterministic and not geometry.straight):
            return None
        kind = Kind(
            rows=next(size for size in ROWS if size >= batch.ids.shape[0]),
            spans=next(size for size in SPANS if size >= len(geometry.bounds)),
            heights=tuple(sorted(heights(geometry.bounds, self._most).items())),
            reach=reach_of(geometry.max_keys, self._max_length),
        )
        if kind not in self._segments:
            if self._pool.is_full:
                return None
            self._segments[kind] = Segment(self._runner, self._pool, kind, geometry, self._most)
        return self._segments[kind]


@lru_cache(maxsize=256)
def _tiles(bounds: tuple[int, ...], kind: Kind, device: torch.device) -> tuple[torch.Tensor, ...]:
    """[2, T] int32 span and first row of each tile, for each of the kind's launches; padded with tiles of no rows."""
    tables = []
    for short, height in kind.heights:
        tiles = tiles_of(bounds, height, short=short)
        room = kind.spans * -(-SHORT // height) if short else kind.spans + kind.rows // height
        table = np.full((2, room), NOWHERE, dtype=np.int32)
        table[0] = 0
        table[:, : len(tiles)] = np.array(tiles, dtype=np.int32).reshape(-1, 2).T
        tables.append(upload(table, device))
    return tuple(tables)
