"""Results on disk: what is written can be read again, and so can the runs that the documentation cites."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import stridelm
from stridelm.bench.results import append_result, as_line, read_results

SHIPPED = Path(stridelm.__path__[0]).parents[1] / "benchmarks" / "results"
NAMES = st.sampled_from(["streams", "label", "ratio", "ttft_s"])
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.sampled_from([0.0, 1.0, 0.25, 123456.0]),
    st.text(max_size=3),
    st.fixed_dictionaries({"p50": st.sampled_from([0.5, None])}),
)


@dataclass(frozen=True)
class Settings:
    batch: tuple[int, ...] = (1, 4)


def read_line(tmp_path: Path, line: str) -> Any:
    path = tmp_path / "machine.jsonl"
    path.write_text(line, encoding="utf-8")
    return read_results(path)


@given(rows=st.lists(st.dictionaries(NAMES, VALUES), max_size=4))
def test_rows_come_back_as_they_were(rows: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> None:
    """Values and their types; a name that a row lacks is None if another row has it."""
    [run] = read_line(tmp_path_factory.mktemp("results"), as_line({"benchmark": "any", "rows": rows}))
    names = {name for row in rows for name in row}
    whole = [{name: row.get(name) for name in sorted(names)} for row in rows]
    assert json.dumps(run["rows"], sort_keys=True) == json.dumps(whole, sort_keys=True)


def test_runs_are_appended_a_line_each(tmp_path: Path) -> None:
    path = tmp_path / "new" / "machine.jsonl"
    for ratio in (1.5, 2.5):
        append_result(path, "latency", Settings(), rows=[{"ratio": ratio, "dtype": "bfloat16"}] * 2, best=None)
    assert len(path.read_text().splitlines()) == 2
    runs = read_results(path)
    assert [run["rows"][1] for run in runs] == [{"ratio": ratio, "dtype": "bfloat16"} for ratio in (1.5, 2.5)]
    assert list(runs[0]) == ["benchmark", "settings", "rows", "best", "environment"]
    assert runs[0]["settings"] == {"batch": [1, 4]}


def test_what_all_rows_have_in_common_is_told_once() -> None:
    rows = [{"dtype": "bfloat16", "ratio": ratio} for ratio in (1.0, 1.5)]
    assert as_line({"benchmark": "latency", "rows": rows}).count("bfloat16") == 1


def test_fractions_are_kept_to_six_digits(tmp_path: Path) -> None:
    found = [math.pi * 10**power for power in range(-6, 7)]
    [run] = read_line(tmp_path, as_line({"benchmark": "any", "found": found, "tokens": 123456789}))
    assert run["found"] == pytest.approx(found, rel=1e-5) and run["found"][6] == 3.14159
    assert run["tokens"] == 123456789


@pytest.mark.parametrize(
    ("line", "said"), [("{\n", "not a line of JSON"), ("[1]\n", "not a run"), ("{}\n", "not a run")]
)
def test_a_file_of_something_else_is_refused(tmp_path: Path, line: str, said: str) -> None:
    good = as_line({"benchmark": "any"})
    with pytest.raises(ValueError, match=f"line 2: {said}"):
        read_line(tmp_path, good + line)


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"cannot read {tmp_path}"):
        read_results(tmp_path)
    with pytest.raises(ValueError, match=f"cannot write {tmp_path}.*name another file"):
        append_result(tmp_path, "latency", Settings())


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.jsonl")), ids=lambda path: path.name)
def test_a_file_of_the_repository_is_of_one_machine(path: Path) -> None:
    """And no two of its runs are indistinguishable: benchmark, settings and note differ."""
    runs = read_results(path)
    where = {json.dumps([run["environment"][name] for name in ("cpu", "cores", "gpus")]) for run in runs}
    told = {json.dumps([run["benchmark"], run["settings"], run.get("note")]) for run in runs}
    assert len(where) == 1 and len(told) == len(runs)
