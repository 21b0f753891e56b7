"""A whole step. docs/path.md walks through it.

    plan -> reserve -> propose -> forward -> verify -> commit -> observe -> emit

The device runs ahead of the host: a step is launched on bounds, and lands (its verdict is read, committed and emitted)
when more steps are in flight than the lag allows. On a CPU the lag is zero and a step lands at once. Everything from
propose to observe runs on the device (engine/device_step.py).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from stridelm.batch import Draft, ForwardBatch
from stridelm.cache.transaction import Transaction
from stridelm.engine.device_step import Land, Run
from stridelm.engine.emit import Emitter
from stridelm.engine.introspect import OfTokens
from stridelm.engine.outcome import Outcome, Reading
from stridelm.engine.resplit import Resplit
from stridelm.engine.roster import Roster
from stridelm.engine.step_clock import StepClock
from stridelm.faults import TracerFault
from stridelm.schedule import Planner
from stridelm.schedule.rows import has_prompt
from stridelm.schedule.slack import LaunchTime
from stridelm.schedule.step_shape import shape_of
from stridelm.types import StepPlan
from stridelm.upload import Mark

Tracer = Callable[[StepPlan, Draft, ForwardBatch, Outcome], None]


@dataclass(slots=True)
class Flight:
    """A launched step whose verdict the host has not read."""

    plan: StepPlan
    transaction: Transaction
    run: Run
    reading: Reading
    extras: dict[int, OfTokens]
    """Span -> what its request wants of the step's rows."""
    began: Mark
    """Made before it was planned: the device passes it when the step before has ended, or at once if it is idle."""


class Device(Protocol):
    """Runs the device's half of a step: eagerly, or by replay as far as it is captured."""

    def run(self, plan: StepPlan, transaction: Transaction, land: Land, *, detailed: bool = False) -> Run:
        """detailed: the step's tensors will be read, so it must not be a replay."""
        ...


class Steps:
    def __init__(
        self, planner: Planner, roster: Roster, device: Device, emitter: Emitter, lag: int, resplit: Resplit
    ) -> None:
        """lag: number of launched steps that the host leaves unread while it plans the next."""
        self.planner = planner
        self.roster = roster
        self.device = device
        self.emitter = emitter
        self.lag = lag
        self._looks_ahead = not lag
        self.resplit = resplit
        self.timed_on = roster.tokens.tokens.device
        """The device that steps are timed by."""
        self._clock = StepClock()
        self._launch_time = LaunchTime()
        self.flights: deque[Flight] = deque()
        self.tracer: Tracer | None = None

    @torch.inference_mode()
    def step(self) -> None:
        """Launch a step and land those that are due, which adds to the roster's outputs. If there is nothing to launch,
        land all steps in flight."""
        flight = self.launch()
        if flight is not None:
            self.flights.append(flight)
            prompts = any(map(has_prompt, flight.plan.spans))
            self._launch_time.note(time.perf_counter() - flight.began.made, prompts=prompts)
        self.land_all(but=self._lag_behind(flight))

    def slack(self) -> float:
        """Seconds for which the device stays busy even if the next step is not planned yet; 0 if they are few, or if
        nothing is known of steps like the one that runs."""
        cost = self.planner.depths.cost
        if not self.lag or len(self.flights) != self.lag or cost is None or self.flights[0].reading.arrived.has_passed:
            return 0.0
        shapes = [shape_of(flight.plan.spans) for flight in self.flights]
        if not cost.knows_decodes or (not cost.knows_prompts and any(shape.prompt for shape in shapes)):
            return 0.0
        began = max(self.flights[0].began.made, self._clock.ended)
        goes_on = any(has_prompt(span) and not span.decides for span in self.flights[-1].plan.spans)
        return self._launch_time.left(time.perf_counter(), began, sum(map(cost.one, shapes)), prompts=goes_on)

    def launch(self) -> Flight | None:
        """Everything up to the host's reading of the verdict. None if nothing could run."""
        roster, began = self.roster, Mark(self.timed_on)
        if self._looks_ahead and not self.planner.depths.rests:
            roster.drafters.look_ahead(roster.queue.running)
        plan = self._plan()
        idle = not (plan.spans or plan.preempted or roster.queue.empty or self.flights)
        assert not idle, "requests are queued and none can run"
        plan = roster.enter(plan)
        if not plan.spans:
            return None
        if self.tracer is not None:
            plan = self.planner.explained(plan)
        with roster.ledger.reserve(plan.spans) as transaction:
            run = self.device.run(plan, transaction, self.land_all, detailed=self.tracer is not None)
            extras = {} if run.readable is None else roster.inside.read(run.readable)
            reading = Reading(run.table)  # last, since it waits for all that was started before
            transaction.hold()
        return Flight(plan, transaction, run, reading, extras, began)

    def _plan(self) -> StepPlan:
        """The next step. If pages are short in one page group and memory can come from another, it is moved first."""
        roster = self.roster
        roster.mask_share.rest(roster.queue.running, roster.sampling.mask_s)
        plan = self.planner.plan(roster.queue, roster.ledger)
        if self._totals(plan) is None:
            return plan
        self.land_all()
        plan = self.planner.plan(roster.queue, roster.ledger)  # what has landed may have left pages
        totals = self._totals(plan)
        if totals is None:
            return plan
        self.resplit.apply(totals)
        roster.stats.resplits += 1
        return self.planner.plan(roster.queue, roster.ledger)

    def _totals(self, plan: StepPlan) -> Mapping[str, int] | None:
        """Pages that groups should have for what the plan lacks."""
        running = () if plan.lacking is None else self.roster.queue.running
        return self.resplit.totals(plan, running, stuck=not (plan.spans or plan.preempted or self.flights))

    def land_all(self, but: int = 0) -> None:
        """Land the steps in flight, the oldest first, but for the last few."""
        while len(self.flights) > but:
            self.land(self.flights.popleft())

    def land(self, flight: Flight) -> None:
        """Commit what was accepted and emit its tokens. Requests that have left since get nothing."""
        self._clock.wait_for(flight.reading.arrived)
        outcome = flight.reading.outcome()
        self.planner.depths.landed(flight.plan.spans, outcome.accepted, flight.reading.arrived.since(flight.began))
        alive = flight.transaction.commit(outcome.kept, outcome.reals)
        flight.run.timer.add_to(self.roster.stats.part_ms)
        self._trace(flight.plan, flight.run, outcome)
        self.emitter.emit(flight.plan.spans, flight.run.rows, outcome, alive, flight.extras)

    def _lag_behind(self, flight: Flight | None) -> int:
        """Number of launched steps to leave unread after this launch. Traces are read from the step's own tensors, so
        such a step lands at once; if nothing was launched, all in flight land."""
        return 0 if flight is None or self.tracer is not None or flight.run.timer.timed else self.lag

    def _trace(self, plan: StepPlan, run: Run, outcome: Outcome) -> None:
        """Raises TracerFault."""
        if self.tracer is None:
            return
        assert run.detail is not None
        try:
            self.tracer(plan, run.detail.draft, run.detail.batch, outcome)
        except Exception as error:
            raise TracerFault from error
