"""Kinds of captured steps, and what the depth policy is told about them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stridelm import SamplingParams
from stridelm.draft import DRAFTERS
from stridelm.engine.engine import Engine
from stridelm.engine.kinds import Kind, kind_of, row_stairs
from stridelm.engine.ways import ways_of
from stridelm.sample.table import Feature
from stridelm.types import Request, Span
from support.doubles.bounds import LaggingStand, bounds_registered
from support.doubles.replays import replays

pytestmark = pytest.mark.skipif("mtp" not in DRAFTERS, reason="needs a drafter that runs on the device")


@pytest.fixture(scope="module")
def engine(checkpoint: Callable[..., Path]) -> Iterator[Engine]:
    with bounds_registered():
        stand = LaggingStand(checkpoint("qwen3", tie_word_embeddings=True), "float32")
        made = stand.llm(drafter="mtp", depth="auto", max_num_batched_tokens=4096).engine
        replays(made)
        yield made


@pytest.mark.parametrize("count", [1, 5, 31, 33, 50, 129, 256, 300])
def test_the_policy_knows_how_steps_are_padded(engine: Engine, count: int) -> None:
    """Any number of drafts takes as many rows as the policy counts, whatever the requests are padded to."""
    assert engine.capture is not None
    like = engine.intake.request("", [0], SamplingParams())
    deepest = len(like.rows_by_depth) - 1
    for depth in range(1, deepest + 1):
        stairs = engine.capture.row_stairs(count, depth)
        for drafting in {1, count // 3 or 1, count // 2 or 1, count}:
            drafts = [depth] * drafting + [0] * (count - drafting)
            spans = tuple(Span(like, 9, 1, each, like.rows_by_depth[each]) for each in drafts)
            ways = ways_of(spans)
            assert ways is not None
            kind = kind_of(spans, ways, Feature(0), None, 0)
            told = next(stair for stair in stairs if stair >= sum(span.rows for span in spans))
            assert told == kind.rows - (kind.requests - count)


@pytest.mark.parametrize("named", [{"depth": "auto"}, {"drafter": "mtp", "depth": "auto"}, {"depth": 2}], ids=str)
def test_who_chooses_the_depth_makes_no_other_kind(engine: Engine, named: dict[str, Any]) -> None:
    """Steps of requests that name `depth="auto"` replay the graphs that were captured for those that name nothing, and
    so do steps in which some of their drafts are as deep by request."""
    like = engine.intake.request("", [0], SamplingParams())
    other = engine.intake.request("", [0], SamplingParams(speculation=named))
    assert other.adaptive == ("auto" in named.values()) and other.speculation != like.speculation

    def kind(*requests: Request) -> Kind:
        spans = tuple(Span(each, 9, 1, 2, each.rows_by_depth[2]) for each in requests)
        ways = ways_of(spans)
        assert ways is not None
        return kind_of(spans, ways, Feature(0), None, 0)

    assert kind(like, like) == kind(like, other)
    assert "auto" not in named.values() or kind(like, like) == kind(other, other)


@pytest.mark.parametrize(
    ("requests", "drafting", "rows"), [(256, 128, 640), (256, 129, 768), (256, 256, 1024), (8, 4, 32)]
)
def test_requests_that_do_not_draft_take_no_room_for_drafts(requests: int, drafting: int, rows: int) -> None:
    """Beside others with three drafts each: as many rows as there are fill whole tiles of the products."""
    stairs = row_stairs(requests, 1, 3, chosen=False)
    assert next(stair for stair in stairs if stair >= requests + 3 * drafting) == rows
    assert stairs[-1] == requests * 4
