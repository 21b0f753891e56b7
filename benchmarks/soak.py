"""Minutes of random traffic in process: whether anything is captured, compiled, kept or held that should not be.

    python benchmarks/soak.py --minutes 10 --json results/soak.jsonl
    python benchmarks/soak.py --tiny --minutes 1 --streams 8

Each stream sends a request, waits for its end, thinks for up to a second, and sends another: prompts of 1 to 1,024
random tokens and one in twenty of up to 6,000, outputs of 1 to 256, with random parameters: greedy or sampled, top-k,
top-p, min-p, penalties, biases, bad words, log-probabilities of outputs and prompts, and a JSON schema where llguidance
is installed. Half are drafted as --decoding says, half are plain, and one in thirty is aborted on its way. The pool is
too small for all of them, so that some are preempted.

The model is Llama-3.1-8B's shape in bfloat16 with random weights, or the built-in one (--tiny). A line is printed per
minute. Exits with 1 if, once the engine was ready, anything was captured or compiled; if a page is held at the end;
if a request failed; or if the device's memory or the process's grew by more than --grown after the first minute.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from load_model import engine_options, speculation_options
from load_requests import SCHEMA
from model_shapes import LLAMA_8B
from rich.console import Console

from stridelm.bench.results import append_result
from stridelm.bench.settings import JSON_HELP
from stridelm.config import EngineConfig
from stridelm.engine.engine import Engine
from stridelm.params import SamplingParams

PARAMS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 0.9, "top_k": 7, "min_p": 0.02},
    {"temperature": 0.8, "presence_penalty": 0.6, "frequency_penalty": 0.2},
    {"temperature": 0.0, "repetition_penalty": 1.3, "logit_bias": {3: 2.0, 9: -4.0}},
    {"temperature": 0.0, "bad_words_token_ids": [[4, 5], [7]], "min_tokens": 3},
    {"temperature": 0.5, "logprobs": 4},
    {"temperature": 0.0, "prompt_logprobs": 2},
)
GRAMMAR = {"temperature": 0.6, "structured_outputs": {"json": json.dumps(SCHEMA)}}
LONG, ABORTED, THINK_S = 1 / 20, 1 / 30, 1.0
MINUTE = 60.0


@dataclass(frozen=True)
class Settings:
    minutes: float
    streams: int
    decoding: str
    layers: int
    pages: int | None
    tiny: bool
    grown: float


@dataclass(frozen=True)
class Minute:
    """What had happened by the end of one minute. Memory in MiB."""

    requests: int
    failed: int
    tokens_per_s: float
    longest_step_ms: float
    preemptions: int
    captures: int
    compilations: int
    uncaptured: dict[str, int]
    device: float
    """Memory that torch holds on the device."""
    process: float
    """Resident memory."""
    pages: int
    """Pages held by requests."""


class Streams:
    """Streams that each have one request at a time, or think."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self._engine = engine
        self._rng = random.Random(0)
        self._waiting = [(self._rng.uniform(0, 2 * THINK_S), stream) for stream in range(settings.streams)]
        self._stream_of: dict[str, int] = {}
        self._doomed: dict[str, int] = {}
        """Request -> tokens after which it is aborted."""
        self._longest = engine.loaded.target.max_length - 300
        self._kinds = PARAMS if importlib.util.find_spec("llguidance") is None else (*PARAMS, GRAMMAR)
        self.sent = 0
        self.failed = 0
        self.reported = 0

    def arrive(self, now: float) -> None:
        """Send the requests that are due."""
        due = [stream for when, stream in self._waiting if when <= now]
        self._waiting = [each for each in self._waiting if each[0] > now]
        for stream in due:
            name = str(self.sent)
            self.sent += 1
            self._stream_of[name] = stream
            prompt, params = self._request()
            if self._rng.random() < ABORTED:
                self._doomed[name] = self._rng.randint(0, params.max_tokens or 1)
            self._engine.add(name, prompt, params)

    def step(self, now: float) -> int:
        """One step of the engine. Returns the tokens that it emitted."""
        emitted = 0
        for output in self._engine.step():
            name, count = output.request.id, len(output.request.output_ids)
            emitted += len(output.new_token_ids)
            self.reported += len([*(output.logprobs or ()), *(output.prompt_logprobs or ())])  # made when looked at
            if not output.finished and count > self._doomed.get(name, count):
                self._engine.abort(name)
            elif not output.finished:
                continue
            self.failed += output.request.finish_reason == "error"
            self._doomed.pop(name, None)
            self._waiting.append((now + self._rng.uniform(0, THINK_S), self._stream_of.pop(name)))
        return emitted

    def _request(self) -> tuple[list[int], SamplingParams]:
        rng = self._rng
        length = rng.randint(1, min(6000, self._longest) if rng.random() < LONG else min(1024, self._longest))
        asked = rng.choice(self._kinds)
        params = SamplingParams(
            **asked,
            seed=rng.randrange(2**32),
            max_tokens=rng.randint(max(asked.get("min_tokens", 1), 1), 256),
            ignore_eos="structured_outputs" not in asked and rng.random() < 0.7,
            speculation=rng.choice((None, "off")),
        )
        return rng.choices(range(10, 4000), k=length), params


def main() -> int:
    settings, json_file = read_options()
    console = Console(width=170)
    if not settings.tiny and not torch.cuda.is_available():
        console.print("this benchmark needs a GPU, and torch sees no CUDA device here; --tiny does without")
        return 1
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        engine = open_engine(Path(folder), settings)
        console.print(f"{settings.decoding}: ready after {time.perf_counter() - began:.1f} s")
        logging.basicConfig()
        logging.getLogger("stridelm.kernels.compilations").setLevel(logging.DEBUG)  # what should not be is named
        minutes = []
        for minute in serve(engine, settings):
            minutes.append(minute)
            console.print(minute)
            if minute.captures or minute.compilations or minute.failed:
                break  # found, so the rest of the time would be wasted
    faults = find_faults(minutes, settings)
    console.print(
        f"{minutes[-1].requests} requests; " + ("; ".join(faults) or "nothing captured, compiled, kept or held")
    )
    if json_file:
        append_result(json_file, "soak", settings, rows=[asdict(minute) for minute in minutes], faults=faults)
    return bool(faults)


def read_options() -> tuple[Settings, Path | None]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--streams", type=int, default=96)
    parser.add_argument("--decoding", default="eagle@3", help="plain, drafter@depth or drafter@auto (default: eagle@3)")
    parser.add_argument("--layers", type=int, help="of the 8B shape (default: all 32)")
    parser.add_argument("--pages", type=int, help="of the pool (default: 400 tokens for each stream)")
    parser.add_argument("--grown", type=float, default=0.05, help="share by which memory may grow (default: 0.05)")
    parser.add_argument("--tiny", action="store_true", help="the built-in model; needs no GPU")
    parser.add_argument("--json", type=Path, metavar="FILE", help=JSON_HELP)
    args = parser.parse_args()
    if args.tiny and args.layers is not None:
        parser.error("--layers is of the 8B shape, and --tiny is another model; leave one of them out")
    decoding = "ngram@3" if args.tiny and args.decoding == parser.get_default("decoding") else args.decoding
    layers = args.layers or LLAMA_8B["num_hidden_layers"]
    settings = Settings(args.minutes, args.streams, decoding, layers, args.pages, args.tiny, args.grown)
    return settings, args.json


def open_engine(folder: Path, settings: Settings) -> Engine:
    page = EngineConfig.page_size
    config = EngineConfig(
        **engine_options(folder, [settings.decoding], settings.layers, tiny=settings.tiny),
        **speculation_options(settings.decoding),
        max_num_seqs=settings.streams,
        num_pages=settings.pages or max(settings.streams * 400, 6400) // page,
    )
    return Engine(config)


def serve(engine: Engine, settings: Settings) -> Iterator[Minute]:
    """The minutes, and one more line when the last request has ended."""
    streams, before = Streams(engine, settings), asdict(engine.stats)
    end, ends, began = settings.minutes * MINUTE, MINUTE, time.perf_counter()
    longest = now = since = 0.0
    emitted = 0

    def minute() -> Minute:
        return Minute(
            requests=streams.sent,
            failed=streams.failed,
            tokens_per_s=emitted / max(now - since, 1e-9),
            longest_step_ms=longest * 1e3,
            preemptions=engine.stats.preemptions - before["preemptions"],
            captures=engine.stats.captures - before["captures"],
            compilations=engine.stats.compilations - before["compilations"],
            uncaptured=dict(Counter(engine.stats.uncaptured) - Counter(before["uncaptured"])),
            device=torch.cuda.memory_reserved() / 2**20 if torch.cuda.is_available() else 0.0,
            process=resident() / 2**20,
            pages=sum(engine.ledger.total()) - sum(engine.ledger.available()),
        )

    while now < end or engine.busy:
        if now < end:
            streams.arrive(now)
        if engine.busy:
            started = time.perf_counter()
            emitted += streams.step(now)
            longest = max(longest, time.perf_counter() - started)
        else:
            time.sleep(0.001)
        now = time.perf_counter() - began
        if now >= ends:
            yield minute()
            emitted, longest, since, ends = 0, 0.0, now, ends + MINUTE
    engine.check()
    yield minute()


def find_faults(minutes: list[Minute], settings: Settings) -> list[str]:
    first, last = minutes[0], minutes[-1]
    found = {
        f"{last.captures} captures": last.captures,
        f"{last.compilations} compilations": last.compilations,
        f"{last.pages} pages held": last.pages,
        f"{last.failed} requests failed": last.failed,
        f"device memory {first.device:.0f} -> {last.device:.0f} MiB": last.device > first.device * (1 + settings.grown),
        f"process {first.process:.0f} -> {last.process:.0f} MiB": last.process > first.process * (1 + settings.grown),
    }
    return [fault for fault, is_there in found.items() if is_there]


def resident() -> int:
    """Bytes of this process in memory."""
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    raise SystemExit(main())
