"""Grammars on a GPU: their steps wait for the host, and emit what plain decoding emits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from stridelm.verify import RULES
from support.checks.grammar import GRAMMARS, check_grammar, check_rule
from support.doubles.stand import Stand
from support.doubles.tree_drafter import registered
from support.gpu import NEEDS_GPU

pytestmark = NEEDS_GPU
pytest.importorskip("llguidance")


@pytest.fixture(scope="module", autouse=True)
def _trees() -> Iterator[None]:
    with registered():
        yield


@pytest.fixture(scope="module")
def stand(speaking: Path) -> Stand:
    return Stand(speaking, "bfloat16", "cuda", options={"skip_tokenizer_init": False})


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", GRAMMARS)
def test_identity(stand: Stand, name: str, temperature: float) -> None:
    check_grammar(stand, name, temperature)


@pytest.mark.parametrize("rule", [rule for rule in RULES if not RULES.get(rule).simulated])
def test_every_rule(stand: Stand, rule: str) -> None:
    check_rule(stand, "choice", rule)
