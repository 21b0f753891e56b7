"""Charts of cells: a panel for each scenario, with the loads along its axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from stridelm.bench.looks import MARKERS, SERIES
from stridelm.bench.plot import INK, new_figure, svg_of
from stridelm.bench.serving.cells import Cell

ACROSS = 3
PLAIN = "plain"


Draw = Callable[[Any, Sequence[float], Sequence[Cell], dict[str, Any]], None]
"""Draws the cells of one label at these places into axes, with this look."""


def charts_of(cells: Sequence[Cell]) -> list[Callable[[], str]]:
    """Functions that draw speed over plain decoding, if that was measured, then tokens per second, TTFT and TPOT, each
    as an SVG element."""
    charts: list[tuple[str, Draw]] = [("tokens/s over plain decoding", _speed)] if any(c.speed for c in cells) else []
    charts += [("tokens/s", _rate), ("TTFT, ms: p50 to p99", _times("ttft_ms"))]
    charts += [("TPOT, ms: p50 to p99", _times("tpot_ms"))]
    return [partial(_chart, cells, label, draw) for label, draw in charts]


def _speed(axes: Any, at: Sequence[float], line: Sequence[Cell], look: dict[str, Any]) -> None:
    """Medians, with the range of the pairs."""
    ratios = [(x, cell.speed) for x, cell in zip(at, line) if cell.speed is not None]
    axes.axhline(1.0, color=INK, linewidth=1, linestyle="--")
    if ratios:
        axes.plot([x for x, _ in ratios], [ratio.median for _, ratio in ratios], **look)
    for x, ratio in ratios:
        axes.vlines(x, ratio.low, ratio.high, color=look["color"], linewidth=1)


def _rate(axes: Any, at: Sequence[float], line: Sequence[Cell], look: dict[str, Any]) -> None:
    axes.plot(at, [cell.figures.tokens_per_s for cell in line], **look)


def _times(name: str) -> Draw:
    """p50, with a whisker up to p99."""

    def draw(axes: Any, at: Sequence[float], line: Sequence[Cell], look: dict[str, Any]) -> None:
        known = [(x, getattr(cell.figures, name)) for x, cell in zip(at, line)]
        known = [(x, times) for x, times in known if times.p50 is not None]
        axes.plot([x for x, _ in known], [times.p50 for _, times in known], **look)
        for x, times in known:
            axes.vlines(x, times.p50, times.p99, color=look["color"], linewidth=1)

    return draw


def _chart(cells: Sequence[Cell], label: str, draw: Draw) -> str:
    scenarios = list(dict.fromkeys(cell.scenario for cell in cells))
    labels = list(dict.fromkeys(cell.label for cell in cells))
    across = min(ACROSS, len(scenarios))
    figure, panels = new_figure(across, width=4.5, lines=-(-len(scenarios) // across))
    for number, axes in enumerate(panels):
        if number >= len(scenarios):
            axes.set_visible(False)
            continue
        _panel(axes, [cell for cell in cells if cell.scenario == scenarios[number]], labels, draw)
        axes.set_title(scenarios[number], fontsize=9, loc="left")
        if number % across == 0:
            axes.set_ylabel(label)
    handles = {text: handle for axes in panels for handle, text in zip(*axes.get_legend_handles_labels())}
    figure.legend(handles.values(), handles.keys(), frameon=False, fontsize=8, loc="outside lower center", ncols=4)
    return svg_of(figure)


def _panel(axes: Any, cells: Sequence[Cell], labels: Sequence[str], draw: Draw) -> None:
    loads = list(dict.fromkeys(cell.load for cell in cells))
    for number, label in enumerate(labels):
        line = [cell for cell in cells if cell.label == label]
        if not line:
            continue
        colour = INK if label == PLAIN else SERIES[number % len(SERIES)]
        # Side by side, so that whiskers do not cover one another.
        shift = 0.06 * (number - (len(labels) - 1) / 2)
        look = {"color": colour, "marker": MARKERS[number % len(MARKERS)], "markersize": 4, "label": label}
        draw(axes, [loads.index(cell.load) + shift for cell in line], line, look)
    axes.set_xticks(range(len(loads)), loads, fontsize=8)
    axes.set_ylim(bottom=0)
