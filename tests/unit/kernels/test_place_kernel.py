"""The kernels that place a head's rows, run by Triton's interpreter: against their torch twins."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from support.checks.place_kernel import check_place, check_sources
from support.doubles.interpreter import INTERPRETED

pytestmark = INTERPRETED


def test_place() -> None:
    for seed in range(12):
        check_place(seed, "cpu")


def test_sources() -> None:
    for seed in range(12):
        check_sources(seed, "cpu")
