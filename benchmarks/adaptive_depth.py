"""--depth auto against plain decoding and against every fixed depth, with acceptance simulated.

    python benchmarks/adaptive_depth.py --json results/adaptive_depth.jsonl
    python benchmarks/adaptive_depth.py --read results/adaptive_depth.jsonl --plot adaptive_depth.svg
    python benchmarks/adaptive_depth.py --tiny --streams 1,4 --acceptance 1.0,2.5 --steps 10

Llama-3.1-8B's shape in bfloat16 with random weights and an EAGLE-3 head; --tiny is the built-in model with its MTP
module, on the CPU if there is no GPU. All streams decode greedily after a prompt of 512 random tokens.

--acceptance 2.5 means that a step with three drafts would emit 2.5 tokens on average, each further token with the same
chance; `mixed` gives a third of the streams 1.2, a third 2.0 and a third 3.5. At another depth the chance is the same.
One set of requests is decoded by turns: at each fixed depth, and as the policy chooses, --steps steps each, --rounds
times in alternating order. It has chosen for --learning steps before. Plain decoding is requests without a drafter,
after as many tokens, before and after the others.

The time is measured; the tokens are those expected of the drafts that were verified, since those drawn in so few steps
deviate. `best` is the fastest of plain decoding and the fixed depths. `depth` is what was chosen, on average.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from earlier_runs import add_result_options, rows_to_read
from load_model import engine_options
from model_shapes import LLAMA_8B
from rich.console import Console
from rich.table import Table

from stridelm.bench.looks import SERIES
from stridelm.bench.plot import INK, check_plot
from stridelm.bench.results import append_result
from stridelm.config import EngineConfig
from stridelm.engine.engine import Engine
from stridelm.engine.load import load
from stridelm.heap import freeze_heap
from stridelm.params import SamplingParams, Speculation
from stridelm.sample.length import chance_of_another
from stridelm.schedule.adaptive import Adaptive
from stridelm.schedule.depth import NOBODY, Others
from stridelm.schedule.depth_figures import Choice
from stridelm.types import Request, Span

MIXED = (1.2, 2.0, 3.5)
DEPTH = 3
"""Of the drafts whose mean is given."""
SETTLE = 4
"""Steps after a change that are not counted: the one in flight, and those that land with it."""
PLAIN, AUTO = "plain", "auto"


@dataclass(frozen=True)
class Settings:
    streams: tuple[int, ...]
    acceptance: tuple[str, ...]
    prompt: int
    steps: int
    rounds: int
    learning: int
    layers: int
    tiny: bool


@dataclass(frozen=True)
class Row:
    streams: int
    acceptance: str
    tokens_per_s: dict[str, float]
    """By depth, plain and auto: of all rounds together, since those at the ends have the shortest and the longest
    contexts, and the mean of two rates is more than the rate at the mean context."""
    ms_per_step: dict[str, float]
    over_plain: float
    over_best: float
    best: str
    over_rounds: tuple[float, ...]
    """auto over the best, in each round."""
    depth: float
    """That auto chose, on average."""
    planning_us: float
    """Of the policy, per step under auto."""


class Turns:
    """The engine's policy, or a fixed depth; and the tokens that are expected of what lands."""

    def __init__(self, chosen: Adaptive) -> None:
        self.chosen, self.cost = chosen, chosen.cost
        self.fixed: int | None = None
        self.rests = False
        self.begin()

    def begin(self) -> None:
        self.landings: list[tuple[float, float, float]] = []
        """(when it landed, expected tokens, mean depth)"""
        self.spent = 0.0

    def drafts(self, requests: int) -> bool:
        return self.chosen.drafts(requests) if self.fixed is None else True

    def depths(self, requests: Sequence[Request], others: Others = NOBODY) -> Sequence[int]:
        if self.fixed is not None:
            return [min(self.fixed, len(request.rows_by_depth) - 1) for request in requests]
        began = time.perf_counter()
        chosen = self.chosen.depths(requests, others)
        self.spent += time.perf_counter() - began
        return chosen

    def landed(self, spans: Sequence[Span], accepted: Sequence[int], seconds: float) -> None:
        if self.fixed is None:
            began = time.perf_counter()
            self.chosen.landed(spans, accepted, seconds)
            self.spent += time.perf_counter() - began
        tokens = sum(expected_tokens(span) for span in spans)
        self.landings.append((time.perf_counter(), tokens, sum(span.depth for span in spans) / len(spans)))

    def clear(self) -> None:
        self.chosen.clear()

    def explain(self, requests: Sequence[Request], prompt: int = 0) -> Choice | None:
        return None


def expected_tokens(span: Span) -> float:
    length = span.request.speculation.acceptance_length
    return 1.0 if length is None else tokens_at(length, span.request.speculation.depth or 0, span.depth)


@cache
def tokens_at(length: float, deepest: int, depth: int) -> float:
    """Tokens of a step that drafts to `depth`. Cached: at 256 requests the device waited for this in every step."""
    p = chance_of_another(length, deepest)
    return sum(p**level for level in range(depth + 1))


@dataclass(frozen=True)
class Turn:
    """What was measured over some steps."""

    tokens: float
    """Expected, per step."""
    seconds: float
    """Per step."""
    depth: float
    planning: float
    """Seconds of the policy per step."""

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", default="1,4,16,64,256")
    parser.add_argument("--acceptance", default="1.0,1.5,2.0,2.5,3.5,mixed")
    parser.add_argument("--prompt", type=int, default=512, help="prompt tokens")
    parser.add_argument("--steps", type=int, default=24, help="of a turn")
    parser.add_argument("--rounds", type=int, default=4, help="an even number, so that nothing always comes last")
    parser.add_argument("--learning", type=int, default=100, help="steps before the first turn")
    parser.add_argument("--layers", type=int, default=LLAMA_8B["num_hidden_layers"], help="of the 8B shape")
    parser.add_argument("--tiny", action="store_true", help="the built-in model; needs no GPU")
    add_result_options(parser, "the rates over plain decoding")
    args = parser.parse_args()
    console = Console(width=170)
    if args.plot:
        check_plot(args.plot)
    if not args.read and (args.rounds < 2 or args.rounds % 2):
        parser.error(
            f"--rounds must be even; got {args.rounds}: what comes last in most rounds has the longest contexts"
        )
    streams = tuple(int(n) for n in args.streams.split(","))
    settings = Settings(
        streams,
        tuple(args.acceptance.split(",")),
        args.prompt,
        args.steps,
        args.rounds,
        args.learning,
        args.layers,
        args.tiny,
    )
    if args.read:
        plot(rows_to_read(parser, args, "adaptive_depth", settings), args.plot)
        return 0
    if not settings.tiny and not torch.cuda.is_available():
        console.print("this benchmark needs a GPU, and torch sees no CUDA device here; --tiny does without")
        return 1
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        engine, turns = open_engine(Path(folder), settings)
        ready = time.perf_counter() - began
        freeze_heap()
        graphs = 0.0 if engine.capture is None else engine.capture.pool.spent / 2**30
        console.print(f"ready after {ready:.1f} s, {engine.stats.captures} graphs, {graphs:.2f} GiB")
        logging.basicConfig()
        logging.getLogger("stridelm.kernels.compilations").setLevel(logging.DEBUG)  # what should not be is named
        made, rows = (engine.stats.captures, engine.stats.compilations), []
        for count, acceptance in itertools.product(settings.streams, settings.acceptance):
            rows.append(measure(engine, turns, count, acceptance, settings))
            console.print(as_line(rows[-1]))
    made = (engine.stats.captures - made[0], engine.stats.compilations - made[1])
    console.print(as_table(rows, made))
    if args.json:
        about = {"ready_s": ready, "graphs": engine.stats.captures, "graph_gib": graphs, "captured_compiled": made}
        append_result(args.json, "adaptive_depth", settings, rows=[asdict(row) for row in rows], **about)
    if args.plot:
        plot([asdict(row) for row in rows], args.plot)
    return 0


def open_engine(folder: Path, settings: Settings) -> tuple[Engine, Turns]:
    config = EngineConfig(
        **engine_options(folder, ["eagle"], settings.layers, tiny=settings.tiny),
        drafter="mtp" if settings.tiny else "eagle",
        depth="auto",
        acceptance="synthetic:2.5",
        skip_tokenizer_init=True,
        max_num_seqs=max(settings.streams),
    )
    engine = Engine(config, load(config))
    assert engine.adaptive is not None
    turns = Turns(engine.adaptive)
    engine.steps.planner.depths = turns
    return engine, turns


def measure(engine: Engine, turns: Turns, streams: int, acceptance: str, settings: Settings) -> Row:
    """One cell: a set of requests under every depth in turn, and plain requests before and after."""
    means = MIXED if acceptance == "mixed" else (float(acceptance),)
    turns.chosen.keep_costs()  # as after a start
    asked: list[Speculation | str] = [Speculation(acceptance=f"synthetic:{mean}") for mean in means]
    found: dict[str, list[Turn]] = {}

    def take(name: str, fixed: int | None) -> None:
        turns.fixed = fixed
        run_steps(engine, SETTLE)
        found.setdefault(name, []).append(one_turn(engine, turns, settings.steps))

    def plain() -> None:
        for _ in range(settings.rounds):
            take(PLAIN, 0)

    def in_turns() -> None:
        turns.fixed = None
        run_steps(engine, settings.learning)
        names: list[tuple[str, int | None]] = [*((str(depth), depth) for depth in range(DEPTH + 1)), (AUTO, None)]
        for number in range(settings.rounds):
            for name, fixed in names if number % 2 == 0 else reversed(names):
                take(name, fixed)

    steps = settings.learning + settings.rounds * (DEPTH + 2) * (settings.steps + SETTLE + 1)
    middle = settings.prompt + int(sum(means) / len(means) * (steps + settings.learning) / 2)
    decode(engine, ["off"] * streams, middle, plain)
    decode(engine, [asked[index % len(asked)] for index in range(streams)], settings.prompt, in_turns)
    decode(engine, ["off"] * streams, middle, plain)
    rates = {
        name: sum(turn.tokens for turn in each) / sum(turn.seconds for turn in each) for name, each in found.items()
    }
    best = max((name for name in rates if name != AUTO), key=lambda name: rates[name])
    chosen = found[AUTO]
    beside = [rates[PLAIN]] * settings.rounds if best == PLAIN else [turn.rate for turn in found[best]]
    return Row(
        streams,
        acceptance,
        rates,
        {name: statistics.mean(turn.seconds for turn in each) * 1e3 for name, each in found.items()},
        rates[AUTO] / rates[PLAIN],
        rates[AUTO] / rates[best],
        best,
        tuple(turn.rate / other for turn, other in zip(chosen, beside, strict=True)),
        statistics.mean(turn.depth for turn in chosen),
        statistics.median(turn.planning for turn in chosen) * 1e6,
    )


def decode(engine: Engine, asked: Sequence[Speculation | str], prompt: int, during: Callable[[], None]) -> None:
    """Keep requests with these ways of speculating decoding, after so many tokens, and abort them afterwards."""
    rng, vocab = random.Random(0), engine.loaded.target.vocab_size
    names = [f"{time.perf_counter_ns()} {index}" for index in range(len(asked))]
    requests = []
    for name, speculation in zip(names, asked, strict=True):
        params = SamplingParams(max_tokens=None, temperature=0.0, ignore_eos=True, speculation=speculation)
        requests.append(engine.add(name, rng.choices(range(vocab), k=prompt), params))
    try:
        while any(not request.output_ids for request in requests):
            engine.step()
        during()
    finally:
        for name in names:
            engine.abort(name)
        while engine.busy:  # land the steps in flight
            engine.step()


def run_steps(engine: Engine, count: int) -> None:
    for _ in range(count):
        engine.step()


def one_turn(engine: Engine, turns: Turns, steps: int) -> Turn:
    turns.begin()
    run_steps(engine, steps + 1)  # time runs from the first landing
    (first, _, _), *rest = turns.landings
    seconds = rest[-1][0] - first
    return Turn(
        sum(tokens for _, tokens, _ in rest) / len(rest),
        seconds / len(rest),
        statistics.mean(depth for _, _, depth in rest),
        turns.spent / len(turns.landings),
    )


def as_line(row: Row) -> str:
    rates = ", ".join(f"{name} {rate:,.0f}" for name, rate in row.tokens_per_s.items())
    return f"{row.streams} streams, {row.acceptance}: {rates}; auto over best {row.over_best:.3f}x at {row.depth:.2f}"


def as_table(rows: Sequence[Row], made: tuple[int, int]) -> Table:
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    table = Table(title=f"{where}, torch {torch.__version__}; captured, compiled meanwhile: {made}")
    depths = [str(depth) for depth in range(DEPTH + 1)]
    for column in ("streams", "accepted*", PLAIN, *depths, AUTO, "/plain", "/best", "best", "depth", "policy us"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            str(row.streams),
            row.acceptance,
            *(f"{row.tokens_per_s[name]:,.0f}" for name in (PLAIN, *depths, AUTO)),
            f"{row.over_plain:.2f}x",
            f"{row.over_best:.3f}x",
            row.best,
            f"{row.depth:.2f}",
            f"{row.planning_us:.0f}",
        )
    return table


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """A panel per acceptance: every depth's rate over plain decoding, by streams."""
    from matplotlib.figure import Figure

    kinds = list(dict.fromkeys(row["acceptance"] for row in rows))
    columns = min(3, len(kinds))
    lines = -(-len(kinds) // columns)
    figure = Figure(figsize=(3.4 * columns, 2.9 * lines), layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False).flat
    for panel, kind in itertools.zip_longest(panels, kinds):
        if kind is None:
            panel.set_visible(False)
            continue
        mine = [row for row in rows if row["acceptance"] == kind]
        places = range(len(mine))
        for colour, depth in zip(itertools.cycle(SERIES), range(1, DEPTH + 1)):
            rates = [row["tokens_per_s"][str(depth)] / row["tokens_per_s"][PLAIN] for row in mine]
            panel.plot(places, rates, color=colour, linewidth=1, marker=".", label=f"depth {depth}")
        panel.plot(places, [row["over_plain"] for row in mine], color=INK, linewidth=2, marker="o", label=AUTO)
        panel.axhline(1.0, color=INK, linewidth=1, linestyle="--")
        panel.set_title(f"accepted: {kind}*", fontsize=9)
        panel.set_xticks(places, [str(row["streams"]) for row in mine])
        panel.spines[["top", "right"]].set_visible(False)
    first = figure.axes[0]
    first.legend(frameon=False, fontsize=8)
    first.set_ylabel("tokens per second over plain")
    figure.supxlabel("streams   (* simulated)", fontsize=9)
    figure.savefig(path, dpi=160)


if __name__ == "__main__":
    raise SystemExit(main())
