"""Writes tests/quick.txt: which tests `make test` shortens or leaves to `make test-rest`, from recorded durations.

    make test-all ARGS=--junitxml=times.xml
    python tools/quick_tests.py times.xml --minutes 6

One rule: no test function takes longer than a limit, and a law or oracle no longer than --weight times that; the limit
is the highest with which all of them end in --minutes on --jobs processes. A function over its limit runs fewer of the
cases that show its parameters' values, or none. What a fixture of several functions takes is shared out among these.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from statistics import median
from xml.etree import ElementTree

import pytest

TESTS = Path(__file__).parents[1] / "tests"
sys.path.insert(0, str(TESTS))

from support.quick import LIMITS, cover, fixture_name, name_of, parts  # noqa: E402, now it is known where they are

WEIGHTED = ("tests/laws/", "tests/oracle/")


@dataclass
class Durations:
    """In seconds."""

    cases: dict[str, float] = field(default_factory=dict)
    """Case -> without fixtures that others may share; of several recordings the shortest."""
    fixtures: dict[str, float] = field(default_factory=dict)

    def read(self, path: str) -> None:
        for case in ElementTree.parse(path).getroot().iter("testcase"):
            name = f"{case.attrib['classname'].replace('.', '/')}.py::{case.attrib['name']}"
            taken = float(case.attrib["time"])
            for one in case.iter("property"):
                seconds = float(one.attrib["value"])
                taken -= seconds
                self.fixtures[one.attrib["name"]] = max(seconds, self.fixtures.get(one.attrib["name"], 0.0))
            self.cases[name] = max(0.0, min(taken, self.cases.get(name, taken)))


@dataclass
class Test:
    """A test function."""

    cases: list[str] = field(default_factory=list)
    parts: list[list[str]] = field(default_factory=list)
    fixtures: set[str] = field(default_factory=set)
    """Those that other functions may share."""
    seconds: list[float] = field(default_factory=list)
    """Of each case that `--quick` may run, in the order in which they are kept, with the shares of its fixtures."""

    def time(self, durations: Durations, users: Counter[str]) -> bool:
        """Find `seconds`. Returns whether any of its cases was recorded. A case takes at most twice what most of the
        function's do: the first to run may make what the others only use."""
        known = [durations.cases[case] for case in self.cases if case in durations.cases]
        usual = median(known) if known else 0.0
        chosen = [self.cases[number] for number in cover(self.parts)]
        self.seconds = [min(durations.cases.get(case, usual), 2 * usual) for case in chosen]
        self.seconds[0] += sum(durations.fixtures.get(name, 0.0) / users[name] for name in self.fixtures)
        return bool(known)

    def within(self, limit_s: float) -> int:
        """The number of cases that take no longer."""
        number, total = 0, 0.0
        while number < len(self.seconds) and total + self.seconds[number] <= limit_s:
            total += self.seconds[number]
            number += 1
        return number


class Collected:
    """As a pytest plugin."""

    def __init__(self) -> None:
        self.tests: defaultdict[str, Test] = defaultdict(Test)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            test = self.tests[name_of(item.nodeid)]
            test.cases.append(item.nodeid)
            test.parts.append(parts(item))
            fixtures = item._fixtureinfo.name2fixturedefs  # type: ignore[attr-defined]
            test.fixtures |= {fixture_name(each[-1]) for each in fixtures.values() if each[-1].scope != "function"}


def kept(tests: dict[str, Test], limit_s: float, weight: float) -> dict[str, int]:
    return {name: t.within(limit_s * (weight if name.startswith(WEIGHTED) else 1.0)) for name, t in tests.items()}


def highest_limit(tests: dict[str, Test], budget_s: float, weight: float) -> float:
    """The seconds that a function may take for all to fit into the budget."""
    low, high = 0.0, budget_s
    for _ in range(40):
        middle = (low + high) / 2
        total = sum(sum(tests[name].seconds[:number]) for name, number in kept(tests, middle, weight).items())
        low, high = (middle, high) if total <= budget_s else (low, middle)
    return low


def collected() -> dict[str, Test]:
    os.environ["TRITON_INTERPRET"] = "1"
    plugin = Collected()
    with redirect_stdout(StringIO()):
        pytest.main(["--collect-only", str(TESTS)], plugins=[plugin])
    return dict(plugin.tests)


def written(options: str, limit_s: float, weight: float, cut: Iterable[tuple[str, int]]) -> str:
    about = f"# python tools/quick_tests.py {options}: {limit_s:.2f} s a test, laws and oracles {weight:g} times that\n"
    return about + "".join(f"{name} {number}\n" for name, number in cut)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("times", nargs="+", help="JUnit files of one machine")
    parser.add_argument("--minutes", type=float, default=6, help="for collecting and running")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--collecting", type=float, default=60, help="seconds until the first test runs")
    parser.add_argument("--weight", type=float, default=4, help="how much longer a law or oracle may take")
    args = parser.parse_args()
    durations = Durations()
    for path in args.times:
        durations.read(path)
    tests = collected()
    users = Counter(name for test in tests.values() for name in test.fixtures)
    unknown = sum([not test.time(durations, users) for test in tests.values()])
    limit_s = highest_limit(tests, args.jobs * (60 * args.minutes - args.collecting), args.weight)
    cut = {name: n for name, n in kept(tests, limit_s, args.weight).items() if n < len(tests[name].seconds)}
    options = f"--minutes {args.minutes:g} --jobs {args.jobs}"
    LIMITS.write_text(written(options, limit_s, args.weight, sorted(cut.items())), encoding="utf-8")
    none = sum(not number for number in cut.values())
    print(f"{len(tests)} tests: {len(cut) - none} with fewer cases, {none} left out, {unknown} of unknown duration")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
