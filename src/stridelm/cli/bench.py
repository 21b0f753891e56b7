"""`stride bench`: loads against an engine or a server, two of these compared, and drafters compared with plain decoding
in one process on the same prompts. Prints a table and, if requested, appends a line of JSON to a file and draws charts.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from stridelm.bench.outputs import check_outputs
from stridelm.bench.settings import JSON_HELP, AcceptanceSettings, LatencySettings
from stridelm.cli import bench_compare, bench_cost, bench_serving
from stridelm.cli.bench_options import add_threads, engine_options, reserved, set_threads
from stridelm.cli.bench_show import progress, show
from stridelm.cli.options import add_options, given_options, read_options
from stridelm.config import EngineConfig

OTHERS = {
    "serving": bench_serving.run_serving,
    "sweep": bench_serving.run_sweep,
    "compare": bench_compare.run_compare,
    "cost": bench_cost.run_cost,
}

OUTPUTS = ("json", "report", "plot", "table")
"""Options with files that are written when all is measured."""


def add_parser(subparsers: Any) -> None:
    """Add `bench` and its two benchmarks to the main command."""
    parser = subparsers.add_parser("bench", help="measure drafters, engines and servers", description=__doc__)
    kinds = parser.add_subparsers(dest="benchmark", metavar="BENCHMARK", required=True)
    latency = kinds.add_parser(
        "latency",
        help="measure the speedup of drafters over plain decoding",
        description="Measure the speedup of drafters over plain decoding.",
    )
    acceptance = kinds.add_parser(
        "acceptance",
        help="count accepted tokens, by how repetitive the text is",
        description="Count accepted draft tokens, by how repetitive the plain continuation is.",
    )
    bench_serving.add_parsers(kinds)
    bench_compare.add_parser(kinds)
    bench_cost.add_parser(kinds)
    for kind, settings in ((latency, LatencySettings), (acceptance, AcceptanceSettings)):
        kind.add_argument(
            "model", nargs="?", metavar="MODEL", help="checkpoint directory (default: the built-in model)"
        )
        add_options(kind.add_argument_group("benchmark"), settings)
        kind.add_argument("--json", type=Path, metavar="FILE", help=JSON_HELP)
        kind.add_argument("--plot", type=Path, metavar="FILE", help="draw a chart into this file, .png or .svg")
        add_threads(kind)
        add_options(kind.add_argument_group("engine"), EngineConfig, skip=reserved())


def run(args: argparse.Namespace) -> int:
    """Run the chosen benchmark. Raises ValueError up front for anything that cannot be run."""
    check_outputs(getattr(args, name, None) for name in OUTPUTS)
    if args.benchmark in OTHERS:
        return OTHERS[args.benchmark](args)
    set_threads(args.threads)
    if args.plot is not None:
        from stridelm.bench.plot import check_plot

        check_plot(args.plot)
    return _latency(args) if args.benchmark == "latency" else _acceptance(args)


def _latency(args: argparse.Namespace) -> int:
    from stridelm.bench.latency import count_runs, measure_latency
    from stridelm.bench.prompts import load_prompts
    from stridelm.bench.report import latency_table
    from stridelm.bench.results import append_result
    from stridelm.bench.stand import open_engine
    from stridelm.bench.variants import read_variants

    settings = read_options(args, LatencySettings)
    prompts = load_prompts(settings.prompts).first(settings.num_prompts)
    options = given_options(args, EngineConfig)
    engine = open_engine(
        args.model,
        max(settings.batch),
        settings.drafters,
        prefix_caching=settings.prefix_cache == "cold",
        **engine_options(options),
    )
    variants = read_variants(settings.drafters, settings.depth, engine.loaded.target)
    with progress(count_runs(variants, settings)) as on_run:
        rows = measure_latency(engine, variants, prompts, settings, on_run)
    show(latency_table(rows))
    if args.json is not None:
        append_result(args.json, "latency", settings, rows=[row.to_json() for row in rows])
    if args.plot is not None:
        from stridelm.bench.plot import plot_latency

        plot_latency(rows, args.plot)
    return int(any(row.identical is False for row in rows))


def _acceptance(args: argparse.Namespace) -> int:
    from dataclasses import asdict

    from stridelm.bench.acceptance import count_runs, measure_acceptance
    from stridelm.bench.prompts import load_prompts
    from stridelm.bench.report import acceptance_table
    from stridelm.bench.results import append_result
    from stridelm.bench.stand import open_engine
    from stridelm.bench.variants import read_variants

    settings = read_options(args, AcceptanceSettings)
    prompts = load_prompts(settings.prompts).first(settings.num_prompts)
    options = engine_options(given_options(args, EngineConfig))
    engine = open_engine(args.model, settings.batch, settings.drafters, **options)
    variants = read_variants(settings.drafters, settings.depth, engine.loaded.target)
    with progress(count_runs(variants, settings)) as on_run:
        report = measure_acceptance(engine, variants, prompts, settings, on_run)
    show(acceptance_table(report))
    if args.json is not None:
        texts = [asdict(text) for text in report.plain]
        append_result(args.json, "acceptance", settings, plain=texts, rows=[row.to_json() for row in report.rows])
    if args.plot is not None and report.rows:
        from stridelm.bench.plot import plot_acceptance

        plot_acceptance(report, args.plot)
    return int(any(row.identical is False for row in report.rows))
