"""What a step takes that reads a chunk of a long prompt, by the chunk's rows and the tokens before it.

    python benchmarks/prompt_chunks.py --model deepseek-v2-lite --json results/prompt_chunks.jsonl
    python benchmarks/prompt_chunks.py --tiny --rows 64,128 --prompt 600

A model's shape with random weights, on a GPU; --tiny is the built-in model, on the CPU if there is no GPU. One request
is read in steps of at most so many rows, as beside decodes; up to 1,024 rows the forward pass is captured. The shortest
of --repeats times of each step counts, after one run of a few steps in which passes are captured; if anything is
captured or compiled later, that is said. Milliseconds from one step to the next; a cell is the median of five steps.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from load_model import write_model
from model_shapes import SHAPES
from rich.console import Console
from rich.table import Table

from stridelm.bench.results import append_result
from stridelm.bench.settings import JSON_HELP
from stridelm.config import EngineConfig
from stridelm.engine.engine import Engine
from stridelm.engine.load import load
from stridelm.heap import freeze_heap
from stridelm.params import SamplingParams
from stridelm.schedule.row_budget import RowBudget

CONTEXTS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
FIRST = 3
"""Steps in which passes are captured."""
BESIDE = 2
"""Steps on either side of one that count with it."""


@dataclass(frozen=True)
class Settings:
    model: str
    layers: int
    rows: tuple[int, ...]
    prompt: int
    repeats: int


@dataclass(frozen=True)
class Row:
    rows: int
    ms: dict[str, float]
    """By tokens before the chunk."""
    seconds: float
    """Of the whole prompt."""
    made: int
    """What was captured or compiled after the first steps."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="deepseek-v2-lite")
    parser.add_argument("--layers", type=int, help="default: the model's own")
    parser.add_argument("--rows", default="48,128,256,384,512,1024")
    parser.add_argument("--prompt", type=int, default=16640, help="tokens")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--tiny", action="store_true", help="the built-in model; needs no GPU")
    parser.add_argument("--json", type=Path, help=JSON_HELP)
    args = parser.parse_args()
    console = Console(width=150)
    if not args.tiny and not torch.cuda.is_available():
        console.print("this benchmark needs a GPU, and torch sees no CUDA device here; --tiny does without")
        return 1
    layers = 0 if args.tiny else args.layers or SHAPES[args.model].config["num_hidden_layers"]
    model = "built-in" if args.tiny else args.model
    rows = tuple(int(each) for each in args.rows.split(","))
    settings = Settings(model, layers, rows, args.prompt, args.repeats)
    with tempfile.TemporaryDirectory() as folder:
        engine = open_engine(Path(folder), settings)
        found = [measure(engine, each, settings) for each in settings.rows]
    console.print(as_table(found, settings))
    if args.json:
        append_result(args.json, "prompt_chunks", settings, rows=[asdict(row) for row in found])
    return 0


def open_engine(folder: Path, settings: Settings) -> Engine:
    length = settings.prompt + 2 * max(settings.rows)
    options: dict[str, Any] = {}
    if settings.layers:
        shape = SHAPES[settings.model]
        longer = replace(shape, config={**shape.config, "max_position_embeddings": length})
        options = write_model(folder, (), settings.layers, longer)
    asked = EngineConfig(
        **options,
        drafter="none",
        capture="lazy" if settings.layers else "startup",  # a first run captures, or nothing does
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        deterministic=False,
        max_num_seqs=1,
        max_model_len=length,
    )
    engine = Engine(asked, load(asked))
    freeze_heap()
    return engine


def measure(engine: Engine, rows: int, settings: Settings) -> Row:
    engine.steps.planner.rows = RowBudget(rows)
    read(engine, min(settings.prompt, FIRST * rows))
    before = engine.stats.captures + engine.stats.compilations
    runs = [read(engine, settings.prompt) for _ in range(settings.repeats)]
    fastest = [min(times) for times in zip(*runs, strict=True)]
    ms = {}
    for context in CONTEXTS:
        step = context // rows
        if BESIDE <= step < len(fastest) - 2 * BESIDE:
            ms[str(context)] = statistics.median(fastest[step - BESIDE : step + BESIDE + 1]) * 1e3
    return Row(rows, ms, sum(fastest), engine.stats.captures + engine.stats.compilations - before)


def read(engine: Engine, tokens: int) -> list[float]:
    """Seconds of each step of a request with a prompt of so many tokens."""
    vocab = engine.loaded.target.vocab_size
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    engine.add(f"{time.perf_counter_ns()}", [7 * place % vocab for place in range(tokens)], params)
    times, latest = [], time.perf_counter()
    while engine.busy:
        engine.step()
        now = time.perf_counter()
        times.append(now - latest)
        latest = now
    return times


def as_table(found: list[Row], settings: Settings) -> Table:
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    table = Table(title=f"{where}, torch {torch.__version__}: {settings.model}, ms per step by tokens before it")
    contexts = [str(context) for context in CONTEXTS if any(str(context) in row.ms for row in found)]
    for column in ("rows", *contexts, f"{settings.prompt:,} tokens, s", "made later"):
        table.add_column(column, justify="right")
    for row in found:
        cells = (f"{row.ms[context]:.2f}" if context in row.ms else "" for context in contexts)
        table.add_row(str(row.rows), *cells, f"{row.seconds:.3f}", str(row.made))
    return table


if __name__ == "__main__":
    raise SystemExit(main())
