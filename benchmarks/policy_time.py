"""Time that choosing depths costs the host per step: of the policy itself, and of planning around it.

    python benchmarks/policy_time.py --streams 1,32,256

CPU time of this process, so that a busy machine distorts it little. Requests decode without a model: their drafts are
accepted at random, and a step takes what a simple function of its rows says. `depths` and `landed` are the policy's two
calls; `plan` is the planner around `depths`, once with chosen depths and once with full depths, so that
the difference is what the choice adds there.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from stridelm.schedule import Budget, Configured, Planner, Queue
from stridelm.schedule.adaptive import Adaptive
from stridelm.schedule.depth import NOBODY, Others
from stridelm.schedule.limits import PageView
from stridelm.schedule.row_stairs import RowStairs
from stridelm.schedule.step_cost import StepCost
from stridelm.simulate.card import Card, Drafting, Limits
from stridelm.simulate.workload import Job
from stridelm.types import Request, Span, StepPlan

DEPTH = 3
STAIRS = (320, 384, 512, 640, 768, 1024)
"""Rows that steps of 256 requests are padded to, as with captured graphs."""


class Timed(Adaptive):
    """A policy whose calls are timed."""

    def __init__(self) -> None:
        super().__init__()
        self.begin()

    def begin(self) -> None:
        self.spent = {"depths": 0.0, "landed": 0.0}

    def depths(self, requests: Sequence[Request], others: Others = NOBODY) -> Sequence[int]:
        began = time.process_time_ns()
        found = super().depths(requests, others)
        self.spent["depths"] += time.process_time_ns() - began
        return found

    def landed(self, spans: Sequence[Span], accepted: Sequence[int], seconds: float) -> None:
        began = time.process_time_ns()
        super().landed(spans, accepted, seconds)
        self.spent["landed"] += time.process_time_ns() - began


class TimedPlanner(Planner):
    spent = 0.0

    def plan(self, queue: Queue, pages: PageView) -> StepPlan:
        began = time.process_time_ns()
        plan = super().plan(queue, pages)
        self.spent += time.process_time_ns() - began
        return plan


def seconds(spans: Sequence[Span]) -> float:
    rows, deepest = sum(span.rows for span in spans), max(span.depth for span in spans)
    return 5e-3 + 24e-6 * max(0, rows - 128) + 0.4e-3 * deepest


def measure(streams: int, steps: int, chosen: bool) -> dict[str, float]:
    """Microseconds per step."""
    limits = Limits(max_num_seqs=streams, max_num_batched_tokens=8192, itl_target_ms=0)
    timed = Timed() if chosen else None
    if timed and streams > 32:
        timed.rates.stairs = RowStairs(lambda requests, depth: STAIRS)
    card = Card(
        limits, Drafting("mtp", tuple(range(DEPTH + 1)), adaptive=chosen), timed or Configured(StepCost()), seconds
    )
    planner = TimedPlanner(Budget(limits.max_num_batched_tokens, streams), timed or Configured(StepCost()), lag=1)
    card.planner = planner
    rng = random.Random(0)
    for number in range(streams):
        chances = (rng.choice((0.3, 0.6, 0.9)),) * DEPTH
        card.add(str(number), Job.drawn(64, (DEPTH + 1) * (steps + 400) + 8, chances, 0, number))
    now = 0.0

    def run(count: int) -> None:
        nonlocal now
        for _ in range(count):
            for flight in card.launch(now):
                now = flight.ends
            card.land()

    run(300)
    planner.spent = 0.0
    if timed:
        timed.begin()
    run(steps)
    found = {name: spent / steps / 1e3 for name, spent in (timed.spent if timed else {}).items()}
    return {**found, "plan": planner.spent / steps / 1e3}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", default="1,32,256")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3, help="of which the fastest counts")
    options = parser.parse_args()
    table = Table("requests", "depths us", "landed us", "policy us", "plan us", "plan, all levels us", box=None)
    rows = []
    for streams in map(int, options.streams.split(",")):
        both = [[measure(streams, options.steps, chosen) for _ in range(options.rounds)] for chosen in (True, False)]
        chosen, fixed = ({name: min(each[name] for each in found) for name in found[0]} for found in both)
        row = {
            "requests": streams,
            **chosen,
            "policy": chosen["depths"] + chosen["landed"],
            "plan_fixed": fixed["plan"],
        }
        rows.append(row)
        names = ("depths", "landed", "policy", "plan", "plan_fixed")
        table.add_row(str(streams), *(f"{row[name]:.1f}" for name in names))
    console = Console(width=120, highlight=False)
    console.print(table)
    console.print(json.dumps({"benchmark": "policy_time", "settings": vars(options), "rows": rows}), soft_wrap=True)


if __name__ == "__main__":
    main()
