"""One server for all attacks, with options that give the attacks a chance to work."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from support.checks.lag import WATCHED_SITE
from support.doubles.server import Served, serving, settle


@pytest.fixture(scope="session")
def stormed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("stormed")
    path = os.pathsep.join(filter(None, (str(WATCHED_SITE), os.environ.get("PYTHONPATH"))))
    watch = {"PYTHONPATH": path, "LOOP_WATCH": str(directory / "loop")}
    with serving(directory, "--no-strict", "--max-queue", "2048", environment=watch) as served:
        yield served
        settle(served)
        assert served.stop() == 0, served.log.read_text(encoding="utf-8")
