"""While the device is busy, the next step is planned late, so that requests that arrive meanwhile are in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stridelm.engine.engine import Engine
from stridelm.schedule.slack import EARLY, EARLY_SHARE, FADING, SHORTEST, LaunchTime
from stridelm.schedule.step_cost import StepCost
from stridelm.server.engine_process import Loop
from stridelm.server.messages import Job, Submit, encode, packed
from stridelm.upload import Mark
from support.checks.identity import sampling
from support.doubles.bounds import LaggingStand, bounds_registered

LONG = 10.0
"""Seconds, with which no step of a tiny model is expected."""


@pytest.fixture(scope="module", autouse=True)
def _registered() -> Iterator[None]:
    with bounds_registered():
        yield


@pytest.fixture(scope="module")
def stand(checkpoint: Callable[..., Path]) -> LaggingStand:
    return LaggingStand(checkpoint("qwen3", tie_word_embeddings=True), "float32")


@pytest.fixture
def busy_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps do not end by themselves, and are expected to take long: a CPU has run them when they are launched."""
    monkeypatch.setattr(Mark, "has_passed", False)
    monkeypatch.setattr(StepCost, "one", lambda self, step: LONG)


def test_launch_time() -> None:
    launch = LaunchTime()

    def left(now: float, *, prompts: bool = False) -> float:
        return launch.left(now, began=4.0, step=3.0, prompts=prompts)

    ends = 7.0 - 3.0 * EARLY_SHARE - EARLY
    assert left(5.0) == pytest.approx(ends - 5.0)
    launch.note(0.5, prompts=False)
    launch.note(0.1, prompts=False)  # one that took longer is remembered for a while
    launch.note(0.9, prompts=True)
    assert left(5.0) == pytest.approx(ends - 5.0 - 0.5 * FADING)
    assert left(5.0, prompts=True) == pytest.approx(ends - 5.0 - 0.9)
    for _ in range(500):
        launch.note(0.1, prompts=False)
    assert left(5.0) == pytest.approx(ends - 5.0 - 0.1)
    assert left(7.0) == 0.0  # late
    assert left(ends - 0.1 - SHORTEST / 2) == 0.0


def running(stand: LaggingStand, requests: int, **options: Any) -> Engine:
    """An engine whose requests decode, with a step in flight."""
    engine = stand.llm(page_size=4, max_num_seqs=4, **options).engine
    for number in range(requests):
        engine.add(f"r{number}", [5, 6, 7], sampling(stand, [5, 6, 7], 0.0, "nothing"))
    for _ in range(3):
        engine.step()
    assert engine.steps.flights
    return engine


@pytest.mark.usefixtures("busy_device")
def test_waits_for_requests_that_could_run(stand: LaggingStand) -> None:
    engine = running(stand, 2)
    assert 0.0 < engine.slack < LONG * (1 - EARLY_SHARE)
    engine.add("more", [5, 6, 7], sampling(stand, [5, 6, 7], 0.0, "nothing"))
    assert engine.slack == 0.0  # somebody waits already
    engine.step()
    assert engine.slack > 0.0
    engine.steps._launch_time.note(2 * LONG, prompts=True)  # how long prompts take to launch is of no interest yet
    assert engine.slack > 0.0
    full = running(stand, 4)
    assert full.slack == 0.0  # nobody else could run


@pytest.mark.usefixtures("busy_device")
def test_prompts_take_longer_to_launch(stand: LaggingStand) -> None:
    """While a prompt goes on, the next step will have prompt rows."""
    engine = running(stand, 1, max_num_batched_tokens=8)
    engine.add("long", [5, 6, 7] * 10, sampling(stand, [5, 6, 7], 0.0, "nothing"))
    engine.step()
    assert engine.slack > 0.0
    engine.steps._launch_time.note(2 * LONG, prompts=True)
    assert engine.slack == 0.0


def test_never_waits_for_a_step_that_has_ended(stand: LaggingStand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepCost, "one", lambda self, step: LONG)
    assert running(stand, 2).slack == 0.0


@pytest.mark.usefixtures("busy_device")
def test_nothing_to_wait_for(stand: LaggingStand) -> None:
    engine = running(stand, 1)
    engine.steps.planner.depths.clear()
    assert engine.slack == 0.0  # what steps take is not known
    for name in [request.id for request in engine.queue]:
        engine.abort(name)
    while engine.busy:
        engine.step()
    assert engine.slack == 0.0


@pytest.mark.usefixtures("busy_device")
def test_what_arrives_meanwhile_is_in_the_next_step(stand: LaggingStand) -> None:
    """The engine's process reads messages while there is slack, and a request ends it."""
    engine = running(stand, 2)
    polls: list[int] = []

    class Receiver:
        """Empty at first; then a request arrives."""

        def poll(self, timeout: int) -> bool:
            polls.append(timeout)
            return len(polls) == 4

        def recv(self) -> bytes:
            job = Job(["fg1.0"], packed([5, 6, 7]).tobytes(), {"max_tokens": 4})
            return encode(Submit("fg1", [job]))

    class Outlets:
        def __contains__(self, frontend: str) -> bool:
            return True

        def send(self, frontend: str, message: object) -> None:
            pass

    loop = Loop(engine, Receiver(), Outlets(), parent=0)  # type: ignore[arg-type]
    loop._take()
    assert engine.queue.get("fg1.0") is not None
    assert polls[:4] == [1, 1, 1, 1] and polls[4:] == [0, 0]
    before = engine.stats.steps
    engine.step()
    assert "fg1.0" in {span.request.id for span in engine.steps.flights[-1].plan.spans}
    assert engine.stats.steps <= before + 1
