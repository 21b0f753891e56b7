"""Decode speed of a model with random weights on one GPU: plain and with each drafter, over batch sizes.

    python benchmarks/gpu_decode.py --batch 1,4,16,64,128,256 --json results/gpu_decode.jsonl
    python benchmarks/gpu_decode.py --batch 1,4,16,64,128,256 --read results/gpu_decode.jsonl --plot gpu_decode.svg
    python benchmarks/gpu_decode.py --model qwen3-30b-a3b --batch 1,16,64,256 --decoding plain,mask@3:synthetic:2.5
    python benchmarks/gpu_decode.py --model gemma4-26b-a4b --batch 1,4,16,64 --decoding plain,frozen_kv@3:synthetic:2.5

Llama-3.1-8B's shape or another of model_shapes.py in bfloat16, 512 random tokens in, 256 out, greedy, no prefix cache.
Only decoding with all requests running is timed: from the step in which the last got its first token to when one of
them nears its end. `floor` is the time to read the weights and the KV that a step must read, at the given bandwidth; of
a mixture's experts, as many as the rows of a plain step choose on average if all are equally likely (or skewed as
--routing says). `prefill` is prompt tokens per second until every request has its first token; `pages` is how many
pages of KV the requests hold, each counted when it has got its first token.

With random weights no draft is accepted, so a drafter's gain does not show here. Trusted windows (mask@2:trust) emit
all their tokens whatever the weights are; they are lossy. mask@3:synthetic:2.5 emits 2.5 tokens per step by
definition: acceptance is simulated, the step is real. Both are starred. Over so few steps the mean of the lengths drawn
deviates from the given one, so tokens per second are computed from the given length and the measured step time;
tokens/step is what was drawn.

`draft`, `forward` and `sampling` are the device's times for the parts of a step (engine/step_timer.py); `gap` is how
long nothing runs between one captured step and the next, as CUPTI reports it. Both are measured in separate short runs,
in the middle of the contexts that the timed run goes through.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from device_trace import gap_us, trace_steps
from earlier_runs import add_result_options, rows_to_read
from model_shapes import EAGLE3, SHAPES, write_assistant, write_eagle3
from rich.console import Console
from rich.table import Table

from stridelm.bench.looks import SERIES
from stridelm.bench.plot import INK, check_plot
from stridelm.bench.results import append_result
from stridelm.config import EngineConfig
from stridelm.engine.engine import Engine
from stridelm.engine.load import load
from stridelm.engine.step_timer import PARTS
from stridelm.models.layers.decoder import Decoder
from stridelm.models.layers.embedding import Embedding
from stridelm.models.layers.experts import Mixture
from stridelm.models.layers.parallel_mlps import ParallelMLPs
from stridelm.models.layers.router import Router
from stridelm.params import SamplingParams, Speculation
from stridelm.types import Request

DEFAULT_MODEL = next(iter(SHAPES))
ROUTINGS = ("random", "skewed", "same")
FIRST_RUNS = {"model": DEFAULT_MODEL, "routing": ROUTINGS[0], "quantization": None, "kv_cache_dtype": "auto"}
"""What the first runs recorded do not name."""
SKEW = 20.0
"""Standard deviation of what a skewed router adds to the scores of an eighth of its experts, or subtracts from them.
Other scores have 1."""
MODES = ("captured", "eager", "unlapped", "deterministic", "deterministic-eager")
WARM, END = 24, 16
"""Tokens of the untimed warm-up run; number of last tokens of a request for which it may draft less."""
PART_STEPS = 12
"""Steps over which the parts of a step are measured."""


@dataclass(frozen=True)
class Settings:
    batch: tuple[int, ...]
    prompt: int
    output: int
    layers: int
    repeats: int
    modes: tuple[str, ...]
    decoding: tuple[str, ...]
    bandwidth: float
    model: str = DEFAULT_MODEL
    routing: str = "random"
    quantization: str | None = None
    kv_cache_dtype: str = "auto"


@dataclass(frozen=True)
class Row:
    batch: int
    decoding: str
    lossy: bool
    tokens_per_s: float
    ms_per_step: float
    tokens_per_step: float
    floor_ms: float
    part_ms: dict[str, float]
    """Device time of each part, per step."""
    gap_ms: float | None
    """Between captured steps."""
    prefill_per_s: float
    pages: int
    """Held by the requests, each counted when it has got its first token."""
    over_plain: float | None
    over_vllm: float | None
    mode: str


@dataclass(frozen=True)
class Measured:
    """Measurements of one run, or of several together."""

    tokens: int
    """While all requests were running, as are the next two."""
    seconds: float
    steps: int
    prefill_per_s: float
    pages: int

    @classmethod
    def of(cls, runs: Sequence[Measured]) -> Measured:
        return cls(
            sum(run.tokens for run in runs),
            sum(run.seconds for run in runs),
            sum(run.steps for run in runs),
            max(run.prefill_per_s for run in runs),
            max(run.pages for run in runs),
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(SHAPES), default=DEFAULT_MODEL, help="whose shape")
    parser.add_argument(
        "--routing",
        choices=ROUTINGS,
        default=ROUTINGS[0],
        help="skewed: half of the rows to an eighth of the experts; same: all rows to the same experts, where routers "
        "have a correction bias",
    )
    parser.add_argument("--quantization", choices=("fp8",), help="how weights are stored; without it, in bfloat16")
    parser.add_argument("--kv-cache-dtype", choices=("auto", "fp8"), default="auto", help="auto: bfloat16")
    parser.add_argument("--batch", default="1,4,16,64,128,256")
    parser.add_argument("--prompt", type=int, default=512, help="prompt tokens")
    parser.add_argument("--output", type=int, default=256, help="output tokens")
    parser.add_argument("--layers", type=int, help="default: the model's")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--modes", default="captured", help=f"of {', '.join(MODES)}")
    parser.add_argument("--decoding", default=f"plain,ngram@4,mask@2:trust,mask@3:synthetic:2.5,{EAGLE3}")
    parser.add_argument("--bandwidth", type=float, default=4.28, help="TB/s, for the floor (H200 copies: 4.28)")
    add_result_options(parser, "plain decoding and its ratio to drafting")
    args = parser.parse_args()
    console = Console(width=170)
    if args.plot:
        check_plot(args.plot)
    batches = tuple(int(n) for n in args.batch.split(","))
    modes, decoding = tuple(args.modes.split(",")), tuple(args.decoding.split(","))
    layers = args.layers or SHAPES[args.model].config["num_hidden_layers"]
    settings = Settings(
        batches,
        args.prompt,
        args.output,
        layers,
        args.repeats,
        modes,
        decoding,
        args.bandwidth,
        args.model,
        args.routing,
        args.quantization,
        args.kv_cache_dtype,
    )
    if args.routing != ROUTINGS[0] and not SHAPES[args.model].is_mixture:
        parser.error(f"{args.model} has no experts: leave out --routing")
    if args.read:
        plot(rows_to_read(parser, args, "gpu_decode", settings, FIRST_RUNS), args.plot)
        return 0
    if not torch.cuda.is_available():
        console.print("this benchmark needs a GPU, and torch sees no CUDA device here")
        return 1
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        shape = SHAPES[settings.model]
        shape.write(folder, settings.layers)
        heads = write_heads(Path(folder), settings)
        for mode in settings.modes:
            engine = open_engine(folder, heads, mode, settings)
            for batch in settings.batch:
                rows += measure_batch(engine, mode, batch, settings, console)
            del engine  # the next mode needs the memory
            gc.collect()
            torch.cuda.empty_cache()
    weights = "bfloat16" if settings.quantization is None else f"weights in {settings.quantization}"
    kv = "" if settings.kv_cache_dtype == "auto" else f", KV in {settings.kv_cache_dtype}"
    console.print(as_table(rows, f"{shape.title}'s shape, {weights}{kv}"))
    if args.json:
        append_result(args.json, "gpu_decode", settings, rows=[asdict(row) for row in rows])
    if args.plot:
        plot([asdict(row) for row in rows], args.plot)
    return 0


def write_heads(folder: Path, settings: Settings) -> list[Path]:
    """The heads that the run drafts with, each in a directory of its own."""
    target, names = SHAPES[settings.model].config, {decoding.partition("@")[0] for decoding in settings.decoding}
    heads = []
    if "eagle" in names:
        heads.append(write_eagle3(folder / "eagle3", settings.layers, target))
    if "frozen_kv" in names:
        heads.append(write_assistant(folder / "assistant", target))
    return heads


def open_engine(folder: str, heads: Sequence[Path], mode: str, settings: Settings) -> Engine:
    largest = max(settings.batch)
    length = settings.prompt + settings.output
    config = EngineConfig(
        model=folder,
        load_format="dummy",
        quantization=settings.quantization,
        kv_cache_dtype=settings.kv_cache_dtype,
        dtype="bfloat16",
        device="cuda",
        drafter="none",
        drafter_model=[str(head) for head in heads] or None,
        mask_token_id=5,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        enforce_eager=mode.endswith("eager"),
        capture="startup" if mode.endswith("eager") else "lazy",  # a first run captures, or nothing does
        deterministic=mode.startswith("deterministic"),
        max_num_seqs=largest,
        max_num_batched_tokens=8192,
        max_model_len=length + 64,
        num_pages=largest * (-(-(length + 64) // 16) + 1),
    )
    loaded = load(config)
    if settings.routing == "skewed":
        skew(loaded.model)
    elif settings.routing == "same":
        unite(loaded.model)
    engine = Engine(config, loaded)
    if mode == "unlapped":
        engine.steps.lag = 0
    return engine


@torch.inference_mode()
def skew(model: Decoder) -> None:
    """Let the sign of one direction decide whether a row chooses among the first eighth of the experts or the rest."""
    for mixture in mixtures(model):
        weight = mixture.router.scores.weight
        direction = torch.randn(weight.shape[1], device=weight.device, dtype=weight.dtype)
        weight[: mixture.experts.count // 8] += SKEW * weight.shape[1] ** -0.5 * direction


@torch.inference_mode()
def unite(model: Decoder) -> None:
    """Let every row choose the first experts, as a random correction of the scores would."""
    for mixture in mixtures(model):
        if not isinstance(mixture.router, Router) or mixture.router.bias is None:
            raise SystemExit("this model's routers have no correction bias: leave out --routing same")
        mixture.router.bias.zero_()
        mixture.router.bias[: mixture.spec.routing.num_experts_per_tok] = 100.0


def mixtures(model: Decoder) -> list[Mixture | ParallelMLPs]:
    return [module for module in model.modules() if isinstance(module, Mixture | ParallelMLPs)]


def measure_batch(engine: Engine, mode: str, batch: int, settings: Settings, console: Console) -> list[Row]:
    rows = []
    plain: float | None = None
    for decoding in settings.decoding:
        run(engine, decoding, batch, settings.prompt, WARM)  # compiles and captures
        measured = Measured.of(
            [run(engine, decoding, batch, settings.prompt, settings.output) for _ in range(settings.repeats)]
        )
        gap = gap_time(engine, decoding, batch, settings)
        parts = part_times(engine, decoding, batch, settings)
        a_step = measured.tokens / measured.steps / batch
        length = synthetic_length(decoding)
        tokens_per_s = (length or a_step) * batch * measured.steps / measured.seconds
        plain = tokens_per_s if decoding == "plain" else plain
        row = Row(
            batch=batch,
            decoding=decoding,
            lossy=any(rule in decoding for rule in ("trust", "synthetic")),
            tokens_per_s=tokens_per_s,
            ms_per_step=measured.seconds / measured.steps * 1e3,
            tokens_per_step=a_step,
            floor_ms=floor_ms(engine, batch, settings),
            part_ms=parts,
            gap_ms=gap,
            prefill_per_s=measured.prefill_per_s,
            pages=measured.pages,
            over_plain=None if plain is None else tokens_per_s / plain,
            over_vllm=over_vllm(tokens_per_s, decoding, batch, settings),
            mode=mode,
        )
        console.print(
            f"{mode} batch {batch} {decoding}: {row.tokens_per_s:.1f} tokens/s, {row.ms_per_step:.2f} ms per step"
        )
        rows.append(row)
    return rows


def synthetic_length(decoding: str) -> float | None:
    """The given mean of tokens per step of simulated acceptance."""
    rule, _, length = decoding.partition(":")[2].partition(":")
    return float(length) if rule.startswith("synthetic") else None


def over_vllm(tokens_per_s: float, decoding: str, batch: int, settings: Settings) -> float | None:
    if settings.quantization is not None or settings.kv_cache_dtype != "auto":  # vLLM's figures are for bfloat16
        return None
    theirs = SHAPES[settings.model].vllm.get(decoding, {}).get(batch)
    return None if theirs is None else tokens_per_s / theirs


def run(engine: Engine, decoding: str, batch: int, prompt: int, output: int) -> Measured:
    """One batch from its prompts to its end."""
    rng = random.Random(batch)
    vocab = engine.loaded.target.vocab_size
    params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True, speculation=speculation(decoding))
    requests = [
        engine.add(f"{decoding}-{i}-{time.perf_counter_ns()}", [rng.randrange(vocab) for _ in range(prompt)], params)
        for i in range(batch)
    ]
    began = time.perf_counter()
    waiting, pages = requests, 0
    while waiting:
        engine.step()
        pages += sum(pages_held(engine, request) for request in waiting if request.output_ids)
        waiting = [request for request in waiting if not request.output_ids]
    # A step is in flight both now and at the end, so the tokens read in between took the time in between.
    prefill = batch * prompt / (time.perf_counter() - began)
    started = seen = (sum(len(request.output_ids) for request in requests), time.perf_counter(), engine.stats.steps)
    while all(len(request.output_ids) < output - END for request in requests):
        engine.step()
        seen = (sum(len(request.output_ids) for request in requests), time.perf_counter(), engine.stats.steps)
    while engine.busy:
        engine.step()
    engine.check()
    tokens, seconds, steps = seen[0] - started[0], seen[1] - started[1], seen[2] - started[2]
    if output > WARM and not steps:
        raise SystemExit(f"{decoding}, batch {batch}: the first request ends before the last begins; raise --output")
    return Measured(tokens, seconds, steps, prefill, pages)


def pages_held(engine: Engine, request: Request) -> int:
    """In all page groups."""
    return sum(engine.ledger.reclaimable(request))


def part_times(engine: Engine, decoding: str, batch: int, settings: Settings) -> dict[str, float]:
    """Milliseconds that the device spends on each part of a step, in graphs captured only for this."""
    engine.time_steps(True)
    try:
        with decoding_requests(engine, decoding, batch, settings):
            engine.stats.part_ms.clear()
            for _ in range(PART_STEPS):
                engine.step()
            return {part: engine.stats.part_ms[part] / PART_STEPS for part in PARTS}
    finally:
        engine.time_steps(False)


def gap_time(engine: Engine, decoding: str, batch: int, settings: Settings) -> float | None:
    """Milliseconds in which nothing runs between one captured step and the next."""
    with decoding_requests(engine, decoding, batch, settings):
        gap = gap_us(trace_steps(engine, PART_STEPS))
    return None if gap is None else gap / 1e3


@contextmanager
def decoding_requests(engine: Engine, decoding: str, batch: int, settings: Settings) -> Iterator[None]:
    """Keeps requests in the middle of their output running, and aborts them afterwards."""
    rng = random.Random(batch)
    vocab = engine.loaded.target.vocab_size
    params = SamplingParams(max_tokens=None, temperature=0.0, ignore_eos=True, speculation=speculation(decoding))
    names = [f"middle-{i}" for i in range(batch)]
    context = settings.prompt + settings.output // 2
    requests = [engine.add(name, [rng.randrange(vocab) for _ in range(context)], params) for name in names]
    try:
        while any(len(request.output_ids) < 8 for request in requests):
            engine.step()
        yield
    finally:
        for name in names:
            engine.abort(name)
        while engine.busy:  # land the steps in flight
            engine.step()


def speculation(decoding: str) -> Speculation | str:
    """ "plain", or drafter@depth (a number or auto), then after colons an acceptance rule and a confidence or a
    simulated length."""
    if decoding == "plain":
        return "off"
    drafter, _, rest = decoding.partition("@")
    depth, _, rule = rest.partition(":")
    levels: Any = depth if depth == "auto" else int(depth)
    if rule.startswith("synthetic"):
        return Speculation(drafter=drafter, depth=levels, acceptance=rule)
    rule, _, confidence = rule.partition(":")
    return Speculation(
        drafter=drafter,
        depth=levels,
        acceptance=rule or "exact",
        confidence=float(confidence) if confidence else None,
    )


def floor_ms(engine: Engine, batch: int, settings: Settings) -> float:
    """Time to read the weights (without tables of embeddings, of which one row per token is read, and of experts those
    that `batch` rows choose on average) and the KV at the middle of the run, of each layer what its window reaches.
    With skewed routing, half of the rows choose among an eighth of the experts and half among the rest."""
    model = engine.loaded.model
    tables = [each for each in model.modules() if isinstance(each, Embedding)]
    looked_up = [each for each in tables if each is not model.embed or not model.spec.tied]
    weights: float = sum(p.nbytes for p in model.parameters()) - sum(each.weight.nbytes for each in looked_up)
    for mixture in mixtures(model):
        count, chosen = mixture.experts.count, mixture.spec.routing.num_experts_per_tok
        parts: list[tuple[int, float]] = [(count, batch)]  # experts, and rows that choose among them
        if settings.routing == "skewed":
            parts = [(count // 8, batch / 2), (count - count // 8, batch / 2)]
        if settings.routing == "same":
            parts = [(count, 1)]
        unread = sum(experts * (1 - chosen / experts) ** rows for experts, rows in parts)
        weights -= unread / count * sum(p.nbytes for p in mixture.experts.parameters())
    context = settings.prompt + settings.output / 2
    entries = sum(
        state.read.bytes_per_token(torch.bfloat16) * min(context, state.window or context)
        for state in engine.loaded.pool.states
    )
    return (weights + batch * entries) / (settings.bandwidth * 1e12) * 1e3


def as_table(rows: list[Row], title: str) -> Table:
    table = Table(title=f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {title}")
    names = ("mode", "batch", "decoding", "tokens/s", "/plain", "/vLLM", "tokens/step", "ms/step", "floor")
    for column in (*names, *PARTS, "gap", "prefill/s", "pages"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row.mode,
            str(row.batch),
            row.decoding + ("*" if row.lossy else ""),
            f"{row.tokens_per_s:,.1f}",
            "" if row.over_plain is None else f"{row.over_plain:.2f}x",
            "" if row.over_vllm is None else f"{row.over_vllm:.3f}x",
            f"{row.tokens_per_step:.2f}",
            f"{row.ms_per_step:.3f}",
            f"{row.floor_ms:.2f}",
            *(f"{row.part_ms[part]:.3f}" for part in PARTS),
            "" if row.gap_ms is None else f"{row.gap_ms:.3f}",
            f"{row.prefill_per_s:,.0f}",
            f"{row.pages:,}",
        )
    return table


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Above, the parts of a plain step's time, and the floor; below, drafting as a ratio to plain decoding."""
    from matplotlib.figure import Figure

    rows = [row for row in rows if row["mode"] == "captured"]
    batches = sorted({row["batch"] for row in rows})
    figure = Figure(figsize=(7.5, 6.4), layout="constrained")
    above, below = figure.subplots(2, 1)
    plain = {row["batch"]: row for row in rows if row["decoding"] == "plain"}
    foot = [0.0] * len(batches)
    for colour, part in zip(SERIES, (*PARTS, "gap"), strict=False):
        high = [plain[b]["gap_ms"] or 0.0 if part == "gap" else plain[b]["part_ms"][part] for b in batches]
        above.bar(range(len(batches)), high, 0.7, bottom=foot, color=colour, label=part)
        foot = [a + b for a, b in zip(foot, high, strict=True)]
    for at, b in enumerate(batches):
        above.hlines(
            plain[b]["floor_ms"], at - 0.35, at + 0.35, color=INK, linewidth=1.5, label=None if at else "floor"
        )
        above.annotate(f"{plain[b]['tokens_per_s']:,.0f}/s", (at, foot[at]), ha="center", va="bottom", fontsize=7)
    above.set_ylabel("ms per step, plain decoding")
    others = list(dict.fromkeys(row["decoding"] for row in rows if row["decoding"] != "plain"))
    for colour, decoding in zip(itertools.cycle(SERIES), others):
        line = [row for row in rows if row["decoding"] == decoding]
        star = "*" if line[0]["lossy"] else ""
        places = [batches.index(row["batch"]) for row in line]
        below.plot(places, [row["over_plain"] for row in line], marker="o", color=colour, label=decoding + star)
    below.axhline(1.0, color=INK, linewidth=1, linestyle="--")
    below.set_ylabel("tokens per second over plain")
    below.set_xlabel("requests in a batch   (* lossy, or acceptance simulated)")
    for axes in (above, below):
        axes.set_xticks(range(len(batches)), [str(b) for b in batches])
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8, ncols=3)
    above.set_ylim(top=1.2 * above.get_ylim()[1])
    figure.savefig(path, dpi=160)


if __name__ == "__main__":
    raise SystemExit(main())
