"""`stride bench serving` and `sweep`: loads against an engine in this process or a server at an address."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stridelm.bench.serving.settings import REPORT_HELP, Requests, ServingSettings, SweepSettings
from stridelm.bench.settings import JSON_HELP
from stridelm.cli.bench_options import add_threads, engine_options, reserved, set_threads
from stridelm.cli.bench_show import progress, show
from stridelm.cli.options import add_options, given_options, read_options
from stridelm.config import EngineConfig

if TYPE_CHECKING:
    from stridelm.bench.serving.target import Target

SIZED = {"max_num_seqs"}
"""An option of the engine that is open here, since requests may arrive at any rate."""
ARRIVING = 32
"""Requests that an engine runs at once by default if they arrive."""


def add_parsers(kinds: Any) -> None:
    """Add `serving` and `sweep` to the benchmarks."""
    serving = kinds.add_parser(
        "serving",
        help="measure one scenario under one load, in process or at an address",
        description="Measure one scenario under one load against an engine in this process, or against any server "
        "with OpenAI's or SGLang's API, with plain decoding beside it where a request can choose that.",
    )
    sweep = kinds.add_parser(
        "sweep",
        help="measure scenarios under loads with drafters",
        description="Measure every scenario under every load with every drafter, and plain decoding beside each.",
    )
    for kind, settings in ((serving, ServingSettings), (sweep, SweepSettings)):
        add_common(kind, settings)


def add_common(kind: argparse.ArgumentParser, settings: type) -> None:
    """The options that all benchmarks of loads have."""
    text = "checkpoint directory (default: the built-in model); with --url, the model's name (default: the first)"
    kind.add_argument("model", nargs="?", metavar="MODEL", help=text)
    add_options(kind.add_argument_group("benchmark"), settings)
    kind.add_argument("--json", type=Path, metavar="FILE", help=JSON_HELP)
    kind.add_argument("--report", type=Path, metavar="FILE", help=REPORT_HELP)
    add_threads(kind)
    add_options(kind.add_argument_group("engine, in process only"), EngineConfig, skip=reserved() - SIZED)


def run_serving(args: argparse.Namespace) -> int:
    settings = read_options(args, ServingSettings)
    return _run(args, settings, [settings.drafter], [settings.scenario])


def run_sweep(args: argparse.Namespace) -> int:
    settings = read_options(args, SweepSettings)
    return _run(args, settings, list(settings.drafters) or [None], list(settings.names))


def _run(
    args: argparse.Namespace, settings: ServingSettings | SweepSettings, entries: list[str | None], names: list[str]
) -> int:
    from stridelm.bench.results import append_result
    from stridelm.bench.serving.cells import check_lengths, count_runs, measure
    from stridelm.bench.serving.charts import charts_of
    from stridelm.bench.serving.files import check_report, write_report
    from stridelm.bench.serving.render import as_text
    from stridelm.bench.serving.report import serving_document

    if args.report is not None:
        check_report(args.report)
    check_lengths(names, settings)
    target = open_target(args, settings, entries, settings.urls[0] if settings.urls else None)
    with progress(len(names) * count_runs(target, entries, settings)) as on_run:
        cells = measure(target, entries, names, settings, on_run)
    title = f"stride bench {args.benchmark}: {target.name}"
    document = serving_document(cells, settings, target.about, title, settings.ignore_eos)
    show(as_text(document))
    errors = sum(cell.figures.errors for cell in cells)
    if args.json is not None:
        rows = [cell.to_json() for cell in cells]
        append_result(args.json, args.benchmark, settings, target=dict(target.about), rows=rows)
    if args.report is not None:
        write_report(args.report, document, charts_of(cells))
    return int(errors > 0 or any(cell.identical is False for cell in cells))


def open_target(args: argparse.Namespace, settings: Requests, entries: Iterable[str | None], url: str | None) -> Target:
    """Raises ValueError for options that would have no effect on it."""
    options = given_options(args, EngineConfig)
    options.pop("model", None)
    if url is None:
        from stridelm.bench.serving.in_process import InProcess

        set_threads(args.threads)
        given = engine_options(options, but=SIZED)
        streams = max([load.max_concurrency or ARRIVING for load in settings.loads])
        caching = settings.prefix_cache != "off"
        streams = given.pop("max_num_seqs", streams)
        return InProcess.open(args.model, streams, settings.temperature, caching, entries, **given)
    from stridelm.bench.http.server import Server
    from stridelm.bench.serving.remote import Remote

    idle = [*engine_options(options, but=SIZED), *(["threads"] if args.threads is not None else [])]
    if idle:
        raise ValueError(f"{', '.join(sorted(idle))} would have no effect on a server; leave it out, or --url")
    return Remote(Server.at(url, model=args.model), settings.backend or "openai", settings.temperature)
