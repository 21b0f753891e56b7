"""The check of page indices when the device looks up its own pages: no step is captured, and no bad index is used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.checks.identity import check_identity, mixed_jobs
from support.checks.trap import WRONG_PAGES, check_names_the_entry, engine_of
from support.doubles.stand import Stand
from support.doubles.tree_drafter import registered
from support.gpu import NEEDS_GPU

pytestmark = NEEDS_GPU


@pytest.fixture(scope="module", autouse=True)
def _trees() -> Iterator[None]:
    with registered():
        yield


@pytest.fixture(scope="module")
def stand(checkpoint: Callable[..., Path]) -> Stand:
    return Stand(checkpoint("qwen3", tie_word_embeddings=True), "float32", "cuda")


@pytest.mark.parametrize("page", WRONG_PAGES)
@pytest.mark.parametrize("where", ["ledger", "device"])
def test_names_the_entry(stand: Stand, where: str, page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device also stays usable, which it would not after an illegal access."""
    check_names_the_entry(stand, "auto", where, page, monkeypatch)


def test_healthy(stand: Stand) -> None:
    llm = engine_of(stand, "auto")
    assert llm.engine.capture is None
    check_identity(stand, mixed_jobs(stand, 8, 0.7, ["nothing", "repetition_penalty", "samples"], seed=4), llm=llm)
