"""Fixtures shared by all test folders."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from support.checkpoints.models import write
from support.checkpoints.speaking import write_speaking
from support.doubles import interpreter
from support.doubles.processes import default_signals

pytest_plugins = ["support.quick"]

settings.register_profile("stride", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("stride")
torch.set_num_threads(1)  # the models are tiny, and the test processes share the cores


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip = pytest.mark.skip(reason="to run kernels on a CPU, set TRITON_INTERPRET=1 before the process starts")
    for item in items:
        if not interpreter.ON and item.get_closest_marker("interpreted"):
            item.add_marker(skip)


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # full collections, each of which takes a third of a second otherwise, do not scan what was imported


@pytest.fixture(scope="session", autouse=True)
def _default_signals() -> Iterator[None]:
    """What a test starts can be interrupted, even if the suite runs as a background job."""
    with default_signals():
        yield


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """checkpoint("qwen3", **changes): the directory of a tiny random checkpoint, written once per session."""
    written: dict[str, Path] = {}

    def get(model_type: str, **options: Any) -> Path:
        key = repr((model_type, sorted(options.items())))
        if key not in written:
            written[key] = write(tmp_path_factory.mktemp(model_type), model_type, **options)
        return written[key]

    return get


@pytest.fixture(scope="session")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_speaking(tmp_path_factory.mktemp("speaking"))


@pytest.fixture(scope="module")
def triton_modes() -> Iterator[None]:
    """The Triton attention backend in each of its modes, under a name of its own."""
    from support.checks.paged_attention import modes_registered  # where triton is installed

    with modes_registered():
        yield
