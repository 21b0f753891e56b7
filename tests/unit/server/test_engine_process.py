"""The engine's process, as far as it can be looked at from within."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stridelm.config import EngineConfig
from stridelm.options import flat
from stridelm.server.engine_process import Loop, _load
from stridelm.server.messages import Failed, Orders, Ready


class Outlets:
    """Keeps what is sent, and how many objects collections left alone then."""

    def __init__(self) -> None:
        self.sent: list[tuple[object, int]] = []

    def send(self, frontend: str, message: object) -> None:
        self.sent.append((message, gc.get_freeze_count()))


def orders(config: EngineConfig) -> Orders:
    return Orders(flat(config), inbox="", outbox="", parent=0)


@pytest.fixture(autouse=True)
def _unfrozen() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.unfreeze()


def test_collections_leave_the_model_alone(checkpoint: Callable[..., Path]) -> None:
    """Before the first request is served: a collection over all that was loaded would delay some step by that long."""
    outlets = Outlets()
    config = EngineConfig(model=str(checkpoint("qwen3")), num_pages=8, skip_tokenizer_init=True)
    loop = _load(orders(config), None, outlets)  # type: ignore[arg-type]
    assert isinstance(loop, Loop)
    [(message, frozen)] = outlets.sent
    assert isinstance(message, Ready) and frozen > 100_000
    assert sum(isinstance(each, Loop) for each in gc.get_objects()) == 1  # what came later is collected as ever


def test_an_engine_that_cannot_be_loaded(tmp_path: Path) -> None:
    outlets = Outlets()
    config = EngineConfig(model=str(tmp_path / "nothing"))
    assert _load(orders(config), None, outlets) is None  # type: ignore[arg-type]
    [(message, frozen)] = outlets.sent
    assert isinstance(message, Failed) and message.user_error and not frozen
