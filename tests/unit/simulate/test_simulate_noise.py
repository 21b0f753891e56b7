"""Policies whose clock is off: what they choose still has to be near the best."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest

from stridelm.schedule import Configured
from stridelm.schedule.adaptive import Adaptive
from stridelm.schedule.rows import has_prompt
from stridelm.schedule.step_cost import StepCost
from stridelm.simulate.card import Card, Drafting, Limits
from stridelm.simulate.fleet import Fleet
from stridelm.simulate.noise import Noise
from stridelm.simulate.workload import Job
from stridelm.types import Span

DEPTH, STREAMS = 3, 8
DRAFTING = Drafting("any", tuple(range(DEPTH + 1)))


def test_a_true_clock() -> None:
    clock = Noise()
    assert [clock(seconds) for seconds in (0.001, 2.5)] == [0.001, 2.5]


def test_a_clock_that_is_off() -> None:
    """By some percent in the median, by more now and then, and the same for the same seed."""
    told = [[clock(0.002) / 0.002 for _ in range(20_000)] for clock in (Noise(1.0, 3), Noise(1.0, 3), Noise(1.0, 4))]
    assert told[0] == told[1] != told[2]
    logs = list(map(math.log, told[0]))
    assert abs(statistics.median(logs)) < 0.1 and 0.08 < statistics.pstdev(logs) < 0.25
    halves = [statistics.pstdev(list(map(math.log, map(Noise(level, 3), [1.0] * 5000)))) for level in (0.5, 1.0)]
    assert halves[0] == pytest.approx(halves[1] / 2)


def test_neighbouring_steps_are_alike() -> None:
    clock = Noise(1.0, 1)
    logs = [math.log(clock(0.002) / 0.002) for _ in range(20_000)]
    assert statistics.correlation(logs[:-1], logs[1:]) > 0.4 > 0.2 > statistics.correlation(logs[:-5000], logs[5000:])


@dataclass
class Machine:
    """Steps of a small model on a CPU core. A step after one of another kind takes longer."""

    level: float
    """Seconds of a level of drafts."""
    each: float
    """And for each request besides."""
    kind: tuple[bool, int] | None = field(init=False, default=None)

    def __call__(self, spans: Sequence[Span]) -> float:
        prompt = sum(span.real for span in spans if has_prompt(span))
        count, depth = len(spans), max(span.depth for span in spans)
        rows = sum(span.rows for span in spans) - prompt
        seconds = 0.85e-3 + 0.05e-3 * count + 0.107e-3 * rows + depth * (self.level + self.each * count)
        seconds += 0.4e-3 + 0.05e-3 * prompt if prompt else 0.0
        kind, before = (prompt > 0, depth), self.kind
        self.kind = kind
        return seconds * (1.06 if before not in (None, kind) else 1.0)


CASES = {
    "as fast plainly": (0.25e-3, 0.055e-3, (0.79, 0.835, 0.82), 0.5),
    "dear drafts": (0.4e-3, 0.06e-3, (0.75, 0.81, 0.74), 0.5),
    "cheap drafts": (0.2e-3, 0.045e-3, (0.82, 0.86, 0.85), 0.5),
    "bad drafts": (0.25e-3, 0.055e-3, (0.3, 0.3, 0.3), 0.3),
    "good drafts": (0.25e-3, 0.055e-3, (0.93, 0.95, 0.95), 0.3),
    "texts that differ": (0.15e-3, 0.03e-3, (0.79, 0.835, 0.82), 1.0),
}
"""Seconds of a level, and for each request; mean chances of the levels, and by how much requests differ, as the
standard deviation of their log-odds."""


def jobs(chances: tuple[float, ...], differ: float, seed: int, count: int) -> list[Job]:
    made, rng = [], random.Random(seed)
    for number in range(count):
        luck, length = rng.gauss(0, differ), rng.randrange(26, 103)
        own = [1 / (1 + math.exp(-math.log(chance / (1 - chance)) - luck)) for chance in chances]
        made.append(Job.drawn(20, length, own, seed, number))
    return made


@pytest.mark.parametrize("case", CASES)
def test_chosen_depths_are_near_the_best_on_a_noisy_clock(case: str) -> None:
    """At least 0.96x of the best fixed depth, plain decoding among them, in true time, once the policy has learnt."""
    level, each, chances, differ = CASES[case]
    rates = {}
    for depth in (0, 1, 2, 3, "auto"):
        chosen = depth == "auto"
        drafting = replace(DRAFTING, rows_by_depth=tuple(range((DEPTH if chosen else int(depth)) + 1)), adaptive=chosen)
        policy = Adaptive() if chosen else Configured(StepCost())
        limits = Limits(STREAMS, num_pages=4096, itl_target_ms=0)
        fleet = Fleet([Card(limits, drafting, policy, Machine(level, each), Noise(1.0, 1))])
        fleet.run(jobs(chances, differ, 1, 60), STREAMS)
        run = fleet.run(jobs(chances, differ, 2, 250), STREAMS)
        rates[depth] = run.tokens / run.seconds
    best = max(rate for depth, rate in rates.items() if depth != "auto")
    assert rates["auto"] > 0.96 * best, {depth: rate / best for depth, rate in rates.items()}
