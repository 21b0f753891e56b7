"""What requests meet on a GPU: bursts and arrivals of mixed lengths, from the moment that the engine is ready.

    python benchmarks/live_load.py --decoding plain,eagle@3:synthetic:2.5 --json results/live_load.jsonl

Llama-3.1-8B's shape in bfloat16, weights random, no prefix cache, at most 256 requests at once, 8,192 rows per step.
Prompts have 32 to 1,024 random tokens and outputs 16 to 512, all lengths equally likely; the lengths and tokens are the
same for every kind of decoding. A burst is 384 requests at once; arrivals are a Poisson process. The first token's time
runs from a request's arrival. A token's time is that between two steps that emit for a request, divided by the
tokens that the later one emitted. Captures and compilations are those that happened while requests waited.

mask@3:synthetic:2.5 and the like emit 2.5 tokens per step because they were told to: acceptance is simulated.
"""

from __future__ import annotations

import argparse
import gc
import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
from gpu_decode import LLAMA_8B, speculation, write_eagle3
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig

from stridelm.bench.results import append_result
from stridelm.bench.settings import JSON_HELP
from stridelm.config import EngineConfig
from stridelm.engine.engine import Engine
from stridelm.engine.load import load
from stridelm.params import SamplingParams, Speculation

PROMPT, OUTPUT = (32, 1024), (16, 512)
BURST = 384


@dataclass(frozen=True)
class LiveSettings:
    decoding: tuple[str, ...]
    loads: tuple[str, ...]
    seconds: float
    layers: int
    max_num_seqs: int
    capture: str


@dataclass(frozen=True)
class Load:
    """One load's results. Times in milliseconds."""

    decoding: str
    load: str
    tokens_per_s: float
    first_p50: float
    first_p99: float
    token_mean: float
    token_p99: float
    longest_step: float
    captures: int
    compilations: int
    uncaptured: dict[str, int]


@dataclass
class Seen:
    """One request, as its client sees it. Times in seconds."""

    arrived: float
    last: float = 0.0
    first: float = 0.0
    per_token: list[float] = field(default_factory=list)

    def emitted(self, tokens: int, now: float) -> None:
        if not self.first:
            self.first = now - self.arrived
        else:
            self.per_token += [(now - self.last) / tokens] * tokens
        self.last = now


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--decoding", default="plain,eagle@3:synthetic:2.5")
    parser.add_argument("--loads", default="burst,burst,4,12,24", help="burst, or requests per second")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long requests arrive")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--capture", default="startup", help="startup or lazy")
    parser.add_argument("--json", type=Path, metavar="FILE", help=JSON_HELP)
    args = parser.parse_args()
    console = Console(width=150)
    if not torch.cuda.is_available():
        console.print("this benchmark needs a GPU, and torch sees no CUDA device here")
        return 1
    decoding, loads = tuple(args.decoding.split(",")), tuple(args.loads.split(","))
    settings = LiveSettings(decoding, loads, args.seconds, args.layers, args.max_num_seqs, args.capture)
    rows: list[Load] = []
    starts: dict[str, float] = {}
    for kind in decoding:
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            engine = open_engine(Path(folder), kind, settings)
        starts[kind] = time.perf_counter() - began
        graphs = 0 if engine.capture is None else engine.capture.pool.spent / 2**30
        console.print(f"{kind}: ready after {starts[kind]:.1f} s, {engine.stats.captures} graphs, {graphs:.2f} GiB")
        for load_of in loads:
            rows.append(measure(engine, kind, load_of, settings))
            console.print(rows[-1])
        del engine
        gc.collect()
        torch.cuda.empty_cache()
    console.print(as_table(rows))
    if args.json:
        append_result(args.json, "live_load", settings, rows=[asdict(row) for row in rows], ready_s=starts)
    return 0


def open_engine(folder: Path, decoding: str, settings: LiveSettings) -> Engine:
    config = LlamaConfig(**{**LLAMA_8B, "num_hidden_layers": settings.layers}, architectures=["LlamaForCausalLM"])
    config.save_pretrained(folder)
    asked = speculation(decoding)
    asked = Speculation(drafter="none") if isinstance(asked, str) else asked
    own = EngineConfig(
        model=str(folder),
        load_format="dummy",
        dtype="bfloat16",
        device="cuda",
        drafter=asked.drafter or "none",
        depth=asked.depth,
        acceptance=asked.rule,
        drafter_model=str(write_eagle3(folder / "eagle3", settings.layers)) if decoding.startswith("eagle") else None,
        mask_token_id=5,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=8192,
        max_model_len=8192,
        capture=settings.capture,
    )
    return Engine(own, load(own))


def measure(engine: Engine, decoding: str, load_of: str, settings: LiveSettings) -> Load:
    """Serve one load from its first request to its last token."""
    before = (engine.stats.captures, engine.stats.compilations, dict(engine.stats.uncaptured))
    requests = list(requests_of(load_of, settings.seconds, engine.loaded.target.vocab_size))
    seen: dict[str, Seen] = {}
    tokens, longest, waiting = 0, 0.0, requests[::-1]
    began = time.perf_counter()
    while waiting or engine.busy:
        now = time.perf_counter() - began
        while waiting and waiting[-1][0] <= now:
            due, prompt, params = waiting.pop()
            name = f"{load_of} {len(seen)}"
            engine.add(name, prompt, params)
            seen[name] = Seen(due)
        if not engine.busy:
            time.sleep(min(0.001, max(0.0, waiting[-1][0] - now)))
            continue
        started = time.perf_counter()
        outputs = engine.step()
        now = time.perf_counter()
        longest = max(longest, now - started)
        for output in outputs:
            if output.new_token_ids:
                tokens += len(output.new_token_ids)
                seen[output.request.id].emitted(len(output.new_token_ids), now - began)
    seconds = time.perf_counter() - began
    first = np.array([each.first for each in seen.values()]) * 1e3
    per_token = np.concatenate([each.per_token for each in seen.values()]) * 1e3
    stats = engine.stats
    uncaptured = {reason: steps - before[2].get(reason, 0) for reason, steps in stats.uncaptured.items()}
    return Load(
        decoding=decoding,
        load=load_of,
        tokens_per_s=tokens / seconds,
        first_p50=float(np.percentile(first, 50)),
        first_p99=float(np.percentile(first, 99)),
        token_mean=float(per_token.mean()),
        token_p99=float(np.percentile(per_token, 99)),
        longest_step=longest * 1e3,
        captures=stats.captures - before[0],
        compilations=stats.compilations - before[1],
        uncaptured=uncaptured,
    )


def requests_of(load_of: str, seconds: float, vocab: int) -> Iterator[tuple[float, list[int], SamplingParams]]:
    """(when it arrives, prompt, parameters), in order of arrival."""
    rng, due = random.Random(0), 0.0
    for _ in range(BURST) if load_of == "burst" else range(int(float(load_of) * seconds)):
        prompt = [rng.randrange(vocab) for _ in range(rng.randint(*PROMPT))]
        yield due, prompt, SamplingParams(temperature=0.0, max_tokens=rng.randint(*OUTPUT), ignore_eos=True)
        due += 0.0 if load_of == "burst" else rng.expovariate(float(load_of))


def as_table(rows: list[Load]) -> Table:
    table = Table()
    for column in ("decoding", "load", "tokens/s", "first p50", "p99", "token mean", "p99", "longest step", "captures"):
        table.add_column(column, justify="right")
    for row in rows:
        times = (row.first_p50, row.first_p99, row.token_mean, row.token_p99, row.longest_step)
        made = f"{row.captures}+{row.compilations}"
        table.add_row(row.decoding, row.load, f"{row.tokens_per_s:,.0f}", *(f"{ms:.1f}" for ms in times), made)
    return table


if __name__ == "__main__":
    raise SystemExit(main())
