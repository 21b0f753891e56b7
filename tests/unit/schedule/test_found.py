"""Drafts that are looked up before a step: how much of what was found is worth its rows. Times are simulated."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from stridelm import SamplingParams
from stridelm.params import Speculation
from stridelm.schedule.adaptive import Adaptive
from stridelm.schedule.depth import Others
from stridelm.schedule.found import LONG, PAUSE, PROBE, RARELY, SELDOM
from stridelm.schedule.rows import useful_depth
from stridelm.types import Found, Request, Span

DEPTH = 4
SURE, DOUBTFUL = 8, 2
"""Two classes of evidence."""
Cost = Callable[[int, int], float]
"""(requests, draft rows) -> seconds."""


def cheap(requests: int, drafts: int) -> float:
    """A draft row takes a tenth of a request's share of a plain step."""
    return 1e-3 * (requests + 0.1 * drafts)


def dear(requests: int, drafts: int) -> float:
    """A draft row takes more than half of it."""
    return 1e-3 * (requests + 0.6 * drafts)


def stairs(requests: int, drafts: int) -> float:
    """As cheap, but for the fourth row of a draft, which takes longer than a step."""
    return cheap(requests, drafts) + (1.5e-3 if drafts > 3 else 0.0)


def of_two_kinds(requests: int, drafts: int) -> float:
    """Rows are cheap, but the first one makes a step take a fifth longer."""
    return cheap(requests, drafts) + (0.2e-3 * requests if drafts else 0.0)


@dataclass
class Texts:
    """Requests for which something is found in every second step, and how often each level of it is accepted."""

    cost: Cost
    count: int = 8
    chances: dict[int, float] = field(default_factory=lambda: {SURE: 0.95, DOUBTFUL: 0.3})
    policy: Adaptive = field(default_factory=Adaptive)
    seed: int = 0
    priorities: Sequence[int] = (0,)
    found: float = 0.5
    """How often anything is."""

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.requests = [
            Request(
                str(i),
                [0] * 9,
                SamplingParams(max_tokens=None),
                Speculation(drafter="ngram"),
                tuple(range(DEPTH + 1)),
                adaptive=True,
                looks_ahead=True,
                priority=self.priorities[i % len(self.priorities)],
            )
            for i in range(self.count)
        ]
        self.tokens, self.seconds = 0, 0.0

    def step(self) -> list[tuple[Found, int]]:
        """What was found for each request, and how deep it drafted."""
        for request in self.requests:
            levels = DEPTH if self.rng.random() < self.found else 0
            request.found = Found(levels, self.rng.choice(list(self.chances)) if levels else 0)
        allowed = self.policy.depths(self.requests)
        depths = [min(map(int, pair)) for pair in zip(allowed, map(useful_depth, self.requests), strict=True)]
        accepted = []
        for request, depth in zip(self.requests, depths, strict=True):
            assert request.found is not None
            right = 0
            while right < depth and self.rng.random() < self.chances[request.found.evidence]:
                right += 1
            accepted.append(right)
        seconds = self.cost(self.count, sum(depths))
        spans = [Span(request, 50, 1, depth, depth) for request, depth in zip(self.requests, depths, strict=True)]
        self.policy.landed(spans, accepted, seconds)
        self.tokens += self.count + sum(accepted)
        self.seconds += seconds
        return [(request.found, depth) for request, depth in zip(self.requests, depths, strict=True) if request.found]

    def run(self, steps: int) -> dict[int, list[int]]:
        """Evidence -> depths of the drafts that were found with it."""
        seen: dict[int, list[int]] = {}
        for _ in range(steps):
            for found, depth in self.step():
                if found.levels:
                    seen.setdefault(found.evidence, []).append(depth)
        return seen

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def mean(depths: Sequence[int]) -> float:
    return sum(depths) / len(depths)


@pytest.mark.parametrize("count", [1, 8, 32])
def test_rows_are_drafted_as_far_as_they_gain(count: int) -> None:
    """Where rows cost little all that is likely is drafted; where they are dear, what is sure, and nothing of the
    rest."""
    for cost, few, many in ((cheap, 0.9, 2.0), (dear, 0.0, 0.5)):
        texts = Texts(cost, count)
        texts.run(20 * PAUSE)
        depths = texts.run(10 * PAUSE)
        assert mean(depths[SURE]) > 3.8, "a sure draft is cut short"
        assert few <= mean(depths[DOUBTFUL]) < many


@pytest.mark.parametrize("count", [1, 8, 32])
@pytest.mark.parametrize("cost", [cheap, dear])
@pytest.mark.parametrize("sure", [0.95, 0.5])
def test_no_slower_than_plain_or_all(count: int, cost: Cost, sure: float) -> None:
    """Than drafting nothing, or all that was found. (Rates are of simulated time.)"""
    chances = {SURE: sure, DOUBTFUL: 0.2}
    chosen = Texts(cost, count, chances)
    chosen.run(10 * PAUSE)
    chosen.tokens, chosen.seconds = 0, 0.0
    chosen.run(60 * PAUSE)
    plain = count / cost(count, 0)
    each = [sum(chance**level for level in range(1, DEPTH + 1)) for chance in chances.values()]
    everything = count * (1 + sum(each) / len(each) / 2) / cost(count, count * DEPTH // 2)
    assert chosen.rate > 0.98 * max(plain, everything)


def test_few_drafts_do_not_change_a_step_of_many() -> None:
    """Of 32 requests one in a step has a sure draft of four tokens: all others would wait for it. In other steps there
    are twenty such drafts, which gain."""
    texts = Texts(of_two_kinds, 32, {SURE: 0.95})
    best = [0.0, 0.0]
    for step in range(80 * PAUSE):
        texts.found = 0.6 if step // 8 % 2 else 0.03
        if step == 20 * PAUSE:
            texts.tokens, texts.seconds = 0, 0.0
        drafts = [found.levels for found, _ in texts.step()]
        if step >= 20 * PAUSE:
            rows = sum(drafts) if step // 8 % 2 else 0
            gained = sum(sum(0.95**level for level in range(1, levels + 1)) for levels in drafts) if rows else 0.0
            best = [best[0] + texts.count + gained, best[1] + of_two_kinds(texts.count, rows)]
    assert texts.rate > 0.98 * best[0] / best[1]


def test_nobody_looks_for_what_brings_little() -> None:
    """One draft in six steps of eight requests: it is worth its rows, and not what looking takes, which no kind of step
    shows. A text that repeats itself more is found out about."""
    texts = Texts(cheap, chances={SURE: 0.5}, found=0.02)
    texts.run(20 * PAUSE)
    rests = []
    for _ in range(4 * SELDOM):
        rests.append(texts.policy.rests)
        texts.run(1)
    assert rests.count(False) < 0.2 * len(rests)
    texts.chances[SURE], texts.found = 0.95, 0.5
    texts.run(2 * SELDOM)
    assert not texts.policy.rests and mean(texts.run(PAUSE)[SURE]) > 3.5


def test_a_draft_alone_ends_before_a_stair() -> None:
    """A fourth row takes as long as a step of its own: a mean over the rows would hide it."""
    texts = Texts(stairs, 1)
    texts.run(40 * PROBE)
    depths = texts.run(10 * PAUSE)[SURE]
    assert mean(depths) < 3.2 and depths.count(3) > len(depths) / 2


def test_rests_where_nothing_pays_and_finds_out_when_it_does() -> None:
    """Nobody looks for drafts that are always refused, but for a step now and then; a text that begins to repeat itself
    is found out about."""
    texts = Texts(dear, chances={SURE: 0.0, DOUBTFUL: 0.0})
    texts.run(20 * PAUSE)
    rests = [texts.policy.rests]
    drafted = 0
    for _ in range(4 * SELDOM):
        drafted += any(depth for _, depth in texts.step())
        rests.append(texts.policy.rests)
    assert rests.count(False) <= 8 and 1 <= drafted <= 8
    texts.chances[SURE] = 1.0
    texts.run(10 * SELDOM)
    assert not texts.policy.rests and mean(texts.run(PAUSE)[SURE]) > 3.5


def test_useless_drafts_cost_little() -> None:
    texts = Texts(dear, chances={SURE: 0.0, DOUBTFUL: 0.0})
    texts.run(200)
    texts.tokens, texts.seconds = 0, 0.0
    texts.run(1000)
    assert texts.rate > 0.97 * texts.count / dear(texts.count, 0)


def test_urgent_requests_draft_deeper() -> None:
    """Where a row's price is about what a doubtful one brings, those whose tokens count for less go without."""
    texts = Texts(cheap, priorities=(-2, 2))
    texts.run(20 * PAUSE)
    urgent: list[int] = []
    others: list[int] = []
    for _ in range(10 * PAUSE):
        for request, (found, depth) in zip(texts.requests, texts.step(), strict=True):
            if found.levels:
                (urgent if request.priority < 0 else others).append(depth)
    assert mean(urgent) > mean(others) + 0.5


def test_what_is_told_of_a_choice() -> None:
    texts = Texts(dear)
    texts.run(20 * PAUSE)
    for request, levels in zip(texts.requests, (0, 1, 4, 4, 4, 4, 4, 4), strict=True):
        request.found = Found(levels, SURE if levels else 0)
    depths = texts.policy.depths(texts.requests)
    choice = texts.policy.explain(texts.requests)
    assert choice is not None
    assert [pick.depth for pick in choice.picks] == list(depths) == [0, 1, 4, 4, 4, 4, 4, 4]
    assert choice.seconds == pytest.approx(dear(8, 25), rel=0.15)
    assert all(0.2 < pick.least < 1.0 and pick.most is None for pick in choice.picks)
    sure = choice.picks[2].chances
    assert sure[0] > 0.9 and sure == sorted(sure, reverse=True)
    texts.requests[2].priority = 1
    less_urgent = texts.policy.explain(texts.requests)
    assert less_urgent is not None and less_urgent.picks[2].least == pytest.approx(2 * choice.picks[2].least)
    figures = texts.policy.figures
    assert figures.drafted and figures.spared and figures.gain is not None and figures.gain > 1.0
    assert figures.seconds["predicted"] == pytest.approx(figures.seconds["measured"], rel=0.1)
    assert figures.tokens["predicted"] == pytest.approx(figures.tokens["measured"], rel=0.2)


def test_fixed_depths_stay() -> None:
    """Of requests beside them that have a depth of their own, or draft nothing."""
    texts = Texts(dear, 4, chances={SURE: 0.0})
    texts.requests[1].adaptive = False
    texts.requests[2] = Request("plain", [0] * 9, SamplingParams(), Speculation(drafter="none"))
    texts.run(20 * PAUSE)
    texts.requests[1].found = Found(DEPTH, SURE)
    depths = texts.policy.depths(texts.requests)
    assert depths[1] == DEPTH and depths[2] == 0
    assert not texts.policy.rests, "nobody would look for the one that always drafts"


def test_where_a_prompt_ends_nobody_has_looked() -> None:
    """So there is room for all that may be found, and nothing is learnt of how sure it was."""
    texts = Texts(dear)
    texts.run(PAUSE)
    newcomer = Request("", [0] * 9, SamplingParams(), Speculation(drafter="ngram"), (0, 1, 2), adaptive=True)
    newcomer.looks_ahead = True
    depths = texts.policy.depths([newcomer], Others(asked=texts.count))
    assert depths == [2]
    known = {evidence: list(levels.checks) for evidence, levels in texts.policy.found._levels.items()}
    texts.policy.landed([Span(newcomer, 0, 9, 2, 2)], [1], 5e-3)
    texts.policy.settle()
    assert {evidence: list(levels.checks) for evidence, levels in texts.policy.found._levels.items()} == known


@pytest.mark.parametrize("count", [1, 8, 32])
def test_other_requests_are_looked_at(count: int) -> None:
    """However little was found for others: when all of these have gone, or are twice as many."""
    for change in ("all are others", "there are more"):
        texts = Texts(cheap, count, chances={SURE: 0.3}, found=0.02)
        texts.run(20 * PAUSE)
        while not texts.policy.rests:
            texts.run(1)
        texts.chances[SURE], texts.found = 0.95, 0.5
        others = Texts(cheap, 2 * count if change == "there are more" else count).requests
        texts.requests = others if change == "all are others" else [*texts.requests, *others[count:]]
        texts.count = len(texts.requests)
        texts.run(2)
        assert any(texts.run(PAUSE)[SURE]), change


def test_a_prompt_that_ends_does_not_change_what_is_drafted() -> None:
    """Nobody has looked for its request, so there is room for all; the others draft what they would without it, and
    `explain` says so."""
    texts = Texts(of_two_kinds, 32, {SURE: 0.95})
    for found in (0.6, 0.03) * 40:
        texts.found = found
        texts.run(8)
    for request in texts.requests:
        request.found = Found(0, 0)
    texts.requests[3].found = Found(DEPTH, SURE)
    newcomer = Request("", [0] * 9, SamplingParams(), Speculation(drafter="ngram"), (0, 1, 2), adaptive=True)
    newcomer.looks_ahead = True
    policy = texts.policy
    assert policy.depths(texts.requests) == [0] * 32
    assert policy.depths([newcomer], Others(asked=32)) == [2]
    choice = policy.explain([*texts.requests, newcomer])
    assert choice is not None and [pick.depth for pick in choice.picks] == [*[0] * 32, 2]
    assert [pick.most for pick in choice.picks] == [*[0] * 32, None], "nothing was worth its row"


@pytest.mark.parametrize("looks", [3 * LONG, 5 * LONG, 8 * LONG + 7])
def test_looks_seldom_where_there_is_nothing(looks: int) -> None:
    """A text that repeats nothing: every fourth step is enough to find out when it does."""
    texts = Texts(cheap, found=0.0)
    texts.run(looks)
    rests = []
    for _ in range(40):
        rests.append(texts.policy.rests)
        texts.run(1)
    assert rests.count(False) == 10
    texts.found = 1.0
    texts.run(RARELY)
    assert not texts.policy.rests


def test_a_step_with_other_drafts_is_not_served() -> None:
    """Those that end a prompt are asked for after the others, and then all of the step are looked at together."""
    texts = Texts(cheap, 2)
    heads = [Request("", [0], SamplingParams(), Speculation(drafter="mtp"), (0, 1), adaptive=True)]
    texts.step()
    policy = texts.policy
    for first, second in ((heads, texts.requests), (texts.requests, heads)):
        policy.depths(first)
        policy.depths(second, Others(asked=len(first)))
        spans = [Span(request, 50, 1) for request in (*first, *second)]
        before = policy.found._steps
        policy.landed(spans, [0] * len(spans), 1e-3)
        assert policy.found._steps == before
