"""Why spans have the drafts that they have, and what is counted of it."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import takewhile

import pytest

from stridelm import SamplingParams
from stridelm.params import Speculation
from stridelm.schedule.adaptive import Adaptive
from stridelm.schedule.depth_figures import Choice, DepthFigures, Pick, reasons
from stridelm.schedule.planner import Planner
from stridelm.schedule.row_stairs import RowStairs
from stridelm.simulate.card import Card, Drafting, Limits
from stridelm.simulate.workload import Job
from stridelm.types import Follow, Found, Request, Span, StepPlan

ROWS = (0, 1, 2, 3)


def request(**fields: object) -> Request:
    made = Request("", [0], SamplingParams(max_tokens=20), Speculation(drafter="mtp"), ROWS, adaptive=True)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def span(of: Request, depth: int, *, decides: bool = True) -> Span:
    return Span(of, 0, 1, depth, of.rows_by_depth[depth], decides)


def chosen(*depths: int, probes: bool = False) -> Choice:
    return Choice([Pick(depth, probes, max(depths), 0.3, [0.9, 0.5, 0.2]) for depth in depths], 0.01)


@pytest.mark.parametrize(
    ("one", "choice", "cause"),
    [
        (span(request(), 0, decides=False), chosen(), "prompt"),
        (replace(span(request(needs_states=True), 0), real=5), chosen(), "prompt"),
        (replace(span(request(needs_states=True), 0), real=5), None, "prompt"),
        (span(request(needs_states=True), 2), chosen(2), "chosen"),
        (span(request(rows_by_depth=(0,)), 0), chosen(0), "plain"),
        (span(request(all_or_nothing=True), 3), chosen(), "window"),
        (span(request(adaptive=False), 3), chosen(3), "asked"),
        (span(request(), 3), None, "asked"),
        (span(request(output_ids=[0] * 18), 1), chosen(3), "ending"),
        (span(request(output_ids=[0] * 18), 1), None, "ending"),
        (span(request(found=Found(1, 8)), 1), chosen(1), "found"),
        (span(request(found=Found(0, 0)), 0), None, "found"),
        (span(request(found=Found(3, 2)), 1), chosen(1), "chosen"),
        (span(request(found=Found(2, 2)), 1), chosen(2), "room"),
        (span(request(), 1), chosen(2), "room"),
        (replace(span(request(), 0), behind=3), chosen(2), "behind"),
        (replace(span(request(), 0), behind=3, follow=Follow.LATER), chosen(0), "chosen"),
        (replace(span(request(), 0), behind=3, follow=Follow.ENTRIES), chosen(2), "behind"),
        (replace(span(request(), 0), behind=1, follow=Follow.ENTRIES), chosen(2), "room"),
        (span(request(), 2), chosen(2, probes=True), "probe"),
        (span(request(), 2), chosen(2), "chosen"),
        (span(request(), 0), chosen(0), "chosen"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_causes(one: Span, choice: Choice | None, cause: str) -> None:
    [reason] = reasons([one], choice)
    assert reason.cause == cause
    assert reason.levels == len(one.request.rows_by_depth) - 1
    reported = cause in ("chosen", "behind", "ending", "found") and choice is not None
    most = reason.most
    assert (most is not None) == reported
    assert (reason.least is not None) == (reported and most != 0), "at depth 0 no chance is worth a row"


def test_reasons_follow_their_spans() -> None:
    """The policy is asked only for those that decide, so places differ."""
    spans = [span(request(), 0, decides=False), span(request(all_or_nothing=True), 3), span(request(), 1)]
    assert [reason.cause for reason in reasons(spans, chosen(1))] == ["prompt", "window", "chosen"]


def test_the_end_of_a_prompt_that_cannot_be_drafted_is_no_refusal() -> None:
    policy, one = Adaptive(), request(needs_states=True)
    for _ in range(20):
        policy.landed([replace(span(one, 0), real=5)], [0], 0.01)
    assert policy.figures == DepthFigures()
    assert policy.acceptance.read([one]).known.requests_P["checks"].max() == 0


def test_counts() -> None:
    policy, tree = Adaptive(), request(rows_by_depth=(0, 2, 6))
    policy.landed([span(request(), 0), span(request(), 3), span(tree, 1)], [0, 0, 0], 0.01)
    policy.landed([span(request(), 3)], [0], 0.01)
    policy.settle()
    figures = policy.figures
    assert figures.depths == {"0": 1, "3": 2, "1": 1}
    assert (figures.drafted, figures.spared) == (3 + 2 + 3, 3 + 4)


@pytest.mark.parametrize("drafter", ["mtp", "ngram"])
def test_only_depths_that_are_chosen_are_counted(drafter: str) -> None:
    """Not those of requests beside them that draft nothing, that have a depth of their own, or whose prompt is read."""
    policy, kind = Adaptive(), Speculation(drafter=drafter)
    looked: dict[str, object] = {"looks_ahead": True, "found": Found(2, 8)} if drafter == "ngram" else {}
    plain, fixed = request(rows_by_depth=(0,), adaptive=False), request(adaptive=False, speculation=kind, **looked)
    one = request(speculation=kind, **looked)
    policy.depths([one, plain, fixed])
    reads = [span(request(speculation=kind, **looked), 0, decides=False)]
    policy.landed([span(one, 1), span(plain, 0), span(fixed, 2), *reads], [0] * 4, 0.01)
    policy.settle()
    assert policy.figures.depths == {"1": 1} and policy.figures.drafted == 3


def test_predictions_are_compared_with_what_came() -> None:
    """Of steps that all cost and bring the same, the prediction is exact in the long run."""
    policy, one = Adaptive(), request(params=SamplingParams())
    for _ in range(400):
        [depth] = policy.depths([one])
        policy.landed([span(one, depth)], [depth], 0.01)
    seconds, tokens = policy.figures.seconds, policy.figures.tokens
    assert seconds["measured"] == pytest.approx(seconds["predicted"], rel=0.1) and seconds["measured"] > 0.1
    assert tokens["measured"] == pytest.approx(tokens["predicted"], rel=0.1)
    assert policy.figures.gain == pytest.approx(4.0, rel=0.1)  # four tokens in a step that costs as much as a plain one
    choice = policy.explain([one])
    assert choice is not None and choice.seconds == pytest.approx(0.01, rel=0.05)
    policy.clear()
    assert policy.figures == DepthFigures()


def card_of(lag: int, seed: int) -> Card:
    """Where rows cost, and no two steps take as long."""
    rng = random.Random(seed)

    def seconds(spans: Sequence[Span]) -> float:
        rows, depth = sum(span.rows for span in spans), max(span.depth for span in spans)
        return (2e-3 + 2e-4 * rows + 1.5e-4 * depth) * math.exp(rng.gauss(0, 0.03))

    limits = Limits(16, num_pages=4096, lag=lag)
    return Card(limits, Drafting("mtp", (0, 1, 2, 3), adaptive=True), Adaptive(), seconds)


@pytest.mark.parametrize("stairs", [False, True], ids=["", "stairs"])
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("priorities", [(0,), (0, 2), (-1, 1, 3)], ids=str)
def test_what_is_drafted_follows_from_what_is_reported(
    monkeypatch: pytest.MonkeyPatch, priorities: tuple[int, ...], lag: int, stairs: bool
) -> None:
    """Of every request whose depth was chosen, whatever its tokens count for and whatever was learnt since: the levels
    of the first `most` that are worth their row. Only where steps are padded some may not fit."""
    card, rng, causes, shallow = card_of(lag, seed=0), random.Random(1), Counter[str](), 0
    if stairs:
        assert isinstance(card.planner.depths, Adaptive)
        card.planner.depths.rates.stairs = RowStairs(lambda requests, depth: (4, 8, 16, 32, 64))
    plan: Callable[..., StepPlan] = Planner.plan
    add = card.queue.add

    def add_urgent(one: Request) -> None:
        one.priority = rng.choice(priorities)
        add(one)

    def explained(planner: Planner, *about: object) -> StepPlan:
        nonlocal shallow
        planned = planner.explained(plan(planner, *about))
        for span, reason in zip(planned.spans, planned.reasons, strict=True):
            causes[reason.cause] += 1
            if reason.cause == "chosen":
                assert reason.most is not None
                least = math.inf if reason.least is None else reason.least
                worth = len([*takewhile(least.__le__, reason.chances[: reason.most])])
                assert span.depth == worth, reason
                assert (reason.least is None) == (reason.most == 0)
                shallow += 0 < span.depth < reason.levels
        return planned

    monkeypatch.setattr(Planner, "plan", explained)
    monkeypatch.setattr(card.queue, "add", add_urgent)
    now, left = 0.0, 60
    while left or card.outstanding or card.flights:
        while left and card.outstanding < 8:
            chance, left = rng.choice((0.1, 0.5, 0.9)), left - 1
            card.add(str(left), Job.drawn(rng.randint(20, 99), rng.randint(10, 120), (chance,) * 3, 0, left))
        card.launch(now)
        now = card.flights[0].ends
        card.land()
    assert causes["chosen"] > 1000 and causes["probe"] and shallow
    assert stairs or not causes["room"]
