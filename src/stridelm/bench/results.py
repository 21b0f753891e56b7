"""Results on disk: one line of JSON per run of a benchmark, so that all runs of a machine fit into one file.

A line names the benchmark, its settings, its results and, last, the environment. Results are mostly rows, and rows are
mostly names and values that all of them share. So a list of rows is stored as a table:

    {"same": {name: value that all rows share}, "columns": [the other names], "rows": [[their values], ..]}

A name that a row lacks is null there. Fractions are rounded to six digits, more than any measurement reproduces. What
the settings of a run do not show can be added by hand as its "note".
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stridelm.bench.environment import environment
from stridelm.bench.outputs import writing

DIGITS = 6
TABLE = {"same", "columns", "rows"}


def append_result(path: Path, benchmark: str, settings: Any, **results: Any) -> None:
    """Append a run to a file, which is created if it does not exist. settings: a dataclass.

    Raises ValueError if the file cannot be written.
    """
    record = {"benchmark": benchmark, "settings": asdict(settings), **results, "environment": environment()}
    with writing(path), path.open("a", encoding="utf-8") as file:
        file.write(as_line(record))


def read_results(path: Path) -> list[dict[str, Any]]:
    """The runs in a file, oldest first, with their rows as dictionaries.

    Raises ValueError if the file cannot be read, or if a line is not a run.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    return [_run(line, f"{path}, line {number}") for number, line in enumerate(lines, start=1)]


def as_line(record: Mapping[str, Any]) -> str:
    """A run as it is stored, including the line end."""
    stored = {name: _table(value) if _is_rows(value) else value for name, value in _rounded(record).items()}
    return json.dumps(stored, separators=(",", ":")) + "\n"


def _run(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not a line of JSON ({error.msg}); stride bench --json writes such files") from error
    if not isinstance(record, dict) or "benchmark" not in record:
        raise ValueError(f"{where}: not a run of a benchmark; stride bench --json writes such files")
    return {name: _rows(value) if _is_table(value) else value for name, value in record.items()}


def _table(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = [name for name in names if len({_value_text(row, name) for row in rows}) > 1]
    same = {name: rows[0][name] for name in names if name not in columns}
    return {"same": same, "columns": columns, "rows": [[row.get(name) for name in columns] for row in rows]}


def _value_text(row: Mapping[str, Any], name: str) -> str:
    """A row's value of a name as JSON, "" if it has none: 1, 1.0 and True are equal values but different texts."""
    return json.dumps(row[name]) if name in row else ""


def _rows(table: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{**table["same"], **dict(zip(table["columns"], row, strict=True))} for row in table["rows"]]


def _is_rows(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, dict) for row in value)


def _is_table(value: Any) -> bool:
    return isinstance(value, dict) and set(value) == TABLE


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, Mapping):
        return {name: _rounded(one) for name, one in value.items()}
    return [_rounded(one) for one in value] if isinstance(value, list | tuple) else value
