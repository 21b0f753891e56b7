"""No client stops or starves another through anything that they share."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

import stridelm
from attacks.shared import ADDRESSES, KEYS, NOT_SHARED, OPTIONS, PER_REQUEST, SHARED, Shared
from stridelm.server.config import ServerConfig
from support.doubles.server import Served, serving, settle

SERVER = Path(stridelm.__path__[0]) / "server"
TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "operations.md"
MAKERS = {
    *("FairLine", "Lane", "TimedLane", "GrammarCache", "Turns", "Deliveries"),
    *("Semaphore", "Lock", "Queue", "SimpleQueue", "deque", "OrderedDict", "ThreadPoolExecutor"),
    *("to_thread", "run_in_executor", "lru_cache"),
}
"""Calls that make, or use, something in which one may have to wait for another."""
TRIED = [shared for shared in SHARED if callable(shared.law)]


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    keys = [option for client in (*KEYS.hostile, KEYS.honest) for option in ("--api-key", str(client.key))]
    with serving(tmp_path_factory.mktemp("keyed"), *OPTIONS, *keys) as served:
        yield served
        assert served.stop() == 0, served.log.read_text(encoding="utf-8")


@pytest.mark.parametrize("shared", TRIED, ids=lambda shared: shared.name)
def test_no_key_keeps_it_from_another(keyed: Served, shared: Shared) -> None:
    """While two keys do all they can to fill it, every request of a third is served, and before most that came
    first."""
    assert callable(shared.law)
    shared.law(keyed, KEYS)
    settle(keyed, 60)


def test_no_address_keeps_it_from_another(tmp_path: Path) -> None:
    """The same of addresses, on a server without keys."""
    with serving(tmp_path, *OPTIONS) as served:
        [law] = [shared.law for shared in TRIED if shared.name == "workers for large bodies"]
        assert callable(law)
        law(served, ADDRESSES)
        settle(served, 60)
        assert served.stop() == 0, served.log.read_text(encoding="utf-8")


def test_everything_shared_is_known() -> None:
    """What clients share, in the server's code and among its options, has an entry in the registry and a row on the
    page for operators; an entry is tried here, or names the test that says it."""
    made = {str(path.relative_to(SERVER)) for path in SERVER.rglob("*.py") if MAKERS & set(_called(path))}
    known = {file for shared in SHARED for file in shared.files}
    assert made - known == set(NOT_SHARED)
    assert all((SERVER / file).is_file() for file in known)
    limits = {field.name for field in fields(ServerConfig) if field.name.startswith("max_")}
    assert limits == PER_REQUEST | {limit for shared in SHARED for limit in shared.limits}
    section = PAGE.read_text(encoding="utf-8").split("## What clients share\n")[1].split("\n## ")[0]
    assert re.findall(r"^\| (.+?) \|", section, re.MULTILINE)[1:] == [shared.name for shared in SHARED]
    for shared in SHARED:
        if isinstance(shared.law, str):
            file, _, name = shared.law.partition("::")
            assert f"def {name or 'test_'}" in (TESTS / file).read_text(encoding="utf-8")


def _called(path: Path) -> Iterator[str]:
    """The last name of everything that is called, or that decorates, in a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        functions = [node.func] if isinstance(node, ast.Call) else getattr(node, "decorator_list", [])
        for function in functions:
            function = function.value if isinstance(function, ast.Subscript) else function
            yield function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
