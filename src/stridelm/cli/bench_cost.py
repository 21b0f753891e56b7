"""`stride bench cost`: records what an engine's steps take, for `stride simulate`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from stridelm.bench.cost.settings import CostSettings
from stridelm.cli.bench_options import add_threads, engine_options, reserved, set_threads
from stridelm.cli.options import add_options, given_options, read_options
from stridelm.config import EngineConfig


def add_parser(kinds: Any) -> None:
    """Add `cost` to the benchmarks."""
    kind = kinds.add_parser(
        "cost",
        help="record what steps take, for stride simulate",
        description="Record what the steps of an engine in this process take, by requests, rows, depth and context, as "
        "a table for `stride simulate`.",
    )
    kind.add_argument("model", nargs="?", metavar="MODEL", help="checkpoint directory (default: the built-in model)")
    kind.add_argument("--table", type=Path, metavar="FILE", required=True, help="write the table into this file, .json")
    add_options(kind.add_argument_group("benchmark"), CostSettings)
    add_threads(kind)
    add_options(kind.add_argument_group("engine"), EngineConfig, skip=reserved())


def run_cost(args: argparse.Namespace) -> int:
    from stridelm.bench.cost.record import count_runs, record, speculations
    from stridelm.bench.stand import open_engine
    from stridelm.cli.bench_show import show
    from stridelm.progress import bar
    from stridelm.simulate.table_file import write_table

    settings = read_options(args, CostSettings)
    set_threads(args.threads)
    options = engine_options(given_options(args, EngineConfig))
    chosen = [f"{name}@auto:{settings.acceptance}" for name in settings.drafters]
    engine = open_engine(args.model, max(settings.max_concurrency), chosen, **options)
    drafting = len(speculations(engine, settings)) - 1
    with bar("recording", count_runs(settings, drafting), "runs") as advance:
        table = record(engine, settings, advance)
    write_table(table, args.table)
    points = sum(len(costs.decode) + len(costs.prompts) for costs in table.drafters.values())
    show(f"{args.table}: {points} points of {', '.join(table.drafters)}, {table.hardware}")
    return 0
