"""The prompt lookup kernels, run by Triton's interpreter: against their torch twin."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from stridelm.kernels.triton_step import TritonStepOps
from support.checks.lookup_kernel import check_lookup
from support.doubles.interpreter import INTERPRETED

pytestmark = INTERPRETED


def test_lookup() -> None:
    for seed in range(40):
        check_lookup(seed, "cpu", TritonStepOps())


def test_long_texts() -> None:
    """Several programs search one text."""
    for seed in range(3):
        check_lookup(seed, "cpu", TritonStepOps(), longest_text=2500)
