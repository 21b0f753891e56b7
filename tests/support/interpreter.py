"""The mark of tests that run Triton kernels on a CPU."""

from __future__ import annotations

import os

import pytest

INTERPRETED = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="kernels run on a CPU if TRITON_INTERPRET=1 is set from the start"
)
