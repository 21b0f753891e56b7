"""Kinds of captured steps, and what the depth policy is told about them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stridelm import SamplingParams
from stridelm.draft import DRAFTERS
from stridelm.engine.engine import Engine
from stridelm.engine.kinds import kind_of, row_stairs
from stridelm.engine.ways import ways_of
from stridelm.sample.table import Feature
from stridelm.types import Span
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


@pytest.mark.parametrize(
    ("requests", "drafting", "rows"), [(256, 128, 640), (256, 129, 768), (256, 256, 1024), (8, 4, 32)]
)
def test_requests_that_do_not_draft_take_no_room_for_drafts(requests: int, drafting: int, rows: int) -> None:
    """Beside others with three drafts each: as many rows as there are fill whole tiles of the products."""
    stairs = row_stairs(requests, 1, 3, chosen=False)
    assert next(stair for stair in stairs if stair >= requests + 3 * drafting) == rows
    assert stairs[-1] == requests * 4
