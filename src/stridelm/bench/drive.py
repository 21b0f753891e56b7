"""Drives an engine with a fixed number of streams, or with requests that arrive, and records when tokens are emitted.

In a closed loop, when one request ends, the next is added, so that a run has its stated concurrency until the prompts
run out. Times are those at which a caller of `Engine.step` sees the tokens.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from stridelm.engine.engine import Engine
from stridelm.params import SamplingParams
from stridelm.schedule.slack import SHORTEST
from stridelm.types import Request


@dataclass(frozen=True)
class Job:
    """One prompt and how to complete it."""

    prompt_ids: list[int]
    params: SamplingParams


@dataclass(slots=True)
class Timeline:
    """The course of one job. `emissions` has (seconds since it was added or, if jobs arrive, since it arrived, tokens
    emitted) for each of its steps."""

    request: Request
    added_s: float
    emissions: list[tuple[float, int]] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        return self.request.output_ids


@dataclass(frozen=True)
class Run:
    """All jobs, completed once. Timelines are in the jobs' order."""

    seconds: float
    timelines: tuple[Timeline, ...]
    steps: int
    """Forward passes, including those that only read prompts."""
    rows: int
    peak_pages: int
    preemptions: int

    @property
    def tokens(self) -> int:
        return sum(len(timeline.token_ids) for timeline in self.timelines)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def drive(
    engine: Engine, jobs: Sequence[Job], streams: int | None = None, arrivals: Sequence[float] | None = None
) -> Run:
    """Complete all jobs: `streams` at a time, or as they arrive, which is when `arrivals` says, in seconds after the
    beginning, in order. The engine must be idle, and is idle again afterwards.

    Raises ValueError if a job can never be served; nothing is left running.
    """
    assert not engine.busy and (streams is None) != (arrivals is None)
    engine.ledger.peak = 0
    steps, rows, preemptions = engine.stats.steps, engine.stats.rows, engine.stats.preemptions
    pending = deque(enumerate(jobs))
    live: dict[str, Timeline] = {}
    timelines: dict[int, Timeline] = {}
    start = time.perf_counter()
    try:
        while pending or live:
            while pending and (arrivals is None or start + arrivals[pending[0][0]] <= time.perf_counter()):
                if streams is not None and len(live) >= streams:
                    break
                index, job = pending.popleft()
                request = engine.add(f"bench-{index}", job.prompt_ids, job.params)
                added = time.perf_counter() if arrivals is None else start + arrivals[index]
                live[request.id] = timelines[index] = Timeline(request, added)
            if not live:
                assert arrivals is not None
                time.sleep(max(0.0, start + arrivals[pending[0][0]] - time.perf_counter()))
                continue
            if arrivals is not None and pending and engine.slack:
                time.sleep(SHORTEST)
                continue
            outputs = engine.step()
            now = time.perf_counter()
            for output in outputs:
                timeline = live[output.request.id]
                timeline.emissions.append((now - timeline.added_s, len(output.new_token_ids)))
                if output.finished:
                    del live[output.request.id]
        seconds = time.perf_counter() - start
    finally:
        for name in live:
            engine.abort(name)
        _land(engine)
    engine.check()
    return Run(
        seconds,
        tuple(timelines[i] for i in range(len(jobs))),
        engine.stats.steps - steps,
        engine.stats.rows - rows,
        engine.ledger.peak,
        engine.stats.preemptions - preemptions,
    )


def _land(engine: Engine) -> None:
    """Land a step that may still be in flight although no request waits for it."""
    while engine.busy:
        engine.step()
