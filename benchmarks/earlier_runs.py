"""What benchmarks with a chart share: the options for their results, and how a chart is drawn from an earlier run."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stridelm.bench.results import read_results
from stridelm.bench.settings import JSON_HELP


def add_result_options(parser: ArgumentParser, chart: str) -> None:
    """--json, --plot and --read. chart: what --plot draws."""
    parser.add_argument("--json", type=Path, metavar="FILE", help=JSON_HELP)
    parser.add_argument("--plot", type=Path, help=f"a chart of {chart} (.svg, .png)")
    parser.add_argument(
        "--read", type=Path, metavar="FILE", help="measure nothing: plot an earlier run with these options"
    )


def rows_to_read(
    parser: ArgumentParser, args: Namespace, benchmark: str, settings: Any, unnamed: Mapping[str, Any] | None = None
) -> list[dict[str, Any]]:
    """The rows of the last run in the file of --read with these settings, a dataclass. unnamed: settings that the first
    runs recorded do not name. Raises SystemExit if there is no such run, or nothing is to be plotted."""
    if args.plot is None:
        parser.error("--read only plots: name the chart's file with --plot")
    wanted = json.loads(json.dumps(asdict(settings)))
    mine = (run for run in read_results(args.read) if run["benchmark"] == benchmark)
    found = [run for run in mine if {**(unnamed or {}), **run["settings"]} == wanted]
    if not found:
        raise SystemExit(f"no run in {args.read} has these options; give those of the run to plot")
    rows: list[dict[str, Any]] = found[-1]["rows"]
    return rows
