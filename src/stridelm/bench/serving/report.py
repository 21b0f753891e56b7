"""The cells of a run as a document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stridelm.bench.environment import environment
from stridelm.bench.report import LOSSY, SIMULATED
from stridelm.bench.serving.cells import Cell
from stridelm.bench.serving.document import Document, Table
from stridelm.bench.serving.figures import Figures, Percentiles, Ratio
from stridelm.bench.serving.settings import Requests

CACHES = {
    "cold": "flushed before every run",
    "warm": "never flushed; every prompt was sent before",
    "off": "disabled",
}
NONE = "-"
DEFINITIONS = (
    "TTFT: from sending a request (in process: from its arrival) to its first event with tokens. ITL: between events",
    "TPOT: from its first event to its last, over its tokens but one. Latency: from sending to its last event",
    "Times in milliseconds: p50 / p95 / p99 over the requests of all runs. Rates: the median run's",
)
OVER_PLAIN = (
    "over plain: of runs of the same turn, median (range). Speed: tokens/s. Pace: TPOT, since arrivals decide the speed"
)
OVER_BEST = (
    "over best fixed: of the same runs, over the fastest of plain decoding and this drafter at the depths measured here"
)


def serving_document(
    cells: Sequence[Cell], settings: Requests, about: Mapping[str, str], title: str, ignore_eos: bool
) -> Document:
    """about: the target's."""
    goodput = any(cell.figures.goodput is not None for cell in cells)
    busy = any(cell.figures.client_busy is not None for cell in cells)
    columns = [("scenario", False), ("load", False), ("decoding", False)]
    columns += [*ratio_columns(cells), ("same output", False), *figure_columns(goodput, busy)]
    rows = [
        [cell.scenario, cell.load, cell.label, *ratio_texts(cell, cells), _sameness(cell, settings)]
        + figure_texts(cell.figures, goodput, busy)
        for cell in cells
    ]
    notes = [*DEFINITIONS, OVER_PLAIN, *best_notes(cells), *figure_notes(goodput, busy), *warnings(cells)]
    return Document(title, about_run(settings, about, ignore_eos), [Table("", columns, rows)], notes)


def ratio_columns(cells: Sequence[Cell]) -> list[tuple[str, bool]]:
    """Columns for `ratio_texts`; that of `Cell.over_best` is left out if no cell has it."""
    names = ["speed over plain", *["speed over best fixed"] * _has_best(cells), "pace over plain"]
    return [(name, True) for name in names]


def ratio_texts(cell: Cell, cells: Sequence[Cell]) -> list[str]:
    """cells: all of the table."""
    return list(map(ratio, (cell.speed, *[cell.over_best] * _has_best(cells), cell.pace)))


def best_notes(cells: Sequence[Cell]) -> list[str]:
    return [OVER_BEST] * _has_best(cells)


def _has_best(cells: Sequence[Cell]) -> bool:
    return any(cell.over_best is not None for cell in cells)


def figure_columns(goodput: bool, busy: bool) -> list[tuple[str, bool]]:
    """Columns for `figure_texts`; those of what nothing has are left out."""
    names = ["tokens/s", "tokens/step", "accepted", "TTFT", "TPOT", "ITL", "latency"]
    return [(name, True) for name in (*names, *["goodput"] * goodput, "errors", *["client"] * busy)]


def figure_texts(f: Figures, goodput: bool, busy: bool) -> list[str]:
    met = NONE if f.goodput is None else f"{f.goodput:.2f} ({share(f.met_share)})"
    return [
        *(f"{f.tokens_per_s:,.1f}", number(f.tokens_per_step), share(f.accepted_share)),
        *map(times, (f.ttft_ms, f.tpot_ms, f.itl_ms, f.e2el_ms)),
        *([met] if goodput else []),
        str(f.errors),
        *([share(f.client_busy)] if busy else []),
    ]


def figure_notes(goodput: bool, busy: bool) -> list[str]:
    notes = ["goodput: requests per second that met the objective, and their share"] if goodput else []
    if busy:
        notes.append("client: share of the time for which this client computed; near 100% the client was measured")
    return notes


def about_run(settings: Requests, about: Mapping[str, str], ignore_eos: bool) -> list[tuple[str, str]]:
    """What was measured, how and where."""
    here = environment()
    count = settings.num_prompts
    dropped = " or ".join(str(n) for n in sorted({settings.warm_up(load) for load in settings.loads}))
    return [
        *about.items(),
        (
            "requests",
            f"{count} per run, in the order of seed {settings.seed}; {dropped} before them, dropped",
        ),
        *([("outputs", f"up to {settings.range_ratio:.0%} shorter or longer")] if settings.range_ratio else []),
        ("runs", f"{settings.repeats} of each kind, in turn, each turn beginning with another"),
        (
            "sampling",
            f"temperature {settings.temperature:g}, {'ignoring' if ignore_eos else 'stopping at'} end of text",
        ),
        ("prefix cache", CACHES[settings.prefix_cache]),
        ("client", f"stridelm {here['stridelm']}, {here['cpu']}, {here['cores']} cores, {here['time']}"),
    ]


def warnings(cells: Sequence[Any]) -> list[str]:
    """About outputs that are not the model's. cells: with `lossless` and `simulated`."""
    lossy = [LOSSY] if any(cell.lossless is False for cell in cells) else []
    return [*lossy, SIMULATED] if any(cell.simulated for cell in cells) else lossy


def times(percentiles: Percentiles) -> str:
    values = (percentiles.p50, percentiles.p95, percentiles.p99)
    return NONE if None in values else " / ".join(_ms(value) for value in values if value is not None)


def _ms(value: float) -> str:
    """Three digits or more."""
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def ratio(of: Ratio | None) -> str:
    return NONE if of is None else f"{of.median:.2f}x ({of.low:.2f} to {of.high:.2f})"


def number(value: float | None) -> str:
    return NONE if value is None else f"{value:.2f}"


def share(value: float | None) -> str:
    return NONE if value is None else f"{value:.0%}"


def _sameness(cell: Cell, settings: Requests) -> str:
    if cell.identical_outputs is None:
        return NONE
    if cell.identical is None:
        return f"{cell.identical_outputs} of {settings.num_prompts}"
    return "yes" if cell.identical else f"NO: {cell.identical_outputs} of {settings.num_prompts}"
