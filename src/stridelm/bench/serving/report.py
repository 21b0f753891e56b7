"""The cells of a run as a document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stridelm.bench.environment import environment
from stridelm.bench.report import LOSSY, SIMULATED
from stridelm.bench.serving.cells import Cell
from stridelm.bench.serving.document import Document, Table
from stridelm.bench.serving.figures import Percentiles, Ratio
from stridelm.bench.serving.settings import Requests

CACHES = {
    "cold": "flushed before every run",
    "warm": "never flushed; every prompt was sent before",
    "off": "disabled",
}
NONE = "-"
DEFINITIONS = (
    "TTFT: from sending a request (in process: from its arrival) to its first event with tokens; ITL: between its "
    "events; TPOT: from its first event to its last, over its tokens but one; latency: from sending to its last event. "
    "All in milliseconds, p50 / p95 / p99 over the requests of all runs",
    "over plain: of paired runs in alternation, median (range); speed in tokens/s, pace in TPOT, where arrivals decide "
    "the speed",
)


def serving_document(
    cells: Sequence[Cell], settings: Requests, about: Mapping[str, str], title: str, ignore_eos: bool
) -> Document:
    """about: the target's."""
    goodput = any(cell.figures.goodput is not None for cell in cells)
    busy = any(cell.figures.client_busy is not None for cell in cells)
    columns = [("scenario", False), ("load", False), ("decoding", False), ("tokens/s", True)]
    columns += [("speed over plain", True), ("pace over plain", True), ("tokens/step", True), ("accepted", True)]
    columns += [("TTFT", True), ("TPOT", True), ("ITL", True), ("latency", True)]
    columns += [("goodput", True)] * goodput + [("same output", False), ("errors", True)]
    columns += [("client", True)] * busy
    rows = []
    for cell in cells:
        f = cell.figures
        row = [cell.scenario, cell.load, cell.label, f"{f.tokens_per_s:,.1f}", ratio(cell.speed), ratio(cell.pace)]
        row += [number(f.tokens_per_step), share(f.accepted_share)]
        row += [times(f.ttft_ms), times(f.tpot_ms), times(f.itl_ms), times(f.e2el_ms)]
        row += [f"{f.goodput:.2f} ({share(f.met_share)})" if f.goodput is not None else NONE] * goodput
        row += [_sameness(cell, settings), str(f.errors)]
        row += [share(f.client_busy)] * busy
        rows.append(row)
    notes = [*DEFINITIONS]
    if goodput:
        notes.append("goodput: requests per second that met the objective, and their share")
    if busy:
        notes.append("client: share of the time for which this client computed; near 100% the client was measured")
    return Document(
        title, about_run(settings, about, ignore_eos), [Table("", columns, rows)], [*notes, *warnings(cells)]
    )


def about_run(settings: Requests, about: Mapping[str, str], ignore_eos: bool) -> list[tuple[str, str]]:
    """What was measured, how and where."""
    here = environment()
    count, dropped = settings.num_prompts, settings.warm_up(settings.num_prompts)
    return [
        *about.items(),
        (
            "requests",
            f"{count} per run, in the order of seed {settings.seed}; {dropped} before them, dropped",
        ),
        ("runs", f"{settings.repeats} of each kind, in alternation"),
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
