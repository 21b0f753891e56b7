"""The forward pass captured by itself, for steps that are not captured whole.

Prompt chunks beside decoding requests, mixtures of drafters, and log-probabilities keep the host busy around the
forward pass; the pass itself does not depend on them. So the model's layers are captured for a number of rows and of
spans. The step's rows are copied in, and the backend copies in what attention reads. The rest, up to the captured size,
is padding: rows that write to the null slot, and whatever the backend pads with.

With many rows the device is busy for longer than the host needs to launch kernels (17 ms for 32 layers), and nothing is
captured. Then rows may stop early (run/onward.py); in a captured pass all rows go through all layers.

Captured attention is for any lengths, and cannot do for long chunks of prompts what pays for these alone, which is to
expand latents (attention/expanded.py). Where that would spare more than the host takes longer to launch a pass than the
device to replay it, the step leaves its captured pass. What both take is measured when it is captured.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

import torch

from stridelm.attention.base import Pairs
from stridelm.batch import ForwardBatch, Geometry, States
from stridelm.cache.layout import LayerState
from stridelm.run.eager import EagerRunner, Logits
from stridelm.run.graphs import GraphPool
from stridelm.run.state import PageTables

ROWS = (64, 128, 256, 384, 512, 640, 768, 896, 1024)
"""Sizes that a step's rows are padded to. Products work on tiles of 128 rows, so that most of the padding is free."""
SPANS = (16, 64, 256, 512)
MEASURED = 2048
"""Entries before the chunk by which it is measured what pairs of rows and entries take."""
CLEARLY = 1.1
"""How many times as long a captured pass must take."""


@dataclass(frozen=True)
class Kind:
    """What all steps that replay one captured forward pass have in common."""

    rows: int
    spans: int
    attention: Hashable
    """Key chosen by the attention backend."""
    taps: tuple[int, ...]


@dataclass(frozen=True)
class PassTimes:
    """What a forward pass takes on this machine, in seconds."""

    replay: float
    """A captured one, over no entries."""
    pair: float
    """More for each pair of a row and an entry in a long span, in one layer."""

    def is_faster_launched(self, pairs: Pairs, host: float) -> bool:
        """Whether a step of this size takes clearly less if it is not captured. host: what the host takes to launch
        one."""
        captured = self.replay + pairs.captured * self.pair
        return captured > CLEARLY * max(host, captured - pairs.spared * self.pair)


class Segment:
    """One captured forward pass with its inputs."""

    def __init__(
        self,
        runner: EagerRunner,
        pool: GraphPool,
        kind: Kind,
        like: Geometry,
        reach: int,
        layers: Mapping[LayerState, int],
    ) -> None:
        """reach: an upper bound on every span's end. layers: how many there are of each kind."""
        self._kind, self._pool = kind, pool
        self._static = runner.attention.static(kind.attention, kind.rows, kind.spans, reach, like)
        self._groups = tuple(like.tables)
        self._rows = torch.zeros(1 + len(self._groups), kind.rows, dtype=torch.int64, device=like.firsts.device)
        """Token ids, then pool slots of each page group."""
        ids, *slots = self._rows
        by_group, geometry = dict(zip(self._groups, slots, strict=True)), self._static.geometry
        self.host = math.inf
        """Seconds that the host took to launch the pass, the least of two."""

        def body() -> States:
            began = time.perf_counter()
            states = runner.states(ids, geometry.positions, by_group, geometry)
            self.host = min(self.host, time.perf_counter() - began)
            return states

        self._captured = pool.capture(body, self._rows.nbytes + self._static.nbytes)
        self.times: PassTimes | None = None
        """Of steps that may take less if they are not captured; None: there are none."""
        chunks = [self._chunk(start, like) for start in (0, min(MEASURED, reach - kind.rows)) if start >= 0]
        pairs = [runner.attention.pairs(chunk, layers).captured for chunk in chunks]
        if self._captured is not None and pairs[-1] > pairs[0]:
            self.times = self._measure(chunks, pairs)

    def _chunk(self, start: int, like: Geometry) -> Geometry:
        """A step of one chunk of a prompt, of all rows. Its entries are the pool's null page again and again."""
        rows, device = self._kind.rows, like.firsts.device

        def one(count: int) -> torch.Tensor:
            return torch.full((1,), count, dtype=torch.int32, device=device)

        return Geometry(
            bounds=(rows,),
            firsts=one(0),
            counts=one(rows),
            starts=one(start),
            reals=one(rows),
            draft_rows=torch.full((rows,), -1, dtype=torch.int64, device=device),
            ancestors=torch.zeros(rows, dtype=torch.int64, device=device),
            positions=torch.arange(start, start + rows, device=device),
            tables={group: torch.zeros_like(table[:1]) for group, table in self._static.geometry.tables.items()},
            page_size=like.page_size,
            max_keys=start + rows,
            is_chain=True,
            ends=(start + rows,),
        )

    def _measure(self, chunks: list[Geometry], pairs: list[float]) -> PassTimes:
        assert self._captured is not None
        seconds = []
        self._rows.zero_()
        for chunk in chunks:
            self._static.fill(chunk)
            seconds.append(self._pool.seconds(self._captured[0]))
        pair = max(0.0, seconds[1] - seconds[0]) / (pairs[1] - pairs[0])
        return PassTimes(max(0.0, seconds[0] - pair * pairs[0]), pair)

    @property
    def is_captured(self) -> bool:
        return self._captured is not None

    def replay(self, batch: ForwardBatch) -> States:
        """The states of the batch's rows, overwritten by the next replay."""
        rows = batch.ids.shape[0]
        self._rows[:, :rows] = torch.stack((batch.ids, *(batch.slots[group] for group in self._groups)))
        self._rows[:, rows:].zero_()
        self._static.fill(batch.geometry)
        assert self._captured is not None
        graph, states = self._captured
        graph.replay()
        return States(states.final[:rows], {layer: x_NH[:rows] for layer, x_NH in states.inputs.items()})


class Segments:
    """The captured forward passes of an engine, each captured when it is first needed."""

    def __init__(self, runner: EagerRunner, pool: GraphPool, max_length: int) -> None:
        self._runner, self._pool, self._max_length = runner, pool, max_length
        self._layers = Counter(runner.pool.read)  # once: layers are many, and compared number by number
        self._segments: dict[Kind, Segment | None] = {}
        """None: there was no memory for it."""
        self.missing = 0
        """How many passes there was no memory for."""
        self._host = math.inf
        """What the host takes to launch a pass, however many rows it has: the least of all that it launched to capture
        them. Single ones take up to twice as long."""

    def forward(self, batch: ForwardBatch) -> Logits:
        """The same result as `EagerRunner.forward`."""
        segment = self._segment(batch)
        if segment is None or self._is_faster_launched(segment, batch.geometry):
            return self._runner.forward(batch)
        return self._runner.logits(segment.replay(batch), batch)

    def expected(self, requests: int) -> list[tuple[int, int]]:
        """(rows, spans) of what steps of at most so many requests may need, the smallest first."""
        fewest = dict(zip(SPANS, (1, *(size + 1 for size in SPANS))))
        sizes = itertools.product(ROWS, SPANS)
        return [(rows, spans) for rows, spans in sizes if fewest[spans] <= min(rows, requests)]

    def prepare(self, rows: int, spans: int, pages: PageTables, page_size: int) -> None:
        """Capture forward passes of such a size, if the backend can."""
        self._captured(rows, spans, _no_rows(pages, page_size, self._max_length))

    def _is_faster_launched(self, segment: Segment, geometry: Geometry) -> bool:
        # With fewer rows than the smallest pass has, a step may need kernels that no capture has compiled.
        if segment.times is None or geometry.positions.shape[0] < ROWS[0]:
            return False
        return segment.times.is_faster_launched(self._runner.attention.pairs(geometry, self._layers), self._host)

    def _segment(self, batch: ForwardBatch) -> Segment | None:
        rows, spans = batch.ids.shape[0], len(batch.geometry.bounds)
        if rows > ROWS[-1]:
            return None
        rows, spans = (next(size for size in sizes if size >= n) for sizes, n in ((ROWS, rows), (SPANS, spans)))
        return self._captured(rows, spans, batch.geometry)

    def _captured(self, rows: int, spans: int, like: Geometry) -> Segment | None:
        pool = self._runner.pool
        attention = self._runner.attention.static_kind(like, pool.read, pool.dtype)
        if attention is None:
            return None
        kind = Kind(rows, spans, attention, self._runner.taps)
        if kind not in self._segments:
            segment = Segment(self._runner, self._pool, kind, like, self._max_length, self._layers)
            self._segments[kind] = segment if segment.is_captured else None
            self.missing += not segment.is_captured
            self._host = min(self._host, segment.host)
        return self._segments[kind]


def _no_rows(pages: PageTables, page_size: int, reach: int) -> Geometry:
    """The geometry of a step without rows, whose tables are as wide as those of any step."""
    tables = {group: table[:0] for group, table in pages.tables.items()}
    device = next(iter(tables.values())).device
    nobody = torch.zeros(0, dtype=torch.int32, device=device)
    nothing = torch.zeros(0, dtype=torch.int64, device=device)
    return Geometry(
        bounds=(),
        firsts=nobody,
        counts=nobody,
        starts=nobody,
        reals=nobody,
        draft_rows=nothing,
        ancestors=nothing,
        positions=nothing,
        tables=tables,
        page_size=page_size,
        max_keys=reach,
        is_chain=True,
    )
