"""Which steps are captured where there is not memory for all, and that it is told."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stridelm import SamplingParams
from stridelm.engine.capture import Capture
from stridelm.engine.device_step import Run
from support.doubles.bounds import LaggingStand, bounds_registered
from support.doubles.replays import Left, Replay, ReplayPool

SHARE, ROW = 1, 100
"""What each graph takes beside the memory that all share, and what each row takes of that."""


class TightPool(ReplayPool):
    """Stands in for `GraphPool` where memory counts: graphs share what their tensors take, and none is captured once
    all is spent."""

    def __init__(self, budget: int) -> None:
        super().__init__()
        self.budget = budget
        self.clear()

    def clear(self) -> None:
        self.spent = self._shared = 0
        self.rows: list[int] = []
        """Of each step, as they were captured."""

    def capture(self, body: Callable[[], Left], inputs: int = 0) -> tuple[Replay, Left]:
        if self.spent >= self.budget:
            return None  # type: ignore[return-value]
        graph, left = super().capture(body, inputs)
        if isinstance(left, Run):
            assert left.detail is not None
            self.rows.append(len(left.detail.batch.ids))
            more = max(0, ROW * self.rows[-1] - self._shared)
            self._shared += more
            self.spent += more
        self.spent += SHARE
        return graph, left


@pytest.fixture(scope="module")
def stand(checkpoint: Callable[..., Path]) -> Iterator[LaggingStand]:
    with bounds_registered():
        yield LaggingStand(checkpoint("qwen3", tie_word_embeddings=True), "float32")


def started(stand: LaggingStand, budget: int) -> tuple[Capture, TightPool]:
    """Captured steps of a start with so much memory for them, and the pool that they are in."""
    llm = stand.llm(page_size=4, max_num_seqs=16, drafter="mtp", depth=2)
    pool = TightPool(budget)
    llm.engine.capture_into(pool, None)  # type: ignore[arg-type]
    capture = llm.engine.capture
    assert capture is not None
    capture.at_start()
    return capture, pool


@pytest.fixture(scope="module")
def all_rows(stand: LaggingStand) -> list[int]:
    """Rows of all steps that such an engine captures, in order."""
    return sorted(kind.rows for kind in started(stand, 10**9)[0].kinds)


def test_with_memory_for_all(stand: LaggingStand, all_rows: list[int], caplog: pytest.LogCaptureFixture) -> None:
    """The largest step comes first, so that the others find its tensors' memory; then those with few rows."""
    capture, pool = started(stand, 10**9)
    assert pool.rows == all_rows[-1:] + all_rows[:-1]
    assert pool.spent == ROW * all_rows[-1] + SHARE * pool.graphs
    assert not capture.missing and not caplog.records


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_where_the_largest_would_take_all(
    share: float, stand: LaggingStand, all_rows: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """It is left out: the largest that leaves half of the memory comes first. The captured steps are those with the
    fewest rows, what is missing is an error in the log and counted, and the others run part by part."""
    capture, pool = started(stand, int(share * ROW * all_rows[-1]))
    most = max(rows for rows in all_rows if ROW * rows + SHARE <= pool.budget / 2)
    assert pool.rows[0] == most
    assert sorted(kind.rows for kind in capture.kinds) == all_rows[: len(capture.kinds)]
    assert 0 < len(capture.kinds) < len(all_rows)
    (record,) = caplog.records
    assert record.levelno == logging.ERROR and f"{capture.missing} of the graphs" in record.getMessage()


def test_missing_graphs_are_counted(stand: LaggingStand) -> None:
    """A step without a graph runs all the same."""
    llm = stand.llm(page_size=4, max_num_seqs=16, drafter="mtp", depth=2)
    llm.engine.capture_into(TightPool(0), None)  # type: ignore[arg-type]
    [output] = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 5
    stats = llm.engine.stats
    assert stats.missing_graphs > 0 and stats.uncaptured["memory"] > 0 and not stats.captures
