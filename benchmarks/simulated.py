"""Simulated beside measured: is `stride simulate` right on this machine?

In one process, rounds of recording a cost table and of measuring loads take turns, so that a machine that is slow for a
while is slow for both. Then the loads are simulated with the table.

    python benchmarks/simulated.py --threads 1 --json results/cpu-amd-epyc-one-core.jsonl
    python benchmarks/simulated.py --drafters ngram@2,ngram@4,ngram@auto --scenario repetition --rounds 8
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from stridelm.bench.cost.record import Recorder
from stridelm.bench.cost.settings import CostSettings
from stridelm.bench.results import append_result
from stridelm.bench.serving.cells import asks_of
from stridelm.bench.serving.figures import Figures
from stridelm.bench.serving.in_process import InProcess
from stridelm.bench.serving.loads import Load
from stridelm.bench.serving.record import Run
from stridelm.bench.serving.settings import ServingSettings
from stridelm.bench.settings import JSON_HELP
from stridelm.bench.stand import open_engine
from stridelm.simulate.settings import SimulationSettings
from stridelm.simulate.sweep import sweep

COMPARED: dict[str, Callable[[Figures], float | None]] = {
    "tokens/s": lambda figures: figures.tokens_per_s,
    "TTFT": lambda figures: figures.ttft_ms.p50,
    "TPOT": lambda figures: figures.tpot_ms.p50,
    "tokens/step": lambda figures: figures.tokens_per_step,
}


@dataclass(frozen=True)
class Settings:
    model: str | None
    drafters: str
    max_concurrency: str
    scenario: str
    num_prompts: int
    rounds: int
    threads: int | None


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="checkpoint directory (default: the built-in model)")
    parser.add_argument("--drafters", default="mtp@1,mtp@3,mtp@auto", help="as those of stride simulate")
    parser.add_argument("--max-concurrency", default="1,4,16", help="streams of the closed loops")
    parser.add_argument("--scenario", default="code-completion")
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5, help="rounds of both, after one that is dropped")
    parser.add_argument("--threads", type=int, help="CPU threads to compute with (default: torch's)")
    parser.add_argument("--json", type=Path, metavar="FILE", help=JSON_HELP)
    options = parser.parse_args(arguments)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    entries = ["none", *options.drafters.split(",")]
    streams = [int(each) for each in options.max_concurrency.split(",")]
    engine = open_engine(options.model, max(streams), entries)
    names = tuple(dict.fromkeys(entry.partition("@")[0] for entry in entries[1:]))
    grid = tuple(sorted({*(n for n in (1, 2, 4, 8, 16, 32, 64) if n < max(streams)), max(streams)}))
    settings = CostSettings(names, max_concurrency=grid, scenario=options.scenario, num_prompts=options.num_prompts)
    recorder, target = Recorder(engine, settings), InProcess(engine, 0.0)
    asks = asks_of(options.scenario, ServingSettings(num_prompts=options.num_prompts), ignore_eos=True)
    runs: dict[tuple[str, str], list[Run]] = {}
    for turn in range(options.rounds + 1):
        recorder.round(turn)
        for load in map(Load, streams):
            for way in map(target.way, entries):
                run = target.run(asks, load, None, way)
                if turn:
                    runs.setdefault((load.name, way.label), []).append(run)
    simulation = SimulationSettings(
        drafters=tuple(entries[1:]), max_concurrency=tuple(streams), num_prompts=options.num_prompts
    )
    rows: list[dict[str, Any]] = []
    for cell in sweep(recorder.table(), simulation):
        measured = Figures.of(runs[cell.load, cell.label])
        rates = [run.tokens_per_s for run in runs[cell.load, cell.label]]
        pairs = {name: (figure(measured), figure(cell.figures)) for name, figure in COMPARED.items()}
        rows.append({"load": cell.load, "label": cell.label, "low": min(rates), "high": max(rates), **pairs})
    off = [abs(simulated / measured - 1) for row in rows for measured, simulated in (row["tokens/s"],)]
    console = Console(width=160, highlight=False)
    console.print(_table(rows))
    console.print(f"tokens/s: off by {statistics.median(off):.1%} in the median and by at most {max(off):.1%}")
    if options.json:
        kept = {name: value for name, value in vars(options).items() if name != "json"}
        append_result(options.json, "simulated", Settings(**kept), rows=rows)


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    """Measured, simulated, and the second over the first."""
    table = Table("load", "decoding", "measured", *COMPARED, box=None)
    for row in rows:
        texts = [row["load"], row["label"], f"{row['low']:,.0f} to {row['high']:,.0f}"]
        for measured, simulated in (row[name] for name in COMPARED):
            texts.append(f"{measured:,.2f}  {simulated:,.2f}  {simulated / measured:.2f}x")
        table.add_row(*texts)
    return table


if __name__ == "__main__":
    main()
