"""An engine with every drafter, on a tiny random model, and prompts short enough for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from stridelm.bench.prompts import Prompt, PromptSet
from stridelm.bench.stand import open_engine
from stridelm.engine.engine import Engine

MASK_ID = 1
STREAMS = 2


@pytest.fixture
def engine(speaking: Path) -> Engine:
    """Room for two streams, no prefix cache, and a mask token."""
    return open_engine(str(speaking), STREAMS, mask_token_id=MASK_ID, num_pages=64)


@pytest.fixture
def prompts() -> PromptSet:
    texts = ("def main(argv):", "for name in names:", "    return sum(")
    return PromptSet("three lines", tuple(Prompt(f"line {i}", text) for i, text in enumerate(texts)))
