"""Simulated beside measured: is `stride simulate` right on this machine?

In one process, rounds of recording a cost table and of measuring loads take turns, so that a machine that is slow for a
while is slow for both. Then the loads are simulated with the table.

    python benchmarks/simulated.py --threads 1 --json results/cpu-amd-epyc-one-core.jsonl
    python benchmarks/simulated.py --drafters ngram@2,ngram@4,ngram@auto --scenario repetition --rounds 8
    python benchmarks/simulated.py --shape llama-3.1-8b --acceptance 2.5 --drafters eagle@1,eagle@3,eagle@auto \
        --max-concurrency 1,4,16,64,256 --num-prompts 4 --table 8b.json
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from adaptive_depth import DEPTH as DEEPEST
from adaptive_depth import tokens_at
from load_model import write_model
from model_shapes import SHAPES
from rich.console import Console
from rich.table import Table

from stridelm.bench.cost.record import Recorder
from stridelm.bench.cost.settings import CostSettings
from stridelm.bench.environment import dtype_name
from stridelm.bench.results import append_result
from stridelm.bench.serving.cells import asks_of
from stridelm.bench.serving.figures import Figures
from stridelm.bench.serving.in_process import InProcess
from stridelm.bench.serving.loads import Load
from stridelm.bench.serving.record import Run
from stridelm.bench.serving.settings import ServingSettings
from stridelm.bench.settings import JSON_HELP
from stridelm.bench.stand import open_engine
from stridelm.progress import bar
from stridelm.simulate.settings import SimulationSettings
from stridelm.simulate.sweep import sweep
from stridelm.simulate.table_file import write_table

LIMITS = {"max_num_batched_tokens": 8192, "max_model_len": 4096}
"""Of the engine that runs a shape."""
GRID = (1, 2, 4, 8, 16, 32, 64, 128)
"""Requests of the steps that are recorded, besides the most streams."""
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
    shape: str | None
    layers: int | None
    acceptance: float | None


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="checkpoint directory (default: the built-in model)")
    parser.add_argument("--shape", choices=list(SHAPES), help="random weights of this shape instead, on a GPU")
    parser.add_argument("--layers", type=int, help="of the shape, if not all")
    parser.add_argument("--acceptance", type=float, help="tokens per step of the deepest draft, simulated")
    parser.add_argument("--drafters", default="mtp@1,mtp@3,mtp@auto", help="as those of stride simulate")
    parser.add_argument("--max-concurrency", default="1,4,16", help="streams of the closed loops")
    parser.add_argument("--scenario", default="code-completion")
    parser.add_argument("--num-prompts", type=int, default=16, help="requests of a load, at least as many as streams")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of both, after one that is dropped")
    parser.add_argument("--threads", type=int, help="CPU threads to compute with (default: torch's)")
    parser.add_argument("--table", type=Path, metavar="FILE", help="write the cost table into this file, .json")
    parser.add_argument("--json", type=Path, metavar="FILE", help=JSON_HELP)
    options = parser.parse_args(arguments)
    if options.shape is not None and (options.model is not None or options.acceptance is None):
        parser.error("--shape is instead of --model, and takes --acceptance: random weights accept nothing")
    if options.layers is not None and options.shape is None:
        parser.error("--layers would have no effect without --shape")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    settings = Settings(**{name: value for name, value in vars(options).items() if name not in ("json", "table")})
    with tempfile.TemporaryDirectory() as folder:
        rows = compare(settings, Path(folder), options.table)
    off = [abs(simulated / measured - 1) for row in rows for measured, simulated in (row["tokens/s"],)]
    console = Console(width=160, highlight=False)
    console.print(_table(rows))
    console.print(f"tokens/s: off by {statistics.median(off):.1%} in the median and by at most {max(off):.1%}")
    if options.json:
        append_result(options.json, "simulated", settings, rows=rows)


def compare(settings: Settings, folder: Path, kept: Path | None) -> list[dict[str, Any]]:
    """A row for each load and way of decoding. folder: for a checkpoint of a shape. kept: where the table goes."""
    entries = ["none", *settings.drafters.split(",")]
    streams = [int(each) for each in settings.max_concurrency.split(",")]
    names = tuple(dict.fromkeys(entry.partition("@")[0] for entry in entries[1:]))
    given: dict[str, Any] = {"model": settings.model}
    if settings.shape:
        shape = SHAPES[settings.shape]
        layers = settings.layers or shape.config["num_hidden_layers"]
        given = {**write_model(folder, names, layers, shape), **LIMITS}
    ruled = [_ruled(entry, settings.acceptance) for entry in entries]
    engine = open_engine(streams=max(streams), entries=ruled, **given)
    counts = {each: max(each, settings.num_prompts) for each in streams}
    costs = CostSettings(
        names,
        acceptance="exact" if settings.acceptance is None else f"synthetic:{settings.acceptance:g}",
        max_concurrency=tuple(sorted({*(n for n in GRID if n < max(streams)), max(streams)})),
        scenario=settings.scenario,
        num_prompts=max(counts.values()),
    )
    recorder, target = Recorder(engine, costs), InProcess(engine, 0.0)
    asks = {
        each: asks_of(settings.scenario, ServingSettings(num_prompts=count), ignore_eos=True)
        for each, count in counts.items()
    }
    ways = [target.way(entry) for entry in ruled]
    runs: dict[tuple[int, int], list[Run]] = {}
    """(streams, number of the way) -> its runs."""
    with bar("measuring", (settings.rounds + 1) * (1 + len(streams) * len(ways)), "runs") as advance:
        for turn in range(settings.rounds + 1):
            recorder.round(turn)
            advance(1)
            for each in streams:
                for number, way in enumerate(ways):
                    run = target.run(asks[each], Load(each), None, way)
                    advance(1)
                    if turn:
                        runs.setdefault((each, number), []).append(run)
    table = recorder.table()
    if settings.shape:
        table = replace(table, model=f"{SHAPES[settings.shape].title}'s shape, {dtype_name(engine)}")
    if kept:
        write_table(table, kept)
    rows = []
    for each in streams:
        simulation = SimulationSettings(
            drafters=tuple(entries[1:]),
            max_concurrency=(each,),
            num_prompts=counts[each],
            acceptance=() if settings.acceptance is None else (str(settings.acceptance),),
        )
        for number, cell in enumerate(sweep(table, simulation)):
            rates = [run.tokens_per_s for run in runs[each, number]]
            measured = Figures.of(runs[each, number])
            pairs = {name: (figure(measured), figure(cell.figures)) for name, figure in COMPARED.items()}
            rows.append({"load": cell.load, "label": cell.label, "low": min(rates), "high": max(rates), **pairs})
    return rows


def _ruled(entry: str, acceptance: float | None) -> str:
    """The entry with simulated acceptance, at any depth the same for a level as in the deepest draft."""
    _, _, depth = entry.partition("@")
    if acceptance is None or not depth:
        return entry
    if depth.isdigit():
        acceptance = tokens_at(acceptance, DEEPEST, int(depth))
    return f"{entry}:synthetic:{acceptance}"


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
