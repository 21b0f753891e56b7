"""A load that swings between few and many streams: is a chosen depth above every fixed one?

No fixed depth is right for both ends. In one process, plain decoding, every fixed depth and the chosen one take turns
at the same trace: requests at the lowest number of streams, then at the highest, and so on. What was learnt at one end
must serve at the next.

    python benchmarks/swinging_load.py --threads 1 --json results/swinging_load.jsonl
    python benchmarks/swinging_load.py --drafter eagle --streams 1,8,32 --rounds 5

The built-in model on the CPU, or on the GPU if there is one. Each rate is that of the whole trace; the ratio is the
median of those to the fixed depth beside it in the same round. All outputs must be the same.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from stridelm.bench.results import append_result
from stridelm.bench.serving.cells import asks_of
from stridelm.bench.serving.in_process import InProcess
from stridelm.bench.serving.loads import Load
from stridelm.bench.serving.settings import ServingSettings
from stridelm.bench.serving.target import Ask, Way
from stridelm.bench.settings import JSON_HELP
from stridelm.bench.stand import open_engine

PLAIN, AUTO = "none", "auto"
REQUESTS = 2
"""Of each stream, in a phase."""


@dataclass(frozen=True)
class Settings:
    drafter: str
    depths: tuple[int, ...]
    streams: tuple[int, ...]
    cycles: int
    rounds: int
    scenario: str
    threads: int | None


@dataclass(frozen=True)
class Trace:
    """One way's trip through the trace."""

    seconds: float
    tokens: int
    outputs: tuple[tuple[int, ...], ...]

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def main() -> int:
    settings, json_file = read_options()
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    entries = [PLAIN, *(f"{settings.drafter}@{depth}" for depth in (*settings.depths, AUTO))]
    target = InProcess(open_engine(None, max(settings.streams), entries), 0.0)
    ways = {entry: target.way(entry) for entry in entries}
    phases = phases_of(settings)
    traces: dict[str, list[Trace]] = {}
    console = Console(width=120)
    for number in range(settings.rounds + 1):  # the first is dropped
        for entry in entries if number % 2 else reversed(entries):
            trace = run(target, phases, ways[entry])
            if number:
                traces.setdefault(entry, []).append(trace)
                console.print(f"round {number}, {entry}: {trace.rate:,.0f} tokens/s")
    same = len({trace.outputs for each in traces.values() for trace in each}) == 1
    auto = traces.pop(f"{settings.drafter}@{AUTO}")
    rows = []
    for entry, each in traces.items():
        ratios = [chosen.rate / fixed.rate for chosen, fixed in zip(auto, each, strict=True)]
        rows.append(
            {
                "beside": entry,
                "tokens_per_s": statistics.median(trace.rate for trace in each),
                "auto_tokens_per_s": statistics.median(trace.rate for trace in auto),
                "over": statistics.median(ratios),
                "low": min(ratios),
                "high": max(ratios),
            }
        )
    table = Table("beside", "tokens/s", "chosen depth", "over it", "rounds")
    for row in rows:
        table.add_row(
            str(row["beside"]),
            f"{row['tokens_per_s']:,.0f}",
            f"{row['auto_tokens_per_s']:,.0f}",
            f"{row['over']:.3f}x",
            f"{row['low']:.3f} to {row['high']:.3f}",
        )
    console.print(table)
    console.print("all outputs are the same" if same else "OUTPUTS DIFFER")
    if json_file:
        append_result(json_file, "swinging_load", settings, rows=rows, same_outputs=same)
    return 0 if same else 1


def read_options() -> tuple[Settings, Path | None]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafter", default="mtp")
    parser.add_argument("--depths", default="1,2,3", help="the fixed ones")
    parser.add_argument("--streams", default="1,32", help="of the phases of one cycle")
    parser.add_argument("--cycles", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3, help="after one that is dropped")
    parser.add_argument("--scenario", default="code-completion", help="of stride bench serving")
    parser.add_argument("--threads", type=int, help="CPU threads to compute with (default: torch's)")
    parser.add_argument("--json", type=Path, metavar="FILE", help=JSON_HELP)
    args = parser.parse_args()
    depths, streams = (tuple(int(each) for each in text.split(",")) for text in (args.depths, args.streams))
    return Settings(args.drafter, depths, streams, args.cycles, args.rounds, args.scenario, args.threads), args.json


def phases_of(settings: Settings) -> list[tuple[Load, list[Ask]]]:
    """The trace: each phase's load and requests. Few streams get more requests each, so that no phase is negligible."""
    counts = [max(REQUESTS * streams, max(settings.streams) // 4) for streams in settings.streams]
    asks = iter(asks_of(settings.scenario, ServingSettings(num_prompts=settings.cycles * sum(counts)), ignore_eos=True))
    return [
        (Load(max_concurrency=streams), [next(asks) for _ in range(count)])
        for _ in range(settings.cycles)
        for streams, count in zip(settings.streams, counts, strict=True)
    ]


def run(target: InProcess, phases: Sequence[tuple[Load, list[Ask]]], way: Way) -> Trace:
    runs = [target.run(asks, load, None, way) for load, asks in phases]
    completions = [each for run in runs for each in run.completions if each is not None]
    assert len(completions) == sum(len(asks) for _, asks in phases)
    return Trace(
        sum(run.seconds for run in runs),
        sum(each.tokens for each in completions),
        tuple(each.token_ids or () for each in completions),
    )


if __name__ == "__main__":
    raise SystemExit(main())
