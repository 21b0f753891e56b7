"""Threads that share the work of one compiled call."""

from __future__ import annotations

import numba as nb
import numpy as np
import pytest
import torch

from stridelm.kernels.host.arithmetic import follow_torch
from stridelm.kernels.host.team import COUNTERS, tasks_of

PHASES = 200


@nb.njit(parallel=True)
def sums_before(threads, tasks, team, out):  # type: ignore[no-untyped-def]
    """Each number is one more than the sum of the row before it, which other threads may have written."""
    for _ in nb.prange(threads):
        for phase in range(len(out) - 1):
            for task in tasks_of(team, phase, tasks):
                out[phase + 1, task] = (out[phase].sum() + 1) % 1000003


@pytest.mark.parametrize("tasks", [1, 2, 7, 100])
@pytest.mark.parametrize(("started", "meant"), [(1, 1), (2, 2), (1, 3), (3, 2)], ids=str)
def test_phases(tasks: int, started: int, meant: int) -> None:
    """Each phase sees all that the phase before it wrote; also if fewer threads run than were meant to, or one comes
    when all is done."""
    out, team = np.zeros((PHASES + 1, tasks), np.int64), (meant, np.zeros((PHASES, COUNTERS), np.int64))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        follow_torch()
        sums_before(started, tasks, team, out)
    finally:
        torch.set_num_threads(threads)
        follow_torch()
    expected = 0
    for row in out[1:]:
        expected = (expected * tasks + 1) % 1000003
        assert (row == expected).all()
