"""The step, whole. docs/path.md walks through it.

    plan -> reserve -> propose -> forward -> verify -> commit -> observe -> emit

The device runs ahead of the host: a step is launched on bounds, and lands (its verdict is read, committed and emitted)
when the engine's lag says so. On a CPU the lag is zero and a step lands at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from stridelm.cache.transaction import Transaction
from stridelm.engine.outcome import Reading, tabulate
from stridelm.engine.step_timer import StepTimer
from stridelm.run.eager import Logits
from stridelm.types import Draft, ForwardBatch, Span, StepPlan, Verdict

if TYPE_CHECKING:
    from stridelm.engine.engine import Engine


@dataclass(slots=True)
class Detail:
    """What traces, log-probabilities and hidden states are read from."""

    draft: Draft
    batch: ForwardBatch
    logits: Logits
    verdict: Verdict


@dataclass(slots=True)
class Run:
    """What the device's part of a step leaves behind. Of a captured step the table is overwritten by its next replay:
    it is read in time."""

    rows: int
    table: torch.Tensor
    """As `tabulate` makes it."""
    timer: StepTimer
    detail: Detail | None
    """None of a captured step: its graphs share their memory."""


@dataclass(slots=True)
class Flight:
    """A launched step whose verdict the host has not read."""

    plan: StepPlan
    transaction: Transaction
    run: Run
    reading: Reading


@torch.inference_mode()
def step(engine: Engine) -> None:
    """Launch a step and land those that are due: what they gave each request is in `engine.outputs`. Nothing to launch:
    land one."""
    flight = launch(engine)
    lag = engine.lag_behind(flight)
    if flight is not None:
        engine.flights.append(flight)
    while len(engine.flights) > lag:
        land(engine, engine.flights.popleft())


def launch(engine: Engine) -> Flight | None:
    """Everything up to the host's look at the verdict. None if nothing could run."""
    plan = engine.planner.plan(engine.queue, engine.ledger)
    idle = not (plan.spans or plan.preempted or engine.queue.empty or engine.flights)
    assert not idle, "requests are queued and none can run"
    plan = engine.enter(plan)
    if not plan.spans:
        return None
    with engine.ledger.reserve(plan.spans) as transaction:
        run = engine.run(plan, transaction)
        reading = Reading(run.table)
        transaction.hold()
    return Flight(plan, transaction, run, reading)


def on_device(
    engine: Engine,
    spans: tuple[Span, ...],
    slots: torch.Tensor,
    propose: Callable[[], Draft],
    build: Callable[[Draft], ForwardBatch],
    forward: Callable[[ForwardBatch], Logits],
) -> Run:
    """The device's part, from propose to observe. It reads nothing back, so that it can be captured whole."""
    timer = StepTimer(engine.timed)
    draft = propose()
    batch = build(draft)
    timer.end("draft")
    logits = forward(batch)
    timer.end("forward")
    verdict = engine.verifier.verify(batch, draft, logits.decisions)
    engine.loaded.pool.keep(batch, draft, verdict)
    engine.tokens.advance(slots, batch.reals + verdict.kept)
    table = tabulate(verdict, batch.reals)
    timer.end("sampling")
    engine.drafters.observe(spans, slots, batch, logits, verdict)
    timer.end("draft")
    return Run(batch.ids.shape[0], table, timer, Detail(draft, batch, logits, verdict))


def land(engine: Engine, flight: Flight) -> None:
    """Commit what was accepted and emit what was said. Requests that left since get nothing."""
    outcome = flight.reading.outcome()
    alive = flight.transaction.commit(outcome.kept, outcome.reals)
    run = flight.run
    run.timer.add_to(engine.stats.part_ms)
    engine.trace(flight.plan, run, outcome)
    engine.emitter.emit(flight.plan.spans, run, outcome, alive)
