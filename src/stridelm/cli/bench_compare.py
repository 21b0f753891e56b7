"""`stride bench compare`: two targets or two settings, for speed and for quality, or two recorded runs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stridelm.bench.serving.settings import CompareSettings
from stridelm.cli.bench_serving import add_common, open_target
from stridelm.cli.bench_show import progress, show
from stridelm.cli.options import given_options, read_options
from stridelm.config import EngineConfig

if TYPE_CHECKING:
    from stridelm.bench.serving.cells import Side


def add_parser(kinds: Any) -> None:
    """Add `compare` to the benchmarks."""
    kind = kinds.add_parser(
        "compare",
        help="compare two targets or two settings, in speed and in output",
        description="Compare two servers, or two settings of a Stride server or of an engine in this process: speed, "
        "identical outputs, where the others first diverge, their loss, and how many are valid Python.",
    )
    add_common(kind, CompareSettings)
    kind.add_argument(
        "--runs",
        type=Path,
        nargs=2,
        metavar="FILE",
        help="instead: the last runs of two files that --json wrote, of stride bench sweep or serving or of stride "
        "simulate, side by side",
    )


def run_compare(args: argparse.Namespace) -> int:
    from stridelm.bench.results import append_result
    from stridelm.bench.serving.cells import count_alternating
    from stridelm.bench.serving.compare import compare
    from stridelm.bench.serving.compare_report import comparison_charts, comparison_document
    from stridelm.bench.serving.files import check_report, write_report
    from stridelm.bench.serving.render import as_text

    if args.runs is not None:
        return _compare_runs(args)
    settings = read_options(args, CompareSettings)
    if args.report is not None:
        check_report(args.report)
    sides = _sides(args, settings)
    with progress(count_alternating(2, settings.loads[0], settings)) as on_run:
        found = compare(sides, settings, on_run)
    about = {
        f"{place}{name}": value
        for place, side in _places(sides)
        for name, value in {"target": side.target.name, **side.target.about}.items()
    }
    document = comparison_document(found, settings, about)
    show(as_text(document))
    if args.json is not None:
        append_result(args.json, "compare", settings, target=about, rows=found.rows(), **found.to_json())
    if args.report is not None:
        write_report(args.report, document, comparison_charts(found))
    return int(found.broken or any(each.figures.errors for each in found.contenders))


def _compare_runs(args: argparse.Namespace) -> int:
    """Raises ValueError for any other option: it would have no effect."""
    from stridelm.bench.serving.files import check_report, write_report
    from stridelm.bench.serving.render import as_text
    from stridelm.bench.serving.side_by_side import side_by_side

    given = {*given_options(args, CompareSettings), *given_options(args, EngineConfig), "json", "threads"}
    idle = sorted(name for name in given if getattr(args, name) is not None)
    if idle:
        raise ValueError(f"{', '.join(idle)} would have no effect on recorded runs; leave it out, or runs")
    if args.report is not None:
        check_report(args.report)
    document = side_by_side(*args.runs)
    show(as_text(document))
    if args.report is not None:
        write_report(args.report, document, [])
    return 0


def _sides(args: argparse.Namespace, settings: CompareSettings) -> tuple[Side, Side]:
    from stridelm.bench.serving.cells import Side

    targets = [open_target(args, settings, settings.entries, url) for url in settings.url or (None,)]
    first, second = settings.entries
    sides = Side(targets[0], targets[0].way(first)), Side(targets[-1], targets[-1].way(second))
    if sides[0] == sides[1]:
        raise ValueError(f"both settings are {sides[0].way.label}; name two drafters or depths that differ")
    return sides


def _places(sides: tuple[Side, Side]) -> list[tuple[str, Side]]:
    """With what their names begin: nothing if there is only one target."""
    first, second = sides
    return [("", first)] if first.target is second.target else [("first ", first), ("second ", second)]
