"""The kernel that lays a step's rows, run by Triton's interpreter: against its torch twin."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from support.layout_kernel import check_layout

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="kernels run on a CPU if TRITON_INTERPRET=1 is set from the start"
)


@pytest.mark.parametrize("width", [0, 1, 5, 64])
def test_layout(width: int) -> None:
    for seed in range(4):
        check_layout(seed, width, "cpu")
