"""`stride simulate`: loads on cards whose steps were measured, with the planner and the depth policy of the engine."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from stridelm.bench.outputs import check_outputs
from stridelm.bench.serving.settings import REPORT_HELP
from stridelm.bench.settings import JSON_HELP
from stridelm.cli.bench_show import progress, show
from stridelm.cli.options import add_options, read_options
from stridelm.simulate.settings import SimulationSettings


def add_parser(subparsers: Any) -> None:
    """Add `simulate` to the main command."""
    parser = subparsers.add_parser(
        "simulate",
        help="simulate loads on cards whose steps were measured",
        description="Simulate loads on one or several cards, with a table of what their steps take. Planner and depth "
        "policy are the engine's own; there is no model, and what drafts gain is drawn at random.",
    )
    parser.add_argument("table", type=Path, metavar="TABLE", help="a cost table, as `stride bench cost` writes it")
    add_options(parser.add_argument_group("simulation"), SimulationSettings)
    parser.add_argument("--json", type=Path, metavar="FILE", help=JSON_HELP)
    parser.add_argument("--report", type=Path, metavar="FILE", help=REPORT_HELP)


def run(args: argparse.Namespace) -> int:
    """Raises ValueError for what cannot be simulated."""
    from stridelm.bench.results import append_result
    from stridelm.bench.serving.charts import charts_of
    from stridelm.bench.serving.files import check_report, write_report
    from stridelm.bench.serving.render import as_text
    from stridelm.simulate.report import about, simulation_document
    from stridelm.simulate.sweep import count_runs, read_variants, sweep
    from stridelm.simulate.table_file import read_table

    settings = read_options(args, SimulationSettings)
    check_outputs((args.json, args.report))
    if args.report is not None:
        check_report(args.report)
    table = read_table(args.table)
    with progress(count_runs(read_variants(settings.drafters, table), settings)) as on_run:
        cells = sweep(table, settings, on_run)
    document = simulation_document(cells, table, settings, str(args.table))
    show(as_text(document))
    if args.json is not None:
        rows = [cell.to_json() for cell in cells]
        append_result(args.json, "simulate", settings, target=dict(about(table, settings)), rows=rows)
    if args.report is not None:
        write_report(args.report, document, charts_of(cells))
    return 0
