"""`stride bench latency` and `stride bench acceptance`: compare drafters with plain decoding, in one process on the
same prompts. Prints a table and, if requested, appends a line of JSON to a file and draws a chart."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stridelm.bench.settings import JSON_HELP, AcceptanceSettings, LatencySettings
from stridelm.cli.options import add_options, given_options, read_options
from stridelm.config import EngineConfig
from stridelm.options import known

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import RenderableType

PIPED_WIDTH = 200
"""Width in columns of a table that is piped, so that nothing is folded."""
RESERVED = (
    "model",
    "drafter",
    "depth",
    "acceptance",
    "generation_config",
    "max_num_seqs",
    "enable_prefix_caching",
    "strict",
    "skip_tokenizer_init",
)
"""Fields of EngineConfig that a benchmark sets itself, in addition to the options of drafters and rules."""


def add_parser(subparsers: Any) -> None:
    """Add `bench` and its two benchmarks to the main command."""
    parser = subparsers.add_parser("bench", help="compare drafters with plain decoding", description=__doc__)
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
    for kind, settings in ((latency, LatencySettings), (acceptance, AcceptanceSettings)):
        kind.add_argument(
            "model", nargs="?", metavar="MODEL", help="checkpoint directory (default: the built-in model)"
        )
        add_options(kind.add_argument_group("benchmark"), settings)
        kind.add_argument("--json", type=Path, metavar="FILE", help=JSON_HELP)
        kind.add_argument("--plot", type=Path, metavar="FILE", help="draw a chart into this file, .png or .svg")
        kind.add_argument("--threads", type=int, metavar="INT", help="CPU threads to compute with (default: torch's)")
        add_options(kind.add_argument_group("engine"), EngineConfig, skip=_reserved())


def run(args: argparse.Namespace) -> int:
    """Run the chosen benchmark. Raises ValueError up front for anything that cannot be run."""
    _set_threads(args.threads)
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
        prefix_caching=settings.prefix_cache == "cold",
        **_engine_options(options),
    )
    variants = read_variants(settings.drafters, settings.depth, engine.loaded.target)
    with _progress(count_runs(variants, settings)) as on_run:
        rows = measure_latency(engine, variants, prompts, settings, on_run)
    _show(latency_table(rows))
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
    engine = open_engine(args.model, settings.batch, **_engine_options(given_options(args, EngineConfig)))
    variants = read_variants(settings.drafters, settings.depth, engine.loaded.target)
    with _progress(count_runs(variants, settings)) as on_run:
        report = measure_acceptance(engine, variants, prompts, settings, on_run)
    _show(acceptance_table(report))
    if args.json is not None:
        texts = [asdict(text) for text in report.plain]
        append_result(args.json, "acceptance", settings, plain=texts, rows=[row.to_json() for row in report.rows])
    if args.plot is not None and report.rows:
        from stridelm.bench.plot import plot_acceptance

        plot_acceptance(report, args.plot)
    return int(any(row.identical is False for row in report.rows))


def _engine_options(options: dict[str, Any]) -> dict[str, Any]:
    """The options given for the engine, without names that belong to the benchmark."""
    return {name: value for name, value in options.items() if name not in _reserved()}


def _reserved() -> set[str]:
    return {*RESERVED, *known()}


def _set_threads(threads: int | None) -> None:
    if threads is None:
        return
    if threads < 1:
        raise ValueError(f"threads must be at least 1; got {threads}")
    import torch

    torch.set_num_threads(threads)


@contextmanager
def _progress(runs: int) -> Iterator[Callable[[str], None]]:
    """A bar on stderr that advances when a run starts; disabled if stderr is not a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=runs)
        started = False

        def on_run(what: str) -> None:
            nonlocal started
            bar.update(task, advance=int(started), description=what)
            started = True

        yield on_run


def _show(what: RenderableType) -> None:
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else PIPED_WIDTH, highlight=False)
    console.print(what)
