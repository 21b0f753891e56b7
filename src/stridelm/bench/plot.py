"""Charts of results. matplotlib is optional and is loaded only when a chart is requested."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from stridelm.bench.acceptance import ALL, AcceptanceReport, AcceptanceRow
from stridelm.bench.latency import LatencyRow
from stridelm.bench.looks import SERIES, looks_of
from stridelm.bench.outputs import writing
from stridelm.bench.repetition import BUCKETS

FORMATS = (".png", ".svg")
INK, LOSSY_HATCH = "#333333", "///"
LINES = 3
"""With at least this many depths of one way of drafting, results are drawn as lines instead of bars."""


def check_plot(path: Path) -> None:
    """Raise ValueError, before anything is measured, if a chart could not be drawn to `path`."""
    if path.suffix not in FORMATS:
        raise ValueError(f"a chart cannot be written to {path}: the name must end in {' or '.join(FORMATS)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("charts need matplotlib, which is not installed: pip install 'stridelm[plot]'")


def plot_latency(rows: Sequence[LatencyRow], path: Path) -> None:
    """Ratio to plain decoding of each variant, with a bar for each concurrency; for many depths, lines over depth
    instead, in a panel for each concurrency. Whiskers span the rounds."""
    drafting = [row for row in rows if row.label != "plain"]
    if _many_depths(drafting):
        _latency_lines(drafting, path)
        return
    labels = list(dict.fromkeys(row.label for row in drafting))
    streams = list(dict.fromkeys(row.concurrency for row in rows))
    figure, (axes,) = new_figure(1, width=1.6 + 1.1 * len(labels))
    width = 0.8 / len(streams)
    for row in drafting:
        s = streams.index(row.concurrency)
        at = labels.index(row.label) + (s - (len(streams) - 1) / 2) * width
        name = _streams(row.concurrency)
        colour = SERIES[s % len(SERIES)]
        _bar(axes, at, row.ratio, width, colour, row.lossless, name if row.label == labels[0] else None)
        axes.vlines(at, min(row.ratios), max(row.ratios), color=INK, linewidth=0.8)
    axes.axhline(1.0, color=INK, linewidth=1, linestyle="--", label="plain decoding")
    _name_bars(axes, labels, level=3)
    axes.set_ylabel("tokens per second over plain decoding")
    axes.set_ylim(top=1.25 * axes.get_ylim()[1])
    axes.legend(frameon=False, fontsize=8, ncols=len(streams) + 1)
    head = rows[0]
    lossy = "" if all(row.lossless for row in rows) else "; hatched and *: lossy"
    title = f"{Path(head.model).name}, {head.dtype}, {head.device}\n{head.prompt_set}{lossy}"
    axes.set_title(title, fontsize=8, loc="left")
    _save(figure, path)


def plot_acceptance(report: AcceptanceReport, path: Path) -> None:
    """For each temperature, tokens per step in each bucket, or for many depths those of the headline bucket over depth;
    below, the headline bucket's acceptance by position."""
    temperatures = list(dict.fromkeys(row.temperature for row in report.rows))
    families = looks_of(report.rows, _family) if _many_depths(report.rows) else {}
    count = 4 if families else len(dict.fromkeys(row.label for row in report.rows))
    figure, panels = new_figure(len(temperatures), width=2.0 + 0.7 * count, lines=2)
    for i, temperature in enumerate(temperatures):
        rows = [row for row in report.rows if row.temperature == temperature and row.bucket != ALL.name]
        headline = [row for row in rows if row.headline]
        panels[i].set_title(f"temperature {temperature:g}", fontsize=9, loc="left")
        if not families:
            _bucket_bars(panels[i], rows)
            _position_lines(panels[len(temperatures) + i], headline, looks_of(headline, _label), _label)
            continue
        _depth_lines(panels[i], headline, families, lambda row: row.acceptance and row.acceptance.tokens_per_step)
        panels[i].set_ylabel("tokens per step")
        deepest = {_family(row): row for row in sorted(headline, key=lambda row: row.depth)}
        drawn = [deepest[family] for family in families]
        _position_lines(panels[len(temperatures) + i], drawn, families, _family, legend=False)
    head = report.rows[0]
    mark = "dotted" if families else "hatched"
    lossy = "" if all(row.lossless for row in report.rows) else f"; {mark} and *: lossy"
    title = f"{Path(head.model).name}, {head.prompt_set}, {head.max_tokens} tokens at most{lossy}"
    if families:
        _shared_legend(figure, panels[0])
    figure.suptitle(title, fontsize=9, x=0.01, ha="left")
    _save(figure, path)


def _latency_lines(rows: Sequence[LatencyRow], path: Path) -> None:
    streams = list(dict.fromkeys(row.concurrency for row in rows))
    families = looks_of(rows, _family)
    figure, panels = new_figure(len(streams), width=4.0)
    for axes, count in zip(panels, streams, strict=True):
        here = [row for row in rows if row.concurrency == count]
        _depth_lines(axes, here, families, lambda row: row.ratio)
        for row in here:
            colour = families[_family(row)]["color"]
            axes.vlines(row.depth, min(row.ratios), max(row.ratios), color=colour, linewidth=0.6, alpha=0.6)
        axes.set_title(_streams(count), fontsize=9, loc="left")
    panels[0].set_ylabel("tokens per second over plain decoding")
    head = rows[0]
    lossy = "" if all(row.lossless for row in rows) else "; dotted: lossy"
    title = f"{Path(head.model).name}, {head.dtype}, {head.device}, temperature {head.temperature:g}{lossy}"
    _shared_legend(figure, panels[0])
    figure.suptitle(title, fontsize=9, x=0.01, ha="left")
    _save(figure, path)


def _streams(count: int) -> str:
    return f"{count} {'stream' if count == 1 else 'streams'}"


def _family(row: Any) -> str:
    """A row's label without its depth."""
    return str(row.label).replace(f"@{row.depth}", "", 1)


def _label(row: Any) -> str:
    return str(row.label)


def _many_depths(rows: Sequence[Any]) -> bool:
    depths: dict[str, set[int]] = {}
    for row in rows:
        depths.setdefault(_family(row), set()).add(row.depth)
    return any(len(distinct) >= LINES for distinct in depths.values())


def _depth_lines(
    axes: Any,
    rows: Sequence[Any],
    families: Mapping[str, Mapping[str, Any]],
    value: Callable[[Any], float | None],
) -> None:
    """A value over the depth of a draft, one line for each way of drafting. families: way of drafting -> its look."""
    for family, look in families.items():
        line = sorted((row for row in rows if _family(row) == family and value(row)), key=lambda row: row.depth)
        style = "-" if all(row.lossless for row in line) else ":"
        label = family.replace("+", "\n  +")
        axes.plot([row.depth for row in line], [value(row) for row in line], style, label=label, **look)
    axes.axhline(1.0, color=INK, linewidth=1, linestyle="--", label="plain decoding")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("depth of the draft")


def _shared_legend(figure: Any, axes: Any) -> None:
    figure.legend(*axes.get_legend_handles_labels(), frameon=False, fontsize=7, loc="outside right upper")


def _bucket_bars(axes: Any, rows: Sequence[AcceptanceRow]) -> None:
    """Tokens per step: a group of bars for each variant, with a bar for each bucket that has prompts."""
    labels = list(dict.fromkeys(row.label for row in rows))
    buckets = [name for name in dict.fromkeys(row.bucket for row in rows) if _prompts(rows, name)]
    width = 0.8 / max(1, len(buckets))
    for row in rows:
        if row.acceptance is None:
            continue
        b = buckets.index(row.bucket)
        at = labels.index(row.label) + (b - (len(buckets) - 1) / 2) * width
        colour = SERIES[[bucket.name for bucket in BUCKETS].index(row.bucket)]
        name = f"{row.bucket} ({row.prompts} prompts)" if row.label == labels[0] else None
        _bar(axes, at, row.acceptance.tokens_per_step, width, colour, row.lossless, name)
    axes.axhline(1.0, color=INK, linewidth=1, linestyle="--", label="plain decoding")
    _name_bars(axes, labels, level=2)
    axes.set_ylabel("tokens per step")
    axes.set_ylim(top=1.45 * axes.get_ylim()[1])
    axes.legend(frameon=False, fontsize=7, title="distinct 4-grams of the plain text", title_fontsize=7, ncols=2)


def _position_lines(
    axes: Any,
    rows: Sequence[AcceptanceRow],
    looks: Mapping[str, Mapping[str, Any]],
    name: Callable[[AcceptanceRow], str],
    legend: bool = True,
) -> None:
    """Conditional acceptance by position, one line for each variant that drafted. looks: by `name(row)`."""
    for row in rows:
        if row.acceptance is None or not row.acceptance.conditional:
            continue
        values = row.acceptance.conditional
        style = "-" if row.lossless else ":"
        axes.plot(range(1, len(values) + 1), values, style, label=row.label, **looks[name(row)])
    axes.set_ylim(-0.03, 1.03)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("position in the draft")
    axes.set_ylabel("accepted, of those reached")
    bucket = next((row.bucket for row in rows), "")
    axes.set_title(f"bucket {bucket}", fontsize=8, loc="left")
    if not axes.lines:
        axes.text(0.5, 0.5, "no prompt is in this bucket", transform=axes.transAxes, ha="center", fontsize=8)
    elif legend:
        axes.legend(frameon=False, fontsize=7)


def _prompts(rows: Sequence[AcceptanceRow], bucket: str) -> int:
    return max((row.prompts for row in rows if row.bucket == bucket), default=0)


def _bar(axes: Any, at: float, value: float, width: float, colour: str, lossless: bool, name: str | None) -> Any:
    """A bar with its value written at its foot."""
    hatch = None if lossless else LOSSY_HATCH
    bar = axes.bar(at, value, width * 0.92, color=colour, hatch=hatch, edgecolor="white", label=name)
    axes.annotate(f"{value:.2f}", (at, 0), xytext=(0, 4), **_inside())
    return bar


def new_figure(panels: int, width: float, lines: int = 1) -> tuple[Any, list[Any]]:
    """A figure of `lines` rows of panels, and its axes, row after row."""
    # Without pyplot: no window system is touched and no global state is left behind.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(4.5, width) * panels, 3.6 if lines == 1 else 2.9 * lines), layout="constrained")
    axes = [figure.add_subplot(lines, panels, i + 1) for i in range(lines * panels)]
    for one in axes:
        one.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _name_bars(axes: Any, labels: Sequence[str], level: int) -> None:
    """Put variants' labels below their bars, one option per line; slanted if there are more than `level`."""
    slant = {"rotation": 20, "ha": "right", "fontsize": 8} if len(labels) > level else {}
    axes.set_xticks(range(len(labels)), [label.replace("+", "\n+") for label in labels], **slant)


def _inside() -> dict[str, Any]:
    return {
        "textcoords": "offset points",
        "ha": "center",
        "fontsize": 7,
        "rotation": 90,
        "bbox": {"boxstyle": "square,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.85},
    }


def svg_of(figure: Any) -> str:
    """A figure as an SVG element, to be put into a page; its text stays text."""
    from matplotlib import rc_context

    drawn = io.StringIO()
    with rc_context({"svg.fonttype": "none"}):
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    text = drawn.getvalue()
    return text[text.index("<svg") :]


def _save(figure: Any, path: Path) -> None:
    with writing(path):
        figure.savefig(path, dpi=160)
