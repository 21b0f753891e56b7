"""A comparison as a document, and its charts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from stridelm.bench.looks import MARKERS, SERIES
from stridelm.bench.plot import new_figure, svg_of
from stridelm.bench.serving.compare import Comparison
from stridelm.bench.serving.document import Document, Table
from stridelm.bench.serving.quality import CUT_LINES
from stridelm.bench.serving.report import (
    DEFINITIONS,
    NONE,
    about_run,
    figure_columns,
    figure_notes,
    figure_texts,
    number,
    ratio,
    share,
    warnings,
)
from stridelm.bench.serving.settings import CompareSettings


def comparison_document(found: Comparison, settings: CompareSettings, about: Mapping[str, str]) -> Document:
    """about: the targets'."""
    goodput = bool(settings.slo)
    busy = any(each.figures.client_busy is not None for each in found.contenders)
    columns = [("", False), ("target", False), ("decoding", False), *figure_columns(goodput, busy)]
    speeds = [
        [place, each.target, each.label, *figure_texts(each.figures, goodput, busy)]
        for place, each in zip(("first", "second"), found.contenders)
    ]
    notes = [
        *DEFINITIONS,
        "over the first: of paired runs in alternation, median (range). Speed: tokens/s. Pace: TPOT",
        *figure_notes(goodput, busy),
    ]
    if found.first.loss is not None:
        notes.append("loss: of the output's tokens under the first target's plain decoding, in nats per token")
    if found.first.parse_share is not None:
        notes.append(
            "valid Python: outputs that parse with their prompts; of one that the limit cut, without its last line and "
            f"up to {CUT_LINES} lines of an unfinished statement"
        )
    [load] = settings.loads
    run = [("scenario", settings.scenario), ("load", load.name), *about_run(settings, about, settings.ignore_eos)]
    tables = [Table("Speed", columns, speeds), Table("Outputs", *_outputs(found))]
    title = f"stride bench compare: {found.first.name}; {found.second.name}"
    return Document(title, run, tables, [*notes, *warnings(found.contenders)])


def comparison_charts(found: Comparison) -> list[Callable[[], str]]:
    """Functions that draw a chart each, as an SVG element."""
    return [partial(_rates, found), partial(_surviving, found)]


def _outputs(found: Comparison) -> tuple[list[tuple[str, bool]], list[list[str]]]:
    d = found.divergence
    nearest = min(d.positions, default=None)
    rows = [
        ["speed, second over first", ratio(found.speed)],
        ["pace, second over first", ratio(found.pace)],
        ["identical outputs", f"{'NO: ' if found.broken else ''}{d.identical} of {d.outputs}"],
        [f"first divergence, {d.unit}: median", number(d.median)],
        [f"first divergence, {d.unit}: earliest", NONE if nearest is None else str(nearest)],
    ]
    for place, each in zip(("first", "second"), found.contenders):
        if each.loss is not None:
            rows.append([f"loss, {place}", f"{each.loss:.4f}"])
    for place, each in zip(("first", "second"), found.contenders):
        if each.parse_share is not None:
            rows.append([f"valid Python, {place}", share(each.parse_share)])
    return [("", False), ("", True)], rows


def _rates(found: Comparison) -> str:
    figure, (axes,) = new_figure(1, width=5.5)
    for place, each in enumerate(found.contenders):
        look = {"color": SERIES[place], "marker": MARKERS[place + 1], "markersize": 4, "label": each.name}
        axes.plot(range(1, len(each.rates) + 1), each.rates, **look)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("round")
    axes.set_ylabel("tokens/s")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8)
    return svg_of(figure)


def _surviving(found: Comparison) -> str:
    figure, (axes,) = new_figure(1, width=5.5)
    curve = found.divergence.surviving()
    axes.step([place for place, _ in curve], [left for _, left in curve], where="post", color=SERIES[0])
    axes.set_xlabel(f"position in the output, {found.divergence.unit}")
    axes.set_ylabel("outputs that are still the same")
    axes.set_ylim(-0.03, 1.03)
    return svg_of(figure)
