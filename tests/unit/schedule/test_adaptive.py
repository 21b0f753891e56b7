"""Depths chosen by what was accepted and by what steps cost: simulated, so that both are known."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, product
from typing import Any

import numpy as np
import pytest

from stridelm import SamplingParams
from stridelm.cache.ledger import Ledger
from stridelm.params import Speculation
from stridelm.schedule import Budget, Configured, DepthPolicy, Planner, Queue
from stridelm.schedule.acceptance import Acceptance
from stridelm.schedule.adaptive import PAUSE, Adaptive
from stridelm.schedule.depth import NOBODY, Others
from stridelm.schedule.probes import LATEST, SOONEST, Chosen, Load, Loads
from stridelm.schedule.row_stairs import RowStairs
from stridelm.schedule.step_budget import Allocation
from stridelm.schedule.step_shape import StepShape
from stridelm.schedule.waits import Waits
from stridelm.simulate.card import Card, Drafting, Limits
from stridelm.simulate.fleet import Fleet
from stridelm.simulate.workload import Job
from stridelm.types import Follow, Request, Span, StepPlan

DEPTH = 4
LIFE = 300
"""Tokens of a request."""
Cost = Callable[[int, int, int], float]
"""(requests, rows, depth of the deepest draft) -> seconds."""


def dense(requests: int, rows: int, depth: int) -> float:
    """Reads weights, until there are so many rows that it computes."""
    return 4.5e-3 + 2e-6 * rows + 22e-6 * max(0, rows - 128) + (0.25e-3 + 0.45e-3 * depth if depth else 0)


def small(requests: int, rows: int, depth: int) -> float:
    """On a CPU every row costs."""
    return 2.5e-3 + 0.35e-3 * rows + depth * (0.3e-3 + 0.08e-3 * requests)


def sparse(requests: int, rows: int, depth: int) -> float:
    """A mixture of experts: the first rows are the dearest, since each brings experts."""
    return 3e-3 + 10e-3 * (1 - math.exp(-rows / 40)) + (0.2e-3 + 0.3e-3 * depth if depth else 0)


COSTS = {"dense": dense, "small": small, "sparse": sparse}


@dataclass
class Simulation:
    """Requests whose drafts are accepted with known chances, one for each; a request that has ended is followed by
    another of its kind."""

    policy: DepthPolicy
    chances: Sequence[float]
    cost: Cost
    seed: int = 0
    adaptive: bool = True
    life: float = LIFE
    prompt: int = 0
    each: float = 0.0
    """Seconds for each token before a request's rows."""
    lag: int = 0
    """Steps that are decided on before a step has landed."""
    reads: Sequence[bool] = (False,)
    """Of each step, by turns: it may read prompts too, but does not."""
    delayed: float = 0.0
    """Share of the steps that something else delays, to two to three times their time."""
    patient: bool = False
    """Steps that draft nothing leave the drafter's KV to the first that is to draft, which drafts nothing then."""
    apart: bool = False
    """The same of each request by itself."""
    requests: list[Request] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0
    depths: list[Sequence[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        self._flying: deque[list[Span]] = deque()
        self.requests = [self._request() for _ in self.chances]

    def run(self, steps: int) -> Simulation:
        for _ in range(steps):
            self._step()
        return self

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    def _step(self) -> None:
        reads = self.reads[len(self.depths) % len(self.reads)]
        depths = list(self.policy.depths(self.requests, Others(reads=reads)))
        behind = max(request.behind for request in self.requests)
        if self.apart:
            behind = max(request.behind if depth else 0 for request, depth in zip(self.requests, depths, strict=True))
            for place, request in enumerate(self.requests):
                if request.behind and depths[place]:
                    depths[place] = request.behind = 0
                elif not depths[place]:
                    request.behind += 1
        elif behind and any(depths):
            depths = [0] * len(depths)
            for request in self.requests:
                request.behind = 0
        elif self.patient and not any(depths):
            behind = 0
            for request in self.requests:
                request.behind += 1
        starts = [self.prompt + len(request.output_ids) for request in self.requests]
        spans = [
            Span(request, start, 1, depth, depth, behind=behind)
            for request, start, depth in zip(self.requests, starts, depths, strict=True)
        ]
        self.depths.append(depths)
        self._flying.append(spans)
        if len(self._flying) > self.lag:
            self._land(self._flying.popleft())

    def _land(self, spans: list[Span]) -> None:
        accepted = [self._accepted(chance, span.depth) for chance, span in zip(self.chances, spans, strict=True)]
        rows, deepest = sum(span.rows for span in spans), max(span.depth for span in spans)
        seconds = self.cost(len(spans), rows, deepest) + self.each * sum(span.start for span in spans)
        seconds *= self._rng.uniform(0.97, 1.03)
        if self.delayed and self._rng.random() < self.delayed:
            seconds *= self._rng.uniform(2, 3)
        self.policy.landed(spans, accepted, seconds)
        self.tokens += len(spans) + sum(accepted)
        self.seconds += seconds
        for place, more in enumerate(accepted):
            self.requests[place].output_ids += [0] * (1 + more)
            if len(self.requests[place].output_ids) > self.life:
                self.requests[place] = self._request()

    def _accepted(self, chance: float, depth: int) -> int:
        return next((level for level in range(depth) if self._rng.random() >= chance), depth)

    def _request(self) -> Request:
        rows = tuple(range(DEPTH + 1))
        return Request("", [0], SamplingParams(), Speculation(drafter="mtp"), rows, adaptive=self.adaptive)


class Fixed(Configured):
    def __init__(self, depth: int) -> None:
        self._depth = depth

    def depths(self, requests: Sequence[Request], others: Others = NOBODY) -> Sequence[int]:
        return [self._depth] * len(requests)


def best_fixed(chances: Sequence[float], cost: Cost) -> float:
    """Expected tokens per second at the depth that is best for all."""
    count = len(chances)

    def rate(depth: int) -> float:
        accepted = sum(chance**level for chance in chances for level in range(1, depth + 1))
        return (count + accepted) / cost(count, count * (1 + depth), depth)

    return max(map(rate, range(DEPTH + 1)))


@pytest.mark.parametrize("kinds", [(0.1,), (0.5,), (0.85,), (0.15, 0.5, 0.9)], ids=str)
@pytest.mark.parametrize("streams", [2, 12, 60])
@pytest.mark.parametrize("name", COSTS)
def test_close_to_the_best_fixed_depth(name: str, streams: int, kinds: tuple[float, ...]) -> None:
    """Whatever is accepted and whatever rows cost, once it has been learnt. (Rates are of simulated time.)"""
    chances = [kinds[i % len(kinds)] for i in range(streams)]
    best = best_fixed(chances, COSTS[name])
    learning = Simulation(Adaptive(), chances, COSTS[name]).run(300)
    before = learning.tokens, learning.seconds
    learning.run(6000 // streams)
    learnt = (learning.tokens - before[0]) / (learning.seconds - before[1])
    assert learnt > 0.95 * best


def test_rows_go_to_those_who_gain() -> None:
    """Where every row costs, requests that are guessed well draft deeper than those that are not."""
    run = Simulation(Adaptive(), [0.1, 0.9, 0.9] * 2, small).run(400)
    last = run.depths[-200:]
    bad, good = (sum(depths[i] for depths in last for i in places) for places in ((0, 3), (1, 2, 4, 5)))
    assert good > 10 * bad


def card(requests: int, rows: int, depth: int) -> float:
    """Stairs of captured steps, on a card that computes from 128 rows on."""
    stairs = next(stair for stair in (64, 128, 256, 320, 384, 512, 640, 768, 1024, 1280) if stair >= rows)
    draft = 0.3e-3 + (0.3e-3 + 1.2e-6 * requests) * depth if depth else 0
    return 5e-3 + 18e-6 * requests + 24e-6 * max(0, stairs - 128) + draft


@pytest.mark.parametrize("chance", [0.4, 0.5, 0.6, 0.8])
def test_what_was_not_done_for_long_keeps_its_cost(chance: float) -> None:
    """Measured at the start, on other numbers of requests and short contexts, and then not for as long as others are
    better, while contexts grow to many times of that."""
    policy = Adaptive()
    policy.rates.stairs = RowStairs(lambda requests, depth: (320, 384, 512, 640, 768, 1024, 1280))
    for streams in (1, 4, 16, 64, 256):
        for depth in (3, 2, 1, 0) * 4:
            few = Simulation(policy, [0.0] * streams, card)
            spans = [Span(request, 9, 1, depth, depth) for request in few.requests]
            policy.landed(spans, [0] * streams, card(streams, streams * (1 + depth), depth))
    policy.keep_costs()

    def rate(policy: DepthPolicy) -> float:
        run = Simulation(policy, [chance] * 256, card, life=math.inf, prompt=500, each=15e-9).run(80)
        before = run.tokens, run.seconds
        run.run(100)
        return (run.tokens - before[0]) / (run.seconds - before[1])

    assert rate(policy) > 0.95 * max(rate(Fixed(depth)) for depth in range(DEPTH))


@pytest.mark.parametrize("chance", [0.0, 0.95])
def test_forgetting_keeps_costs_and_figures(chance: float) -> None:
    """After it a policy decides as one that knows only what steps take, whatever requests taught it before."""
    taught, new = Adaptive(), Acceptance()
    Simulation(taught, [chance] * 4, small).run(300)
    drafted, costs = taught.figures.drafted, taught.cost.one(StepShape(4, 8, 1, 400))
    taught.forget()
    assert (taught.figures.drafted, taught.cost.one(StepShape(4, 8, 1, 400))) == (drafted, costs) and drafted
    some, others = (Simulation(taught, [0.5] * 4, small).requests for _ in range(2))
    chances = taught.acceptance.chances(taught.acceptance.read(some), DEPTH)
    assert (chances == new.chances(new.read(others), DEPTH)).all()
    assert list(taught.depths(some)) == [DEPTH] * 4 and taught.figures.gain is None


@pytest.mark.parametrize("filling", [20, 28])
def test_rows_fill_a_stair(filling: int) -> None:
    """Rows up to the next stair are free, so they are used, and those beyond it are not."""
    stairs = (8, filling, 64)

    def padded(requests: int, rows: int, depth: int) -> float:
        return 4e-3 + 0.25e-3 * next(stair for stair in stairs if stair >= rows) + 1e-5 * depth

    policy = Adaptive()
    policy.rates.stairs = RowStairs(lambda requests, depth: stairs)
    run = Simulation(policy, [0.9 - 0.1 * i for i in range(8)], padded).run(600)
    rows = [8 + sum(depths) for depths in run.depths[-200:]]
    assert 0.8 * filling < statistics.median(rows) <= filling


def test_urgent_requests_draft_deeper() -> None:
    """Where rows cost, those of a request with priority are worth more than the same rows of others. Tokens count for
    4, 1 and 1/4 here, so the most per second come of depths 2, 1 and 0."""
    run = Simulation(Adaptive(), [0.8] * 8, small)
    run.requests[0].priority, run.requests[1].priority = -2, 2
    run.life = math.inf
    run.run(600)
    urgent, idle, others = (
        sum(depths[i] for depths in run.depths[-300:] for i in places) / len(places)
        for places in ((0,), (1,), range(2, 8))
    )
    assert urgent > others > idle


def test_a_request_behind_its_target_drafts_deeper() -> None:
    """A target that cannot be met makes a request's tokens count for more, and one that is met changes nothing."""
    run = Simulation(Adaptive(), [0.8] * 8, small)
    run.requests[0].params = SamplingParams(target_tps=1e4)
    run.requests[1].params = SamplingParams(target_tps=0.5)
    run.life = math.inf
    run.run(600)
    pushed, content, *others = (sum(depths[i] for depths in run.depths[-300:]) for i in range(8))
    assert pushed > 1.3 * max(others)
    assert min(others) * 0.7 < content < 1.3 * max(others)
    assert run.requests[1].stats.pace is not None and run.requests[2].stats.pace is None


def test_a_useless_drafter_costs_little() -> None:
    """Under 3% of plain decoding once it is known to be useless, and under 1% a thousand tokens later."""
    for streams in (1, 8, 32):
        run = Simulation(Adaptive(), [0.0] * streams, small)
        run.run(100)
        for steps, share in ((1000, 0.97), (1000, 0.99)):
            before = run.tokens, run.seconds
            run.run(steps)
            rate = (run.tokens - before[0]) / (run.seconds - before[1])
            assert rate > share * streams / small(streams, streams, 0)


@pytest.mark.parametrize("seed", range(5))
def test_delays_do_not_make_a_useless_drafter_pay(seed: int) -> None:
    """Now and then a step takes two or three times as long for reasons of its own. Depth 0 must not look dearer than
    another for that, which would last until it is probed a few times."""
    run = Simulation(Adaptive(), [0.0] * 64, dense, seed=seed, delayed=0.05).run(3000)
    drafting = [depths for depths in run.depths[500:] if any(depths)]
    assert len(drafting) < 0.02 * 2500


@pytest.mark.parametrize("streams", [1, 4, 24])
def test_no_delay_at_the_start_makes_a_useless_drafter_pay(streams: int) -> None:
    """In none of sixty loads: when each depth was measured once, one delay would be all that is known of it."""
    for seed in range(60):
        run = Simulation(Adaptive(), [0.0] * streams, small, seed=seed, life=math.inf, delayed=0.02).run(400)
        assert sum(map(any, run.depths[100:])) < 30, seed


@pytest.mark.parametrize("streams", [4, 16])
def test_newcomers_do_not_make_all_draft(streams: int) -> None:
    """Of a request that has just begun little is known. Where drafts of others do not pay, hoping that its drafts do
    costs more than it brings, and with short requests there is always one that has just begun."""
    run = Simulation(Adaptive(), [0.3] * streams, sparse, life=64).run(200)
    before = run.tokens, run.seconds
    run.run(1500)
    rate = (run.tokens - before[0]) / (run.seconds - before[1])
    assert rate > 0.985 * best_fixed(run.chances, sparse)


def test_trying_each_depth_once_does_not_make_probes_rare() -> None:
    """What a policy finds at the start, before anything is known, says nothing of how soon a choice may be wrong."""
    tries = 2 * (DEPTH + 1)  # the first step of each depth is not measured
    run = Simulation(Adaptive(), [0.0] * 4, dense).run(tries + SOONEST + 2)
    assert any(any(depths) for depths in run.depths[:tries]) and any(any(depths) for depths in run.depths[tries:])


@pytest.mark.parametrize("life", [math.inf, 200])
def test_levels_are_told_apart_from_rows(life: float) -> None:
    """As long as all draft, each level comes with a row of every request. On a card rows may be dear and levels cheap,
    and then it pays that only those draft deep whose drafts are accepted, as many as fill a captured size. A row more
    costs as much as all of the next: neither what is learnt between two choices may bring it, nor a newcomer."""
    stairs = (320, 384, 512, 640, 768, 1024, 1280)

    def rows_are_dear(requests: int, rows: int, depth: int) -> float:
        padded = next(stair for stair in (*range(256), *stairs) if stair >= rows)
        return 6e-3 + 25e-6 * requests + 21e-6 * max(0, padded - 64) + (0.3e-3 + 0.45e-3 * depth if depth else 0)

    policy = Adaptive()
    policy.rates.stairs = RowStairs(lambda requests, depth: stairs if requests == 256 else ())
    for streams in (1, 4, 16, 64, 256):
        Simulation(policy, [0.0] * streams, rows_are_dear).run(24)  # as the warm-up of an engine does
    policy.keep_costs()
    mixed = Simulation(policy, [(0.17, 0.54, 0.92)[i % 3] for i in range(256)], rows_are_dear, life=life).run(100)
    before = mixed.tokens, mixed.seconds
    mixed.run(100)
    rate = (mixed.tokens - before[0]) / (mixed.seconds - before[1])
    assert rate > 1.15 * best_fixed(mixed.chances, rows_are_dear)


def test_levels_are_told_apart_from_rows_on_a_cpu() -> None:
    """The same with 16 and 24 requests, as a core of a CPU takes them: of 24 loads a few find out too late who is who,
    so that their mean counts."""

    def core(requests: int, rows: int, depth: int) -> float:
        drafting = 0.6e-3 + (0.1e-3 + 17e-6 * requests) * depth if depth else 0
        return 2e-3 + 0.116e-3 * requests + 0.154e-3 * rows + drafting

    found = []
    for seed, count in product(range(12), (16, 24)):
        chances = [(0.17, 0.54, 0.92)[i % 3] for i in range(count)]
        mixed = Simulation(Adaptive(), chances, core, seed=seed, life=math.inf).run(150)
        before = mixed.tokens, mixed.seconds
        mixed.run(450)
        found.append((mixed.tokens - before[0]) / (mixed.seconds - before[1]) / best_fixed(chances, core))
    assert statistics.mean(found) > 1.06


def test_half_of_the_requests_draft_once() -> None:
    """Those that do not are left waiting by it, which must not count as if the others had not drafted yet."""
    run = Simulation(Adaptive(), [0.6] * 64, dense, life=math.inf, apart=True).run(200)
    halved = [set(depths[::2]) == {DEPTH} and set(depths[1::2]) == {0} for depths in run.depths]
    assert 1 <= sum(halved) <= 2


def test_landings_are_looked_at_together() -> None:
    """Between steps the caches are cold. But what is probed is to be known at once; what newcomers draft is noted."""
    policy = Adaptive()
    run = Simulation(policy, [0.0] * 4, small).run(400)
    looks: list[int] = []
    settle = policy.settle

    def counted() -> None:
        looks.append(policy._unseen.count)
        settle()

    policy.settle = counted  # type: ignore[method-assign]
    run.run(PAUSE)
    assert looks == [PAUSE] or any(map(any, run.depths[-PAUSE:]))
    while not any(run.depths[-1]):
        run.run(1)
    assert not policy._unseen.count, "a probe was not looked at"
    run.requests[0] = run._request()
    run.run(1)
    assert policy.acceptance.read(run.requests).known.requests_P["depth"].min() >= 0


def test_what_was_decided_is_said_again() -> None:
    """As long as the requests are the same, nothing was chosen anew and no probe is due."""
    policy = Adaptive()
    run = Simulation(policy, [0.9] * 4, small, life=math.inf).run(1200)
    decided, decide = [], policy._decide

    def counted(*arguments: Any) -> Any:
        decided.append(len(run.depths))
        return decide(*arguments)

    policy._decide = counted  # type: ignore[assignment,method-assign]
    run.run(10 * PAUSE)
    assert len(decided) < 4 * PAUSE  # after each of ten choices, and for probes
    before = len(decided)
    run.requests[1] = run._request()
    run.run(1)
    assert len(decided) == before + 1


@pytest.mark.parametrize(("newcomers", "anew"), [(1, False), (2, True)])
def test_a_choice_goes_by_who_is_there(newcomers: int, anew: bool) -> None:
    """Once half of the requests are others it is made anew, however long depth 0 would stand."""
    policy = Adaptive()
    run = Simulation(policy, [0.0] * 4, small, life=math.inf).run(900)
    while policy._probing is not None or policy._unseen.count or policy._standing != PAUSE:
        run.run(1)
    for place in range(newcomers):
        run.requests[place] = run._request()
    run.run(1)
    assert not any(run.depths[-1])
    assert policy._standing == (0 if anew else PAUSE) and bool(policy._unseen.count) == (not anew)


def test_a_choice_beside_prompts_stands_too() -> None:
    """For some steps, as long as as many are to join."""
    policy = Adaptive()
    run = Simulation(policy, [0.6] * 8, dense).run(100)
    made, best = [], policy.rates.best_beside

    def counted(*arguments: Any) -> Chosen:
        made.append(arguments[2])
        return best(*arguments)

    policy.rates.best_beside = counted  # type: ignore[assignment,method-assign]
    for joining in (3, 3, 3, 2, 2, 3):
        depths = policy.depths(run.requests, Others(reads=True, joining=joining))
        policy.landed([Span(each, 50, 1, depth, depth) for each, depth in zip(run.requests, depths)], [0] * 8, 1e-3)
    assert made == [3, 2, 3]
    for _ in range(PAUSE):
        policy.depths(run.requests, Others(reads=True, joining=3))
        policy.landed([Span(each, 50, 1) for each in run.requests], [0] * 8, 1e-3)
    assert made == [3, 2, 3, 3]


def test_drafting_begins_for_a_clear_gain() -> None:
    """It costs a pass over all that the drafter did not follow. What goes on does so for any gain."""
    policy = Adaptive()
    readers = policy.acceptance.read(Simulation(policy, [0.5] * 8, small).run(100).requests)
    _, _, tokens_TD, _ = policy.rates._choices(readers)

    def best(gain: float, *, drafts: bool) -> int:
        rate_D = np.array([1.0, gain, 0.9, 0.9, 0.9])
        policy.rates._seconds = lambda *arguments: tokens_TD / rate_D  # type: ignore[method-assign]
        return policy.rates.best(readers, 0, drafts=drafts)[0].depth

    assert [best(gain, drafts=False) for gain in (0.99, 1.01, 1.03)] == [0, 0, 1]
    assert [best(gain, drafts=True) for gain in (0.99, 1.01, 1.03)] == [0, 1, 1]


def test_who_joins_a_step_follows_the_choice_of_all() -> None:
    """One request alone drafts, and one that ends its prompt beside 256 does not: all share a step's cost."""
    policy = Adaptive()
    Simulation(policy, [0.6], dense).run(300)
    many = Simulation(policy, [0.6] * 256, dense).run(300)
    newcomer = Simulation(Configured(), [0.0], dense).requests
    assert sum(policy.depths(many.requests)) < 256 / 2
    assert list(policy.depths(newcomer, Others(asked=256, reads=True))) == [0]
    assert list(policy.depths(newcomer)) != [0]


def test_probes_wait_for_steps_without_prompts() -> None:
    """A step with prompts says nothing of what drafts cost. But prompts may wait for room that they do not get, and
    probes do not wait for ever."""
    mixed = Simulation(Adaptive(), [0.0] * 8, small, reads=(True, True, False)).run(900)
    probes = [step for step, depths in enumerate(mixed.depths) if step > 200 and any(depths)]
    assert probes and all(step % 3 == 2 for step in probes)
    always = Simulation(Adaptive(), [0.0] * 8, small, reads=(True,)).run(900)
    assert any(map(any, always.depths[200:]))


@pytest.mark.parametrize(("patient", "lag"), [(False, 0), (True, 0), (True, 1)])
def test_a_better_text_is_noticed(patient: bool, lag: int) -> None:
    """Depth 0 is not for ever: probes find out that drafts are accepted now. They are not lost in steps that bring the
    drafter's KV up to date before anything is drafted."""
    run = Simulation(Adaptive(), [0.0] * 4, dense, patient=patient, lag=lag).run(600)
    assert max(max(depths) for depths in run.depths[-5:]) == 0
    run.chances = [0.9] * 4
    run.run(800)
    assert min(sum(depths) for depths in run.depths[-5:]) >= 8


@pytest.mark.parametrize(("chance", "streams", "best"), [(0.4, 64, 1), (0.58, 8, 3)])
@pytest.mark.parametrize("lag", [0, 1])
def test_probes_go_both_ways(lag: int, chance: float, streams: int, best: int) -> None:
    """Above the chosen depth and below it, one step each, also where the next step is decided on before one lands: what
    is chosen stands longer. And at depth 0, which they say nothing of."""
    run = Simulation(Adaptive(), [chance] * streams, dense, lag=lag).run(2000)
    everywhere = [set(depths) for depths in run.depths[100:]]
    chosen = max(range(1, DEPTH), key=lambda depth: everywhere.count({depth}))
    assert chosen == best
    probes = [max(depths) for depths in everywhere if len(depths) == 1]
    assert {chosen - 1, chosen + 1, 0} <= set(probes)
    lengths = [len(list(run)) for depth, run in groupby(probes) if depth not in (0, chosen)]
    assert all(length == 1 or length >= SOONEST - 1 for length in lengths)


@pytest.mark.parametrize("seed", range(4))
def test_that_plain_decoding_is_faster_is_noticed(seed: int) -> None:
    """Where drafts lose 8%, plain steps were slow at first, and one that comes after one that drafts takes longer by
    more than that: it needs other things in the caches. Depths beside the choice say nothing of plain steps, so these
    are tried, too."""
    latest, gains = [0], [True]

    def cold(requests: int, rows: int, depth: int) -> float:
        before, latest[0] = latest[0], depth
        slower = (1.0 if depth == before else 1.25 if not depth else 1.02) * (1.2 if gains[0] and not depth else 1.0)
        return slower * (1.4e-3, 2.6e-3, 3.2e-3, 3.65e-3, 5e-3)[depth]

    run = Simulation(Adaptive(), [0.63] * 4, cold, seed=seed).run(60)
    gains[0] = False
    run.run(1500)
    assert sum(map(any, run.depths[-300:])) < 60


def test_load_comes_and_goes() -> None:
    """Few requests draft, many do not, and few do again at once: what was learnt about a load is kept."""
    policy = Adaptive()
    few = Simulation(policy, [0.6] * 2, dense).run(200)
    many = Simulation(policy, [0.6] * 256, dense).run(100)
    again = Simulation(policy, [0.6] * 2, dense).run(20)
    assert sum(map(sum, few.depths[-20:])) > 40 and sum(map(sum, again.depths)) > 40
    assert sum(map(sum, many.depths[-20:])) < 20 * 256 / 2


def test_others_keep_their_depth() -> None:
    requests = Simulation(Configured(), [0.0] * 3, small, adaptive=False).requests
    policy = Adaptive()
    assert policy.depths(requests) == [DEPTH] * 3
    run = Simulation(policy, [0.0] * 4, small)
    run.requests[0].adaptive = False
    run.run(200)
    fixed = [depths[0] for depths in run.depths[-20:]]
    assert set(fixed) == {DEPTH} and sum(sum(depths[1:]) for depths in run.depths[-20:]) < 20


def test_levels_after_a_refused_one_are_not_counted() -> None:
    """A draft that fails at its first level says nothing of the second: counting it would halve the estimate."""
    rng, policy = random.Random(0), Adaptive()
    requests = Simulation(Configured(), [0.0] * 20, small).requests
    for _ in range(200):
        accepted = [next((j for j, chance in enumerate((0.5, 0.9)) if rng.random() >= chance), 2) for _ in requests]
        policy.landed([Span(request, 0, 1, 2, 2) for request in requests], accepted, 1e-3)
    policy.settle()
    first, second = policy.acceptance.chances(policy.acceptance.read(requests), 2).mean(0)
    assert first == pytest.approx(0.5, abs=0.12) and second / first == pytest.approx(0.9, abs=0.08)


@pytest.mark.parametrize("measured", [0.0, 1e-2], ids=["never", "seldom"])
def test_a_clock_with_long_ticks(measured: float) -> None:
    """By it most steps take no time. What they accept is learnt all the same."""
    policy = Adaptive()
    run = Simulation(policy, [0.2, 0.2, 0.9, 0.9], lambda requests, rows, depth: measured if run.seed % 8 == 0 else 0.0)
    run.requests[0].params = SamplingParams(target_tps=50.0)
    run.life = math.inf
    for _ in range(200):
        run.seed += 1
        run.run(1)
    assert policy.cost.knows_decodes == (measured > 0)
    chances = policy.acceptance.chances(policy.acceptance.read(run.requests), 1)[:, 0]
    assert max(chances[:2]) < 0.5 < min(chances[2:])


def test_the_young_are_like_the_others() -> None:
    """A request without a history starts where its drafter's other requests are."""
    run = Simulation(Adaptive(), [0.9] * 4, small).run(300)
    policy = run.policy
    assert isinstance(policy, Adaptive)
    young = Simulation(Configured(), [0.0], small).requests
    assert policy.acceptance.chances(policy.acceptance.read(young), 1)[0, 0] > 0.75


@pytest.mark.parametrize("count", [1, 4])
def test_what_all_have_in_common_counts_once(count: int) -> None:
    """A first level of which one in eight is accepted is taken to be just that. It was one in eighteen as long as the
    refusals counted in the mean, and again in the luck of the only request."""
    acceptance = Acceptance()
    readers = acceptance.read(Simulation(Adaptive(), [0.0] * count, dense).requests)
    for step in range(160):
        acceptance.learn(readers, [int(step % 8 == 0)] * count, [1] * count)
    chances = acceptance.chances(readers, 1, hoped=False)[:, 0]
    assert chances == pytest.approx(np.full(count, 1 / 8), rel=0.2)


def one_stream(requests: int, rows: int, depth: int) -> float:
    """One stream on a card."""
    return 4.4e-3 + 0.25e-3 * depth


def test_little_luck_at_first_does_not_end_all_drafting() -> None:
    """One stream whose drafts gain 10%: of 40 that begin with other luck at most three draft nothing for most of the
    time afterwards. It was ten of them, and these for ever."""
    given_up = 0
    for seed in range(40):
        run = Simulation(Adaptive(), [0.17], one_stream, seed=seed, life=math.inf).run(400)
        given_up += sum(not any(depths) for depths in run.depths[200:]) > 100
    assert given_up <= 3


class Texts(Simulation):
    """One stream of short requests of which each has a text of its own, the first three bad ones."""

    came: int = 0

    def _request(self) -> Request:
        if not self.came:
            self._drawn = random.Random(1000 + self.seed)
        self.came += 1
        self.chances = [0.4 if self.came <= 3 else 1 / (1 + math.exp(-self._drawn.gauss(1.1, 0.8)))]
        return super()._request()


def short_steps(requests: int, rows: int, depth: int) -> float:
    """One stream on a CPU."""
    return (1.02e-3, 1.75e-3, 2.02e-3, 2.2e-3, 2.6e-3)[depth]


def test_a_few_bad_texts_at_first_do_not_end_all_drafting() -> None:
    """Drafts gain 15% and more. Of 40 streams at most two rest for good; it was six of them."""
    resting = 0
    for seed in range(40):
        run = Texts(Adaptive(), [0.4], short_steps, seed=seed, life=45, patient=True, delayed=0.02).run(1500)
        resting += sum(map(any, run.depths[500:])) < 100
    assert resting <= 2


@pytest.mark.parametrize(
    ("texts", "checks", "least", "most"), [(1, 130, 0.7, 0.8), (1, 1000, 0.7, 0.8), (65, 2, 0.5, 0.58)]
)
def test_many_checks_of_few_texts_tell_little_of_others(texts: int, checks: int, least: float, most: float) -> None:
    """After checks of which half were right a good text is hoped for next where all were of one request, however many,
    and hardly where they were of many."""
    acceptance = Acceptance()
    for _ in range(texts):
        readers = acceptance.read(Simulation(Adaptive(), [0.0], dense).requests)
        for step in range(checks):
            acceptance.learn(readers, [step % 2], [1])
    new = acceptance.read(Simulation(Adaptive(), [0.0], dense).requests)
    assert acceptance.chances(new, 1, hoped=False)[0, 0] == pytest.approx(0.5, abs=0.03)
    assert least < acceptance.chances(new, 1)[0, 0] < most


def linear(requests: int, rows: int, depth: int) -> float:
    """A step, its rows and its levels; so that the more requests, the less is the step's own time to each."""
    return 6e-3 + 0.2e-3 * rows + 1e-3 * depth


def flat(requests: int, rows: int, depth: int) -> float:
    """Rows are free, as on a GPU."""
    return 6e-3 + 0.2e-3 * depth


@pytest.mark.parametrize(("cost", "alone", "beside"), [(linear, True, False), (flat, True, True)])
def test_beside_prompts_time_is_worth_what_all_make_of_it(cost: Cost, alone: bool, beside: bool) -> None:
    """Four requests gain by drafts while they have a step to themselves. If its prompts are to be 28 more, drafts take
    time in which all 32 would make more, unless rows are free."""
    policy = Adaptive()
    Simulation(policy, [0.5] * 32, cost).run(300)
    few = Simulation(policy, [0.5] * 4, cost).run(300)
    drafted = [sum(policy.depths(few.requests, Others(reads=joining > 0, joining=joining))) for joining in (0, 28, 0)]
    assert [levels > 0 for levels in drafted] == [alone, beside, alone]


class Hasty(Adaptive):
    """Knows of nobody that waits."""

    def depths(self, requests: Sequence[Request], others: Others = NOBODY) -> Sequence[int]:
        return super().depths(requests)


def test_a_burst_is_done_sooner_if_drafts_are_held_back() -> None:
    """And first tokens come sooner."""
    limits = Limits(max_num_seqs=32, max_num_batched_tokens=1024)

    def seconds(spans: Sequence[Span]) -> float:
        return 6e-3 + 0.2e-3 * sum(span.rows for span in spans) + 1e-3 * max(span.depth for span in spans)

    def burst(policy: Adaptive) -> tuple[float, float]:
        fleet = Fleet([Card(limits, Drafting("mtp", (0, 1, 2, 3), adaptive=True), policy, seconds)])
        runs = [fleet.run([Job.drawn(120, 64, (0.8,) * 3, seed, each) for each in range(32)], 32) for seed in range(8)]
        known = runs[2:]  # by then it is known what steps cost
        firsts = [each.ttft for run in known for each in run.answered]
        return sum(run.seconds for run in known), statistics.median(firsts)

    (soon, first), (late, last) = burst(Adaptive()), burst(Hasty())
    assert soon < 0.995 * late and first < 0.95 * last


def test_what_is_explained_is_what_was_chosen_beside_prompts() -> None:
    """A step that decodes, reads one prompt and ends another, for which the policy is asked apart: were any of their
    depths not the policy's, rows would seem to be short."""
    policy = Adaptive()
    Simulation(policy, [0.5] * 32, lambda requests, rows, depth: linear(requests, rows, 3 * depth)).run(300)
    queue, pages = Queue(32), Ledger({"full": 1000}, 16, prefix_caching=False)
    planner = Planner(Budget(100, 32), policy)
    for number, length in enumerate((4, 4, 30, 300)):
        rows = tuple(range(DEPTH + 1))
        item = Request(str(number), [0] * length, SamplingParams(), Speculation("mtp"), rows, adaptive=True)
        queue.add(item)
        queue.apply(StepPlan(admitted=(item,)))
        pages.admit(item)
        item.computed = length - 1 if number < 2 else 0
    plan = planner.explained(planner.plan(queue, pages))
    assert [(span.decides, span.real > 1) for span in plan.spans] == [(True, False)] * 2 + [(True, True), (False, True)]
    assert [reason.cause for reason in plan.reasons] == ["chosen"] * 3 + ["prompt"]
    assert not any(span.depth for span in plan.spans)
    chances = [reason.chances[0] for reason in plan.reasons if reason.chances]
    assert chances == pytest.approx([0.5] * 3, abs=0.1), "not what is hoped of requests that nothing is known of"


def test_steps_that_catch_up_say_nothing_of_others() -> None:
    """They would make drafts look dear, since they are long for another reason."""
    run = Simulation(Adaptive(), [0.8] * 2, dense).run(100)
    policy = run.policy
    before = [policy.depths(run.requests) for _ in range(3)]
    for _ in range(50):
        policy.landed([Span(request, 0, 1, 3, 3, behind=9) for request in run.requests], [3, 3], 1.0)
    assert sum(map(sum, before)) <= sum(sum(policy.depths(run.requests)) for _ in range(3))


def gains_nothing(requests: int, rows: int, depth: int) -> float:
    """A CPU where what eight requests draft takes a little more than it brings."""
    return 0.85e-3 + 0.05e-3 * requests + 0.107e-3 * rows + depth * (0.4e-3 + 0.06e-3 * requests)


@pytest.mark.parametrize("seed", range(3))
def test_a_prompt_in_every_tenth_step_changes_no_depth(seed: int) -> None:
    """Eight streams whose requests end one by one: beside a prompt seven decode. What was best for seven when there
    were as many last must not become what all do, and of seven less is known than of eight."""
    rng = random.Random(seed)
    drafted: list[bool] = []

    def seconds(spans: Sequence[Span]) -> float:
        decoding = [span for span in spans if span.real == 1]
        depth, prompt = max(span.depth for span in spans), sum(span.real for span in spans if span.real > 1)
        drafted.append(depth > 0)
        slower = 0.15 if rng.random() < 0.12 else 0.0  # something else delays a step
        noise = math.exp(rng.gauss(0, 0.04) + rng.expovariate(1.0) * slower)
        rows = sum(span.rows for span in decoding)
        return noise * (gains_nothing(len(decoding), rows, depth) + 0.05e-3 * prompt)

    card = Card(Limits(8, itl_target_ms=0), Drafting("mtp", (0, 1, 2, 3), adaptive=True), Adaptive(), seconds)
    # Of different lengths, so that not all end together.
    jobs = [Job.drawn(20, rng.randrange(26, 103), (0.75, 0.81, 0.74), seed, number) for number in range(300)]
    Fleet([card]).run(jobs, 8)
    later = drafted[500:-100]
    assert len(later) > 1000 and sum(later) / len(later) < 0.05


def test_newcomers_join_the_choice_that_stands() -> None:
    """What was best for eight when there were as many last must not give one that comes to seven another depth than
    they have: the whole step would be drafted to the deeper one, or it alone would not draft."""
    policy = Adaptive()
    eight = Simulation(policy, [0.02] * 8, small).run(300)
    assert not any(eight.depths[-1])
    seven = Simulation(policy, [0.95] * 7, flat).run(100)
    newcomer = Simulation(Configured(), [0.0], flat).requests
    assert min(policy.depths([*seven.requests, *newcomer])) > 0


def test_probes_are_as_rare_as_there_is_nothing_to_learn() -> None:
    """Depth 2 is nearly as fast as depth 1. On a clock that tells so exactly probes become rare; on one that does not,
    what they tell is worth their price."""

    def probes(noise: float) -> int:
        rng = random.Random(0)

        def close(requests: int, rows: int, depth: int) -> float:
            return (1e-3, 1.45e-3, 1.9e-3, 5e-3, 9e-3)[depth] * math.exp(rng.gauss(0, noise))

        run = Simulation(Adaptive(), [0.62] * 8, close).run(3000)
        return sum(len(set(depths)) == 1 and depths[0] != 1 for depths in run.depths[1500:])

    assert probes(0.1) > 2 * probes(0.0)


def test_probes_are_rarer_where_looking_at_them_takes_long() -> None:
    """Drafts of two, three and four levels take about as long per token, so that probes may always tell something. Here
    looking at one takes nearly as long as a step; on a CPU an eighth."""

    def probes(looking: float, seed: int) -> int:
        ticks = itertools.count()
        policy = Adaptive(clock=lambda: next(ticks) * looking)
        run = Simulation(policy, [0.58] * 8, dense, seed=seed).run(1500)
        depths = [max(depths) for depths in run.depths[200:]]
        return sum(before == after != depth for before, depth, after in zip(depths, depths[1:], depths[2:]))

    often, rarely = (sum(probes(looking, seed) for seed in range(3)) for looking in (0.0, 5e-3))
    assert 0 < 2 * rarely < often


def test_nobody_asks_whether_depths_stand_where_all_draft() -> None:
    """It takes longer to ask, right after a model has gone through the caches, than all else that waits decide."""

    def drafts() -> bool:
        raise AssertionError

    request = Simulation(Adaptive(), [0.5], dense).requests[0]
    assert Waits(patience=16).of([Allocation(request, 0, 1, 0, real=1, allowed=2)], drafts) == [Follow.NOW]


def test_the_first_step_of_a_depth_is_not_taken_for_a_delay() -> None:
    """Deep drafts that take far longer than shallow ones: a line through them says that a plain step takes nothing.
    What was not seen yet is not measured by that."""
    policy = Adaptive()
    Simulation(policy, [0.62] * 8, lambda requests, rows, depth: (1e-3, 1.45e-3, 1.84e-3, 5e-3, 9e-3)[depth]).run(200)
    assert policy.cost.one(StepShape(8, 8, 0, 8 * 100)) == pytest.approx(1e-3, rel=0.1)
    assert policy.cost.one(StepShape(8, 16, 1, 8 * 100)) == pytest.approx(1.45e-3, rel=0.1)


@pytest.mark.parametrize(("price", "steps"), [(1.2, 150), (3.2, 400)])
def test_probes_are_as_rare_as_they_are_dear(price: float, steps: int) -> None:
    """A depth that costs 1.2 steps when it is probed, and is not known to be slower, may cost 0.8% of all steps."""
    load = Load(Chosen(4, 0, 0.5, prices_D=np.array([0.0, price, 9.9]), slower_D=np.array([False, False, True])))
    for _ in range(20):
        load.judged = False
        load.judge(0)
    assert load.interval == pytest.approx(steps, rel=0.01)


def test_shallower_depths_known_to_be_slower_are_probed_rarely() -> None:
    """Plain decoding is, while both depths beside the choice are probed all the time: the deeper one whether it is
    slower or not, since only drafts tell how its level fares."""
    chosen = Chosen(4, 2, 0.5, prices_D=np.array([2.0, 0.1, 0.0, 9.9]), slower_D=np.array([True, False, False, True]))
    load, probed = Load(chosen), []
    for _ in range(2 * LATEST):
        load.count()
        if load.unprobed >= SOONEST:
            depth = load.due(chosen, 3)
            assert depth is not None
            load.begin(1)
            load.land(depth, judged=True)
            probed.append((load.steps, depth))
    assert [depth for _, depth in probed[:4]] == [3, 1, 3, 1]
    assert [steps for steps, depth in probed if depth == 0] == [LATEST, 2 * LATEST]


def test_plain_steps_cost_little_where_drafts_clearly_pay() -> None:
    """Four streams whose drafts make 3.5 tokens in 1.2 times a plain step's time: each plain step costs over two
    thirds of one. In the first 200 steps there are those that every load begins with, and no others; later a few."""
    run = Simulation(Adaptive(), [0.9] * 4, lambda requests, rows, depth: 1e-3 + 7e-5 * depth).run(1200)
    plain = [step for step, depths in enumerate(run.depths) if not any(depths)]
    assert sum(step < 200 for step in plain) <= 3
    assert 1 <= sum(step >= 200 for step in plain) <= 10


def test_a_probe_that_changes_nothing_counts_for_about_as_many_requests() -> None:
    """While requests come and go, each number of them would otherwise be probed for itself. Where another depth is
    chosen, or with twice as many, the probe says nothing."""
    loads = Loads()
    here = loads.at(24, Chosen(24, 0, 0.5))
    near, deeper, far = loads.at(20, Chosen(20, 0, 0.5)), loads.at(28, Chosen(28, 1, 0.5)), loads.at(48, here.chosen)
    for load in (near, deeper, far):
        load.unprobed = 7
    here.judged, here.interval = False, 4 * SOONEST
    assert here.judge(0)
    loads.spread(here)
    assert (near.unprobed, near.interval) == (0, here.interval) == (0, 8 * SOONEST)
    assert [(load.unprobed, load.interval) for load in (deeper, far)] == [(7, SOONEST)] * 2
    assert not here.judge(0), "there was no other probe"


def test_nothing_is_decided_again_where_nothing_is_drafted() -> None:
    """As long as those that come are to draft nothing either: one with a depth of its own has it."""
    policy = Adaptive()
    run = Simulation(policy, [0.0] * 8, small, life=math.inf).run(900)
    while policy._probing is not None or policy._unseen.count or policy._decided.repeats < 3:
        run.run(1)
    decided = policy._decided
    run.requests[0] = run._request()
    run.run(1)
    assert policy._decided is decided and not any(run.depths[-1])
    run.requests[1] = replace(run._request(), adaptive=False)
    run.run(1)
    assert policy._decided is not decided and run.depths[-1] == [0, len(run.requests[1].rows_by_depth) - 1] + [0] * 6
