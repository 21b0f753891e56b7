"""The forward pass alone, captured: for steps that are not captured whole.

Prompt chunks beside decoding requests, mixtures of drafters, and log-probabilities keep the host busy
around the forward pass; within it nothing depends on them. So the model's layers are captured for a number of rows and
of spans, and the step's own rows, lengths, page tables and attention tiles are copied in. What is missing to the
captured size is padding: rows that write to the null slot, and tiles without rows.

With many rows the device is busy for about as long as the host needs to launch kernels, and nothing is captured.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from stridelm.attention.triton import SHORT, Launch, tiles_of
from stridelm.kernels.attention import max_rows_per_tile
from stridelm.run.eager import EagerRunner, Logits
from stridelm.run.graphs import GraphPool, reach_of
from stridelm.types import DeviceGeometry, ForwardBatch, States
from stridelm.upload import upload

ROWS = (32, 64, 128, 192, 256, 384, 512)
"""Sizes that a step's rows are padded to. Few, because each is captured while somebody waits."""
SPANS = (4, 16, 64, 256, 512)
NOWHERE = 1 << 30
"""First row of a tile that has none."""


@dataclass(frozen=True)
class Kind:
    """What a forward pass is captured for."""

    rows: int
    spans: int
    short: int
    """Rows of a tile of short spans; 0: there are none."""
    long: int
    """The same of the others."""
    reach: int
    """A bound on every span's end."""
    taps: tuple[int, ...]


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
            is_chain=True,
        )
        launches = zip(self._tiles, filter(None, (kind.short, kind.long)), strict=True)
        geometry.kept[most] = tuple(Launch(table[0], table[1], height) for table, height in launches)
        by_group = dict(zip(self._groups, slots, strict=True))
        inputs = sum(tensor.nbytes for tensor in (self._rows, self._spans, *self._tables.values(), *self._tiles))
        self._captured = pool.capture(lambda: runner.states(ids, positions, by_group, geometry), inputs)

    @property
    def is_captured(self) -> bool:
        return self._captured is not None

    def replay(self, batch: ForwardBatch, geometry: DeviceGeometry) -> States:
        """Those of the batch's rows, overwritten by the next replay."""
        rows, spans = batch.ids.shape[0], geometry.firsts.shape[0]
        slots = [batch.slots[group] for group in self._groups]
        self._rows[:, :rows] = torch.stack((batch.ids, batch.positions, geometry.ancestors, *slots))
        self._rows[:, rows:].zero_()
        self._spans[:, :spans] = torch.stack((geometry.firsts, geometry.counts, geometry.starts, geometry.reals))
        for group, table in self._tables.items():
            table[:spans] = geometry.tables[group]
        for ours, theirs in zip(self._tiles, _tiles(geometry.bounds, self._kind, self._rows.device), strict=True):
            ours.copy_(theirs)
        assert self._captured is not None
        graph, states = self._captured
        graph.replay()
        return States(states.final[:rows], {layer: x_NH[:rows] for layer, x_NH in states.inputs.items()})


class Segments:
    """The captured forward passes of an engine, each captured when it is first needed."""

    def __init__(self, runner: EagerRunner, pool: GraphPool, max_length: int, *, deterministic: bool) -> None:
        self._runner, self._pool, self._max_length = runner, pool, max_length
        self._deterministic = deterministic
        self._segments: dict[Kind, Segment | None] = {}
        """None: there was no memory for it."""
        spec = runner.model.spec
        self._most = max_rows_per_tile(spec.num_heads // spec.num_kv_heads, runner.pool.dtype, deterministic)

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
        # In deterministic mode rows on side branches have tiles of their own, which are not captured. Nor are models
        # whose tiles have room for a single row.
        apart = self._deterministic and not geometry.is_chain
        if batch.ids.shape[0] > ROWS[-1] or apart or self._most == 1:
            return None
        longest = max(geometry.bounds)
        short = max((bound for bound in geometry.bounds if bound <= SHORT), default=0)
        kind = Kind(
            rows=next(size for size in ROWS if size >= batch.ids.shape[0]),
            spans=next(size for size in SPANS if size >= len(geometry.bounds)),
            short=0 if not short else 1 if short == 1 else min(SHORT, self._most),
            long=0 if longest <= SHORT else self._most,
            reach=reach_of(geometry.max_keys, self._max_length),
            taps=self._runner.taps,
        )
        if kind not in self._segments:
            segment = Segment(self._runner, self._pool, kind, geometry, self._most)
            self._segments[kind] = segment if segment.is_captured else None
        return self._segments[kind]


@lru_cache(maxsize=256)
def _tiles(bounds: tuple[int, ...], kind: Kind, device: torch.device) -> tuple[torch.Tensor, ...]:
    """[2, T] int32 span and first row of each tile, for each of the kind's launches; padded with tiles of no rows."""
    tables = []
    for height, short in ((kind.short, True), (kind.long, False)):
        if height:
            tiles = tiles_of(bounds, height, short=short)
            each = -(-SHORT // height) if height > 1 else 1
            room = kind.spans * each if short else kind.spans + kind.rows // height
            table = np.full((2, room), NOWHERE, dtype=np.int32)
            table[0] = 0
            table[:, : len(tiles)] = np.array(tiles, dtype=np.int32).reshape(-1, 2).T
            tables.append(upload(table, device))
    return tuple(tables)
