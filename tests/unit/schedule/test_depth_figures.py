"""Why spans have the drafts that they have, and what is counted of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stridelm import SamplingParams
from stridelm.params import Speculation
from stridelm.schedule.adaptive import Adaptive
from stridelm.schedule.depth_figures import Choice, DepthFigures, reasons
from stridelm.types import Follow, Found, Request, Span

ROWS = (0, 1, 2, 3)


def request(**fields: object) -> Request:
    made = Request("", [0], SamplingParams(max_tokens=20), Speculation(drafter="mtp"), ROWS, adaptive=True)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def span(of: Request, depth: int, *, decides: bool = True) -> Span:
    return Span(of, 0, 1, depth, of.rows_by_depth[depth], decides)


def chosen(*depths: int, probes: bool = False) -> Choice:
    return Choice(depths, probes, 0.3, [[0.9, 0.5, 0.2]] * len(depths), 0.01)


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
    assert (reason.least is not None) == (cause in ("chosen", "behind", "ending", "found") and choice is not None)


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
