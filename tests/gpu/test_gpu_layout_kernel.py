"""The kernel that lays a step's rows, on a GPU."""

from __future__ import annotations

import pytest

from support.gpu import NEEDS_GPU

pytest.importorskip("triton", reason="triton is not installed")

from support.layout_kernel import check_layout

pytestmark = NEEDS_GPU


@pytest.mark.parametrize("width", [0, 1, 5, 64])
def test_layout(width: int) -> None:
    for seed in range(20):
        check_layout(seed, width, "cuda")
