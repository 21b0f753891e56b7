"""The kernels that place a head's rows and set some aside, run by Triton's interpreter: against their torch twins."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from stridelm.kernels.triton_step import TritonStepOps
from support.checks.following import check_following
from support.checks.place_kernel import check_place
from support.checks.set_aside import check_set_aside
from support.checks.sources import check_sources
from support.doubles.interpreter import INTERPRETED

pytestmark = INTERPRETED


def test_place() -> None:
    for seed in range(12):
        check_place(seed, "cpu")


def test_sources() -> None:
    for seed in range(12):
        check_sources(seed, "cpu", TritonStepOps())


def test_following() -> None:
    for seed in range(12):
        check_following(seed, "cpu", TritonStepOps())


def test_set_aside() -> None:
    for seed in range(12):
        check_set_aside(seed, "cpu", TritonStepOps())
