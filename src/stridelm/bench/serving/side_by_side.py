"""Two recorded runs side by side, of a sweep, of one load, or of a simulation: the cells that both have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stridelm.bench.results import read_results
from stridelm.bench.serving.document import Document, Table
from stridelm.bench.serving.report import NONE, number

KINDS = ("serving", "sweep", "simulate")
Cells = Mapping[tuple[str, str, str], Mapping[str, Any]]
"""(scenario, load, decoding) -> row."""
COMPARED = (("tokens/s", ("tokens_per_s",)), ("TTFT p50", ("ttft_ms", "p50")), ("TPOT p50", ("tpot_ms", "p50")))


def side_by_side(first: Path, second: Path) -> Document:
    """The second run's figures over the first's. Raises ValueError for a file without such a run, or if the two have
    no cell in common."""
    runs = [_run(path) for path in (first, second)]
    cells = _matched(*(run["rows"] for run in runs))
    if not cells:
        raise ValueError(f"{first} and {second} have no load and decoding in common; measure the same ones in both")
    columns = [("scenario", False), ("load", False), ("decoding", False), ("tokens/step", True)]
    columns += [(f"{name}, {what}", True) for name, _ in COMPARED for what in ("first", "second", "ratio")]
    rows = [[*key, f"{_step(one)} / {_step(other)}", *_figures(one, other)] for key, one, other in cells]
    about = [
        (f"{place}, {name}", str(value))
        for place, path, run in (("first", first, runs[0]), ("second", second, runs[1]))
        for name, value in {"file": f"{path} (stride {run['benchmark']})", **run.get("target", {})}.items()
    ]
    notes = ["ratio: the second over the first. Times in milliseconds"]
    return Document(f"{first} and {second}", about, [Table("", columns, rows)], notes)


def _run(path: Path) -> dict[str, Any]:
    found = [run for run in read_results(path) if run["benchmark"] in KINDS]
    if not found:
        raise ValueError(f"{path} has no run of {', '.join(KINDS)}; stride bench sweep --json writes such a file")
    return found[-1]


def _matched(
    first: Sequence[Mapping[str, Any]], second: Sequence[Mapping[str, Any]]
) -> list[tuple[tuple[str, str, str], Mapping[str, Any], Mapping[str, Any]]]:
    """Rows of the same scenario, load and decoding; if each run has a single scenario, its name may differ."""
    one, other = ({(row["scenario"], row["load"], row["label"]): row for row in rows} for rows in (first, second))
    names = [{scenario for scenario, _, _ in cells} for cells in (one, other)]
    if all(len(each) == 1 for each in names):
        other = {(*names[0], load, label): row for (_, load, label), row in other.items()}
    return [(key, row, other[key]) for key, row in one.items() if key in other]


def _figures(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    texts = []
    for _, path in COMPARED:
        values = [_value(row, path) for row in (one, other)]
        ratio = values[1] / values[0] if values[0] and values[1] else None
        texts += [NONE if value is None else f"{value:,.1f}" for value in values]
        texts.append(NONE if ratio is None else f"{ratio:.2f}x")
    return texts


def _value(row: Mapping[str, Any], path: Sequence[str]) -> float | None:
    value: Any = row
    for name in path:
        value = value[name]
    return None if value is None else float(value)


def _step(row: Mapping[str, Any]) -> str:
    return number(row.get("tokens_per_step"))
