"""Memory on a GPU: no request touches a page of another. Small enough to run under compute-sanitizer:

compute-sanitizer --tool memcheck python -m pytest -q -p no:cacheprovider tests/gpu/test_gpu_memory.py
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.doubles.poison import KINDS, POOL, check_pages, requests
from support.doubles.stand import Stand
from support.gpu import NEEDS_GPU

pytestmark = NEEDS_GPU


@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("kinds", [*([kind] for kind in KINDS), KINDS], ids=lambda kinds: str(len(kinds)))
def test_unheld_pages_are_left_alone(
    checkpoint: Callable[..., Path], kinds: list[dict[str, Any]], enforce_eager: bool
) -> None:
    """Padding, finished and aborted requests and steps in flight neither write nor read pages that no request holds."""
    stand = Stand(checkpoint("qwen3", tie_word_embeddings=True), "bfloat16", "cuda")
    poisoned, clean = (stand.llm(**POOL, enforce_eager=enforce_eager).engine for _ in range(2))
    assert check_pages(poisoned, clean, requests(stand, kinds)) > 100
