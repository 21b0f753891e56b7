"""Which tests `--quick` runs: of each parametrised test enough cases to show every value of every parameter.

`tests/quick.txt` lists what would take too long even so, as found by tools/quick_tests.py: a test's name and how many
of those cases run, 0 for none. `--rest` runs what `--quick` leaves out. For that tool JUnit's report has the seconds of
each fixture that tests share, as properties of the test that happened to set it up.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Hashable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

LIMITS = Path(__file__).parents[1] / "quick.txt"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("stride").addoption
    group("--quick", action="store_true", help="fewer cases of parametrised tests, and no long ones (tests/quick.txt)")
    group("--rest", action="store_true", help="only what --quick leaves out")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    quick, rest = config.getoption("--quick"), config.getoption("--rest")
    if not quick and not rest:
        return
    if quick and rest:
        raise pytest.UsageError("--quick and --rest exclude each other: leave both out to run everything")
    chosen = set(choose(items, read_limits(LIMITS)))
    left_out = [item for item in items if (item.nodeid in chosen) == rest]
    items[:] = [item for item in items if (item.nodeid in chosen) == quick]
    config.hook.pytest_deselected(items=left_out)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any], request: Any) -> Generator[None, object, object]:
    began = time.perf_counter()
    value = yield
    item = request._pyfuncitem
    if fixturedef.scope != "function":
        item.user_properties.append((fixture_name(fixturedef), time.perf_counter() - began))
    return value


def fixture_name(fixture: pytest.FixtureDef[Any]) -> str:
    """The same for all tests that share it."""
    return f"{fixture.baseid}::{fixture.argname}"


def choose(items: Iterable[pytest.Item], limits: dict[str, int]) -> list[str]:
    """Node ids of the quick tests."""
    by_test: dict[str, list[pytest.Item]] = {}
    for item in items:
        by_test.setdefault(name_of(item.nodeid), []).append(item)
    chosen = []
    for test, cases in by_test.items():
        covering = cover([parts(case) for case in cases])
        chosen += [cases[number].nodeid for number in covering[: limits.get(test, len(covering))]]
    return chosen


def cover(cases: Sequence[Sequence[Hashable]]) -> list[int]:
    """Numbers of few cases that have every value of every parameter, those first that have most values not seen."""
    wanted = {value for case in cases for value in enumerate(case)}
    left, picked = list(range(len(cases))), []
    while wanted:
        best = max(left, key=lambda number: len(wanted.intersection(enumerate(cases[number]))))
        wanted.difference_update(enumerate(cases[best]))
        left.remove(best)
        picked.append(best)
    return picked or [0]


def parts(item: pytest.Item) -> list[str]:
    """The ids of a case's parameters, one of each `parametrize`; empty if there is none."""
    spec = getattr(item, "callspec", None)
    return [] if spec is None else list(spec._idlist)


def name_of(nodeid: str) -> str:
    """The node id without its case: "tests/laws/test_x.py::test_y[a-1]" -> "tests/laws/test_x.py::test_y"."""
    return nodeid.partition("[")[0]


def read_limits(path: Path) -> dict[str, int]:
    """Test -> number of its cases. Each line has both; `#` begins a comment."""
    lines = [line.partition("#")[0].split() for line in path.read_text(encoding="utf-8").splitlines()]
    return {line[0]: int(line[1]) for line in lines if line}
