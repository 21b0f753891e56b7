"""The kernel that lays out a step's rows, run by Triton's interpreter: against its torch twin."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from stridelm.kernels.triton_step import TritonStepOps
from support.checks.layout_kernel import check_layout
from support.doubles.interpreter import INTERPRETED

pytestmark = INTERPRETED


@pytest.mark.parametrize("width", [0, 1, 5, 64])
def test_layout(width: int) -> None:
    for seed in range(4):
        check_layout(seed, width, "cpu", TritonStepOps())
