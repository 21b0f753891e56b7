"""Table and chart of a load's times, for live_load.py and http_load.py."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from rich.table import Table

from stridelm.bench.looks import SERIES


class Row(Protocol):
    """A load's times in milliseconds (load_times.Times), and what it was."""

    @property
    def name(self) -> str: ...
    @property
    def load(self) -> str: ...
    @property
    def requests(self) -> int: ...
    @property
    def tokens_per_s(self) -> float: ...
    @property
    def first_p50(self) -> float | None: ...
    @property
    def first_p99(self) -> float | None: ...
    @property
    def event_p50(self) -> float | None: ...
    @property
    def event_p99(self) -> float | None: ...
    @property
    def token_mean(self) -> float | None: ...
    @property
    def token_p99(self) -> float | None: ...


TIMES = ("first_p50", "first_p99", "event_p50", "event_p99", "token_mean", "token_p99")


def as_table(rows: Sequence[Row], more: Mapping[str, Sequence[str]]) -> Table:
    """more: further columns, with a text for each row."""
    table = Table()
    times = ("first p50", "p99", "event p50", "p99", "token mean", "p99")
    for column in ("", "load", "requests", "tokens/s", *times, *more):
        table.add_column(column, justify="right")
    for at, row in enumerate(rows):
        shown = [_text(getattr(row, name)) for name in TIMES]
        others = [column[at] for column in more.values()]
        table.add_row(row.name, row.load, str(row.requests), f"{row.tokens_per_s:,.0f}", *shown, *others)
    return table


def plot(rows: Sequence[Row], path: Path) -> None:
    """Over the loads, above: time to the first token, p50 and, dashed, p99. Below: between events, p50 and p99."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(row.name for row in rows))
    lines = {name: _numbered([row for row in rows if row.name == name]) for name in names}
    loads = list(dict.fromkeys(load for line in lines.values() for load in line))
    figure = Figure(figsize=(7.5, 6.4), layout="constrained")
    panels = figure.subplots(2, 1)
    for axes, part, title in zip(panels, ("first", "event"), ("to the first token", "between events")):
        for colour, (name, line) in zip(itertools.cycle(SERIES), lines.items()):
            places = [loads.index(load) for load in line]
            for percent, style in (("p50", "-"), ("p99", "--")):
                times = [getattr(row, f"{part}_{percent}") for row in line.values()]
                axes.plot(places, times, style, marker="o", markersize=4, color=colour, label=f"{name}, {percent}")
        axes.set_ylabel(f"ms {title}")
        axes.set_yscale("log")
        axes.set_xticks(range(len(loads)), loads)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].legend(frameon=False, fontsize=8, ncols=2)
    panels[1].set_xlabel("load")
    figure.savefig(path, dpi=160)


def _numbered(rows: Sequence[Row]) -> dict[str, Row]:
    """By load; the second time that the same one was served it is numbered."""
    found: dict[str, Row] = {}
    for row in rows:
        before = sum(other.load == row.load for other in found.values())
        found[f"{row.load} ({before + 1})" if before else row.load] = row
    return found


def _text(ms: float | None) -> str:
    return "-" if ms is None else f"{ms:.1f}"
