"""Results as tables for a terminal. results.py stores them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from stridelm.bench.acceptance import AcceptanceReport, AcceptanceRow, PlainText
from stridelm.bench.latency import LatencyRow
from stridelm.bench.metrics import Percentiles

LOSSY = "* lossy: the output may differ from plain decoding's"
SIMULATED = "synthetic: simulated acceptance; the output is not the model's, for benchmarks only"


def latency_table(rows: Sequence[LatencyRow]) -> RenderableType:
    """What was run, then one line per row. Times in milliseconds."""
    head = rows[0]
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("streams", justify="right")
    table.add_column("decoding")
    for name in (
        "tokens/s",
        "ratio",
        "tokens/step",
        "accepted at 1, 2, ..",
        "TTFT",
        "TPOT",
        "ITL",
        "steps",
        "pages",
    ):
        table.add_column(name, justify="right")
    table.add_column("same output")
    streams = None
    for row in rows:
        if streams not in (None, row.concurrency):
            table.add_row()
        streams = row.concurrency
        table.add_row(
            str(row.concurrency),
            row.label,
            f"{row.tokens_per_s:.1f}",
            f"{row.ratio:.2f}x",
            f"{row.acceptance.tokens_per_step:.2f}",
            positions(row.acceptance.conditional),
            milliseconds(row.times.ttft_s),
            milliseconds(row.times.tpot_s),
            milliseconds(row.times.itl_s),
            str(row.steps),
            str(row.peak_pages),
            _sameness(row.identical, row.identical_outputs, row.prompts),
        )
    notes = [
        f"ratio: tokens/s over those of the neighbouring plain run, median of {len(rows[-1].ratios)}",
        "accepted at: share of the steps that reached the position",
        "TTFT, TPOT, ITL: p50 / p90 / p99 in milliseconds",
    ]
    notes += _warnings(rows)
    about = (
        f"{head.model} ({head.dtype}{', deterministic' if head.deterministic else ''}) on {head.device}\n"
        f"{head.prompt_set}, {head.prompt_order}, {head.max_tokens} tokens each "
        f"at temperature {head.temperature:g}, "
        f"{'ignoring' if head.ignore_eos else 'stopping at'} end of text; "
        f"prefix cache {head.prefix_cache}; "
        f"pages of {head.page_size} tokens"
    )
    return _framed(about, [table], notes)


def acceptance_table(report: AcceptanceReport) -> RenderableType:
    """A summary of plain decoding's output, then tokens per step of each variant in each bucket."""
    if not report.rows:
        return _plain_table(report.plain)
    head = report.rows[0]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("temperature", "decoding", "bucket"):
        table.add_column(name)
    for name in ("prompts", "tokens", "tokens/step", "accepted at 1, 2, ..", "of all drafts", "drafted in"):
        table.add_column(name, justify="right")
    table.add_column("same output")
    for row in report.rows:
        acceptance = row.acceptance
        figures = ("-", "-", "-", "-") if acceptance is None else (
            f"{acceptance.tokens_per_step:.2f}",
            positions(acceptance.conditional),
            positions(acceptance.marginal),
            f"{acceptance.coverage:.0%}",
        )  # fmt: skip
        table.add_row(
            f"{row.temperature:g}",
            row.label,
            row.bucket,
            str(row.prompts),
            str(row.completion_tokens),
            *figures,
            _sameness(row.identical, row.identical_outputs, row.prompts) if row.prompts else "-",
            style="bold" if row.headline else "",
            end_section=row.bucket == "all",
        )
    notes = [
        "bucket: share of distinct 4-grams in the plain continuation (bold: the headline)",
        "accepted at: share of the steps that reached the position; of all drafts: share of the steps that drafted",
        "drafted in: share of the steps that drafted",
    ]
    notes += _warnings(report.rows)
    where = f"{head.model} ({head.dtype}) on {head.device}"
    about = f"{where}\n{head.prompt_set}, at most {head.max_tokens} tokens each"
    return _framed(about, [_plain_table(report.plain), Text(""), table], notes)


def _plain_table(texts: Iterable[PlainText]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in (
        "temperature",
        "decoding",
        "prompts by bucket",
        "too short",
        "distinct 4-grams",
        "end in a loop",
    ):
        table.add_column(name)
    for text in texts:
        share = "-" if text.median_distinct_share is None else f"median {text.median_distinct_share:.2f}"
        where = "" if text.median_loop_start is None else f", from token {text.median_loop_start:.0f} on (median)"
        counts = ", ".join(f"{name}: {count}" for name, count in text.buckets.items())
        loops = f"{text.loops} of {text.prompts} ({text.loop_share:.0%}){where}"
        table.add_row(f"{text.temperature:g}", "plain", counts, str(text.too_short), share, loops)
    return table


def positions(values: Sequence[float], limit: int = 4) -> str:
    """Shares by position, the first few."""
    shown = " ".join(f"{value:.2f}" for value in values[:limit])
    return f"{shown} .." if len(values) > limit else shown or "-"


def milliseconds(times: Percentiles) -> str:
    values = (times.p50, times.p90, times.p99)
    return "-" if None in values else " / ".join(f"{1000 * value:.1f}" for value in values if value is not None)


def _warnings(rows: Sequence[LatencyRow] | Sequence[AcceptanceRow]) -> list[str]:
    """Warnings about these rows' outputs."""
    lossy = [] if all(row.lossless for row in rows) else [LOSSY]
    return [*lossy, SIMULATED] if any(row.simulated for row in rows) else lossy


def _sameness(identical: bool | None, count: int, prompts: int) -> str:
    if identical is None:
        return f"{count} of {prompts}"
    return "yes" if identical else f"NO: {count} of {prompts}"


def _framed(about: str, tables: Sequence[RenderableType], notes: Sequence[str]) -> Group:
    return Group(Text(about), Text(""), *tables, Text(""), *(Text(note, style="dim") for note in notes))
