"""What raggedness costs: confidence-adaptive decoding at many streams, where every request has another length.

    python benchmarks/ragged_steps.py [MODEL] --streams 16 --k 2,3,4 --tau 0.5,0.7,0.9 --json results/ragged_steps.jsonl

Two measurements:

1. A ragged step against a uniform one with as many rows. In a trusted window of k, a request that emitted c
   tokens runs c real rows and k - 1 probes in the next step. Here real engine steps of the mask drafter run on
   one batch, and only c is prescribed: the same for all requests in every other step, and mixed from 1 to k
   with the same sum in the steps between. So both kinds have the same requests, rows and contexts, and are
   equally affected by whatever else the machine does.
2. Tokens per second of confidence-adaptive decoding over plain decoding, over a grid of k and confidence.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
import time
from collections import defaultdict, deque
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from stridelm.bench.latency import LatencyRow, measure_latency
from stridelm.bench.prompts import load_prompts
from stridelm.bench.report import latency_table
from stridelm.bench.results import append_result
from stridelm.bench.settings import JSON_HELP, LatencySettings
from stridelm.bench.stand import encode, open_engine
from stridelm.bench.variants import read_variants
from stridelm.engine.engine import Engine
from stridelm.kernels.step_ops import Sureness
from stridelm.params import SamplingParams
from stridelm.verify.rule import VerifyInput
from stridelm.verify.trust.rule import Trust

CONFIDENCE = 0.5  # so that confidences are computed as usual; their values are overruled
RAGGED_FROM = 3  # a window of 2 has no integer mean between 1 and 2
SKIPPED = 8  # steps at the start, in which prompts are read and steps captured
MAX_STREAMS = 512


@dataclass(frozen=True)
class Settings:
    model: str | None
    streams: int
    k: tuple[int, ...]
    tau: tuple[float, ...]
    max_tokens: int
    repeats: int
    steps: int


@dataclass(frozen=True)
class StepRow:
    """Medians over the steps of one k."""

    k: int
    streams: int
    rows: int
    """Rows of each step, ragged or uniform."""
    mean_real: float
    ragged_ms: float
    uniform_ms: float
    ratio: float
    """Median over pairs of successive steps."""
    pairs: int


class Dictated(Trust):
    """The trusted rule, but with a prescribed number of emitted tokens."""

    def __init__(self, device: torch.device) -> None:
        self._counts = torch.ones(MAX_STREAMS, device=device)
        """Written in place before each step, so that a captured step reads them too."""

    def dictate(self, counts: list[int]) -> None:
        self._counts[: len(counts)] = torch.tensor(counts, dtype=torch.float32)

    def sureness(self, inputs: VerifyInput) -> Sureness:
        """Row j of a window has confidence -j, and must reach that of the last row to be emitted."""
        rows, columns = inputs.nodes.shape
        place = torch.arange(0, -columns, -1, dtype=torch.float32, device=inputs.nodes.device)
        return place.expand(rows, -1), 1 - self._counts[:rows]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="checkpoint directory (default: the built-in model)")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--k", default="2,3,4", help="comma-separated windows")
    parser.add_argument("--tau", default="0.5,0.7,0.9", help="comma-separated confidences; '' for none")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=120, help="steps per k of the first measurement; 0 leaves it out")
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's)")
    parser.add_argument("--json", type=Path, metavar="FILE", help=JSON_HELP)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    ks, taus = tuple(map(int, args.k.split(","))), tuple(map(float, filter(None, args.tau.split(","))))
    settings = Settings(args.model, args.streams, ks, taus, args.max_tokens, args.repeats, args.steps)
    engine = open_engine(args.model, args.streams)
    step_rows = [measure_steps(engine, k, settings) for k in ks if k >= RAGGED_FROM] if args.steps else []
    grid = measure_grid(engine, settings) if taus else []
    console = Console(width=None if sys.stdout.isatty() else 180, highlight=False)
    console.print(steps_table(step_rows))
    if grid:
        console.print(latency_table(grid))
    drafting = [row for row in grid if row.label != "plain"]
    best = max(drafting, key=lambda row: row.ratio, default=None)
    if best is not None:
        console.print(f"best: {best.label} at {best.ratio:.2f}x of plain decoding, {args.streams} streams")
    if args.json:
        append_result(
            args.json,
            "ragged_steps",
            settings,
            steps=[asdict(row) for row in step_rows],
            grid=[row.to_json() for row in grid],
            best=None if best is None else best.label,
        )
    return 0


def measure_steps(engine: Engine, k: int, settings: Settings) -> StepRow:
    """Alternate uniform and ragged steps on one batch of requests; a step's rows follow from the counts of the step
    before."""
    mean = (k + 1) // 2 if k % 2 else k // 2  # a whole number, so that a uniform step can have as many rows
    rng = random.Random(0)
    rule = Dictated(engine.loaded.device)
    engine.device.verifier._rules["trust"] = rule  # the only internal that this benchmark replaces
    prompts = encode(engine, load_prompts())
    max_tokens = SKIPPED * k + (settings.steps + 2) * k
    params = SamplingParams(
        temperature=0,
        max_tokens=max_tokens,
        ignore_eos=True,
        speculation={"drafter": "mask", "depth": k - 1, "acceptance": "trust", "confidence": CONFIDENCE},
    )
    for i in range(settings.streams):
        engine.add(f"ragged-{i}", prompts[i % len(prompts)][:64], params)
    timed: list[tuple[bool, int, float]] = []
    uniform = [mean] * settings.streams
    # A step's rows follow from the counts of the step before it, and a call waits for the step `lag` calls ago.
    counts_before = deque([uniform] * (engine.steps.lag + 1))
    try:
        for number in range(SKIPPED + settings.steps):
            ragged_next = number % 2 == 0
            counts = mixed(k, mean, settings.streams, rng) if ragged_next else uniform
            rule.dictate(counts)
            rows = engine.stats.rows
            start = time.perf_counter()
            engine.step()
            seconds = time.perf_counter() - start
            if number >= SKIPPED:
                timed.append((counts_before[0] is not uniform, engine.stats.rows - rows, seconds))
            counts_before.append(counts)
            counts_before.popleft()
    finally:
        engine.device.verifier._rules.pop("trust")
        for i in range(settings.streams):
            engine.abort(f"ragged-{i}")
    return step_row(timed, k, settings.streams, mean)


def mixed(k: int, mean: int, streams: int, rng: random.Random) -> list[int]:
    """Counts from 1 to k whose sum is streams * mean, spread as widely as possible and in random order."""
    counts = [1] * streams
    missing = streams * (mean - 1)
    for i in range(streams):
        # Every level in turn: 1, 2, .., k, 1, 2, ..
        extra = min(i % k, missing)
        counts[i] += extra
        missing -= extra
    for i in range(streams):
        extra = min(k - counts[i], missing)
        counts[i] += extra
        missing -= extra
    rng.shuffle(counts)
    return counts


def step_row(timed: list[tuple[bool, int, float]], k: int, streams: int, mean: int) -> StepRow:
    times: dict[bool, list[float]] = defaultdict(list)
    rows = {count for _, count, _ in timed}
    assert len(rows) == 1, f"steps of different size were compared: {sorted(rows)}"
    ratios = []
    for (ragged, _, seconds), (_, _, other) in itertools.pairwise(timed):
        times[ragged].append(seconds)
        ratios.append(seconds / other if ragged else other / seconds)
    return StepRow(
        k=k,
        streams=streams,
        rows=rows.pop(),
        mean_real=mean,
        ragged_ms=1000 * statistics.median(times[True]),
        uniform_ms=1000 * statistics.median(times[False]),
        ratio=statistics.median(ratios),
        pairs=len(ratios),
    )


def measure_grid(engine: Engine, settings: Settings) -> list[LatencyRow]:
    entries = tuple(f"mask@{k - 1}:trust:{tau}" for k in settings.k for tau in settings.tau)
    latency = LatencySettings(
        drafters=entries,
        batch=(settings.streams,),
        max_tokens=settings.max_tokens,
        num_prompts=settings.streams,
        repeats=settings.repeats,
    )
    variants = read_variants(latency.drafters, (), engine.loaded.target)
    return measure_latency(engine, variants, load_prompts().first(settings.streams), latency)


def steps_table(rows: list[StepRow]) -> Table:
    table = Table(box=None, pad_edge=False, title="ragged against uniform steps, as many rows")
    for name in ("k", "streams", "rows", "ragged ms", "uniform ms", "ratio", "pairs"):
        table.add_column(name, justify="right")
    for row in rows:
        cells = (
            row.k,
            row.streams,
            row.rows,
            f"{row.ragged_ms:.2f}",
            f"{row.uniform_ms:.2f}",
            f"{row.ratio:.3f}",
        )
        table.add_row(*map(str, cells), str(row.pairs))
    return table


if __name__ == "__main__":
    sys.exit(main())
