"""Steps are timed by the device, whenever the host gets to read them."""

from __future__ import annotations

import time

import pytest
import torch

from stridelm.engine.step_clock import StepClock
from stridelm.upload import Mark


class At(Mark):
    """A mark that the device passes at this second of its clock, which runs LATE seconds behind the host's."""

    LATE = 100.0

    def __init__(self, second: float) -> None:
        super().__init__(torch.device("cpu"))
        self.second, self.now = second, 0.0

    @property
    def has_passed(self) -> bool:
        return self.now > self.second + self.LATE

    def since(self, earlier: Mark) -> float:
        assert isinstance(earlier, At)
        return self.second - earlier.second


def read(clock: StepClock, monkeypatch: pytest.MonkeyPatch, second: float, *, at: float) -> float:
    """When the step that ended at this second is taken to have ended, if the host looks for it then."""
    mark = At(second)
    mark.now = at
    monkeypatch.setattr(time, "perf_counter", lambda: max(at, second + At.LATE))
    clock.wait_for(mark)
    return clock.ended


def test_a_host_that_reads_late_knows_when_a_step_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = StepClock()
    assert read(clock, monkeypatch, 1.0, at=105.0) == 105.0  # nothing to compare with
    assert read(clock, monkeypatch, 7.0, at=106.0) == 107.0  # waited for
    assert read(clock, monkeypatch, 9.0, at=125.0) == pytest.approx(109.0)
    assert read(clock, monkeypatch, 29.0, at=125.0) == 129.0
    assert read(clock, monkeypatch, 30.0, at=130.5) == pytest.approx(130.0)


def test_never_in_the_future(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if the first step was read late, and the next one soon."""
    clock = StepClock()
    read(clock, monkeypatch, 1.0, at=105.0)
    assert read(clock, monkeypatch, 4.0, at=104.5) == 104.5


def test_marks_of_a_cpu() -> None:
    first, second = Mark(torch.device("cpu")), Mark(torch.device("cpu"))
    second.wait()
    assert second.has_passed and 0.0 <= second.since(first) < 60.0
