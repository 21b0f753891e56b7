"""The forward pass captured by itself, for steps that are not captured whole.

Prompt chunks beside decoding requests, mixtures of drafters, and log-probabilities keep the host busy around the
forward pass; the pass itself does not depend on them. So the model's layers are captured for a number of rows and of
spans. The step's rows are copied in, and the backend copies in what attention reads. The rest, up to the captured size,
is padding: rows that write to the null slot, and whatever the backend pads with.

With many rows the device is busy for about as long as the host needs to launch kernels, and nothing is captured.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch

from stridelm.run.eager import EagerRunner, Logits
from stridelm.run.graphs import GraphPool, reach_of
from stridelm.types import ForwardBatch, Geometry, States

ROWS = (32, 64, 128, 192, 256, 384, 512)
"""Sizes that a step's rows are padded to. Few, because each is captured while a request waits."""
SPANS = (4, 16, 64, 256, 512)


@dataclass(frozen=True)
class Kind:
    """What all steps that replay one captured forward pass have in common."""

    rows: int
    spans: int
    attention: Hashable
    """Key chosen by the attention backend."""
    reach: int
    """Upper bound on every span's end."""
    taps: tuple[int, ...]


class Segment:
    """One captured forward pass with its inputs."""

    def __init__(self, runner: EagerRunner, pool: GraphPool, kind: Kind, like: Geometry) -> None:
        self._static = runner.attention.static(kind.attention, kind.rows, kind.spans, kind.reach, like)
        self._groups = tuple(like.tables)
        self._rows = torch.zeros(1 + len(self._groups), kind.rows, dtype=torch.int64, device=like.firsts.device)
        """Token ids, then pool slots of each page group."""
        ids, *slots = self._rows
        by_group, geometry = dict(zip(self._groups, slots, strict=True)), self._static.geometry
        self._captured = pool.capture(
            lambda: runner.states(ids, geometry.positions, by_group, geometry), self._rows.nbytes + self._static.nbytes
        )

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
        self._segments: dict[Kind, Segment | None] = {}
        """None: there was no memory for it."""

    def forward(self, batch: ForwardBatch) -> Logits:
        """The same result as `EagerRunner.forward`."""
        segment = self._segment(batch)
        if segment is None:
            return self._runner.forward(batch)
        return self._runner.logits(segment.replay(batch), batch)

    def _segment(self, batch: ForwardBatch) -> Segment | None:
        geometry, pool = batch.geometry, self._runner.pool
        rows, spans = batch.ids.shape[0], len(geometry.bounds)
        if rows > ROWS[-1]:
            return None
        attention = self._runner.attention.static_kind(geometry, pool.states, pool.dtype)
        if attention is None:
            return None
        kind = Kind(
            rows=next(size for size in ROWS if size >= rows),
            spans=next(size for size in SPANS if size >= spans),
            attention=attention,
            reach=reach_of(geometry.max_keys, self._max_length),
            taps=self._runner.taps,
        )
        if kind not in self._segments:
            segment = Segment(self._runner, self._pool, kind, geometry)
            self._segments[kind] = segment if segment.is_captured else None
        return self._segments[kind]
