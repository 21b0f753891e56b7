"""What requests meet in process: bursts, arrivals and a closed loop, from the moment that the engine is ready.

    python benchmarks/live_load.py --decoding plain,eagle@3:synthetic:2.5 --json results/live_load.jsonl
    python benchmarks/live_load.py --decoding plain --loads closed16,closed64,closed256 --plot live_load.svg
    python benchmarks/live_load.py --decoding plain,ngram@3,ngram@3+plain --loads burst,burst
    python benchmarks/live_load.py --tiny --decoding plain,ngram@3 --loads 2,closed4 --seconds 5

Llama-3.1-8B's shape in bfloat16, weights random, no prefix cache, at most 256 requests at once, 8,192 rows per step.
--tiny is the built-in model, on the CPU if there is no GPU.

A burst is 384 requests at once; arrivals are a Poisson process. Their prompts have 32 to 1,024 random tokens and
outputs 16 to 512. In a closed loop of N streams each stream adds its next request when the last has ended, with prompts
of 128 to 512 tokens and outputs of 128 to 384, as http_load.py does over HTTP; only a window after the warm-up counts.
All lengths are equally likely, and requests are the same for every kind of decoding.

The first token's time runs from a request's arrival. An event is a step that emits for a request: what its client
would receive. A token's time is that between two events, divided by the tokens that the later one emitted. Captures and
compilations are those that happened while requests waited.

mask@3:synthetic:2.5 and the like emit 2.5 tokens per step because they were told to: acceptance is simulated. A sum
like ngram@3+plain is requests that are decoded in these ways by turns, in one engine whose default is the first.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Protocol

import torch
from gpu_decode import speculation
from load_model import engine_options, speculation_options
from load_report import as_table, plot
from load_requests import Asked, stream_of
from load_times import Exchange, Times
from model_shapes import LLAMA_8B
from rich.console import Console

from stridelm.bench.plot import check_plot
from stridelm.bench.results import append_result
from stridelm.bench.settings import JSON_HELP
from stridelm.config import EngineConfig
from stridelm.engine.engine import Engine
from stridelm.engine.load import load
from stridelm.heap import freeze_heap
from stridelm.params import SamplingParams
from stridelm.schedule.slack import SHORTEST

PROMPT, OUTPUT = (32, 1024), (16, 512)
BURST = 384
CLOSED = "closed"
WARM_UP_S = 10.0


@dataclass(frozen=True)
class LiveSettings:
    decoding: tuple[str, ...]
    loads: tuple[str, ...]
    seconds: float
    warm_up: float
    layers: int
    max_num_seqs: int
    capture: str
    tiny: bool
    itl_target_ms: float


@dataclass(frozen=True)
class Load(Times):
    """One load's results. Times in milliseconds."""

    name: str
    """How it was decoded."""
    load: str
    requests: int
    longest_step: float
    captures: int
    compilations: int
    uncaptured: dict[str, int]


@dataclass
class Seen:
    """One request in the engine. Times in seconds since the load began."""

    arrived: float
    stream: int | None = None
    at: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)


class Traffic(Protocol):
    """When requests arrive."""

    def due(self, now: float) -> list[tuple[Seen, list[int], SamplingParams]]:
        """The requests that have arrived by now, and were not returned before."""

    def ended(self, seen: Seen) -> None:
        """A request has ended."""

    def open(self, now: float) -> bool:
        """Whether more requests will arrive."""


class Timetable:
    """Requests that arrive whatever becomes of the others."""

    def __init__(self, load_of: str, seconds: float, vocab: int) -> None:
        self._waiting = list(requests_of(load_of, seconds, vocab))[::-1]

    def due(self, now: float) -> list[tuple[Seen, list[int], SamplingParams]]:
        due = []
        while self._waiting and self._waiting[-1][0] <= now:
            arrived, prompt, params = self._waiting.pop()
            due.append((Seen(arrived), prompt, params))
        return due

    def ended(self, seen: Seen) -> None:
        pass

    def open(self, now: float) -> bool:
        return bool(self._waiting)


class ClosedLoop:
    """Streams whose first requests are spread over half of the warm-up, and which stop at the end of the window."""

    def __init__(self, streams: int, warm_up: float, seconds: float) -> None:
        self._streams = [stream_of(index, streams) for index in range(streams)]
        self._free = [(warm_up / 2 * index / streams, index) for index in range(streams)]
        self._end = warm_up + seconds

    def due(self, now: float) -> list[tuple[Seen, list[int], SamplingParams]]:
        if now >= self._end:
            return []
        ready = [index for when, index in self._free if when <= now]
        self._free = [each for each in self._free if each[0] > now]
        return [(Seen(now, index), *engine_request(next(self._streams[index]))) for index in ready]

    def ended(self, seen: Seen) -> None:
        assert seen.stream is not None
        self._free.append((0.0, seen.stream))

    def open(self, now: float) -> bool:
        return now < self._end


def engine_request(asked: Asked) -> tuple[list[int], SamplingParams]:
    return asked.prompt, SamplingParams(temperature=0.0, max_tokens=asked.max_tokens, ignore_eos=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--decoding", default="plain,eagle@3:synthetic:2.5", help="see above; sums are mixtures")
    parser.add_argument("--loads", default="burst,burst,4,12,24", help="burst, requests per second, or closedN")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long requests arrive; a closed loop's window")
    parser.add_argument("--warm-up", type=float, help="seconds of a closed loop before its window (default: 10)")
    parser.add_argument("--layers", type=int, help="of the 8B shape (default: all 32)")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--capture", default="startup", help="startup or lazy")
    parser.add_argument("--itl-target-ms", type=float, default=EngineConfig.itl_target_ms, help="as for stride serve")
    parser.add_argument("--tiny", action="store_true", help="the built-in model; needs no GPU")
    parser.add_argument("--json", type=Path, metavar="FILE", help=JSON_HELP)
    parser.add_argument("--plot", type=Path, help="a chart of times over loads (.svg, .png)")
    args = parser.parse_args()
    decoding, loads = tuple(args.decoding.split(",")), tuple(args.loads.split(","))
    if args.warm_up is not None and not any(each.startswith(CLOSED) for each in loads):
        parser.error("--warm-up has an effect only on closed loops; leave it out, or add closedN to --loads")
    if args.tiny and args.layers is not None:
        parser.error("--layers is of the 8B shape, and --tiny is another model; leave one of them out")
    settings = LiveSettings(
        decoding,
        loads,
        args.seconds,
        WARM_UP_S if args.warm_up is None else args.warm_up,
        args.layers or LLAMA_8B["num_hidden_layers"],
        args.max_num_seqs,
        args.capture,
        args.tiny,
        args.itl_target_ms,
    )
    console = Console(width=170)
    if args.plot:
        check_plot(args.plot)
    if not settings.tiny and not torch.cuda.is_available():
        console.print("this benchmark needs a GPU, and torch sees no CUDA device here; --tiny does without")
        return 1
    rows: list[Load] = []
    starts: dict[str, float] = {}
    for kind in settings.decoding:
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            engine = open_engine(Path(folder), kind, settings)
        starts[kind] = time.perf_counter() - began
        freeze_heap()
        graphs = 0 if engine.capture is None else engine.capture.pool.spent / 2**30
        console.print(f"{kind}: ready after {starts[kind]:.1f} s, {engine.stats.captures} graphs, {graphs:.2f} GiB")
        for load_of in settings.loads:
            rows.append(measure(engine, kind, load_of, settings))
            console.print(rows[-1])
        del engine
        gc.unfreeze()
        gc.collect()
        torch.cuda.empty_cache()
    made = [f"{row.captures}+{row.compilations}" for row in rows]
    console.print(as_table(rows, {"longest step": [f"{row.longest_step:.1f}" for row in rows], "captures": made}))
    if args.json:
        append_result(args.json, "live_load", settings, rows=[asdict(row) for row in rows], ready_s=starts)
    if args.plot:
        plot(rows, args.plot)
    return 0


def open_engine(folder: Path, decoding: str, settings: LiveSettings) -> Engine:
    ways = decoding.split("+")
    config = EngineConfig(
        **engine_options(folder, ways, settings.layers, tiny=settings.tiny),
        **speculation_options(ways[0]),
        skip_tokenizer_init=True,
        max_num_seqs=settings.max_num_seqs,
        capture=settings.capture,
        itl_target_ms=settings.itl_target_ms,
    )
    return Engine(config, load(config))


def measure(engine: Engine, decoding: str, load_of: str, settings: LiveSettings) -> Load:
    """Serve one load from its first request to its last token."""
    before = (engine.stats.captures, engine.stats.compilations, dict(engine.stats.uncaptured))
    traffic: Traffic
    window: tuple[float, float] | None = None
    if load_of.startswith(CLOSED):
        traffic = ClosedLoop(int(load_of.removeprefix(CLOSED)), settings.warm_up, settings.seconds)
        window = settings.warm_up, settings.warm_up + settings.seconds
    else:
        traffic = Timetable(load_of, settings.seconds, engine.loaded.target.vocab_size)
    requests: dict[str, Seen] = {}
    ways = itertools.cycle([None, *map(speculation, decoding.split("+")[1:])])  # None: the engine's own
    longest = now = 0.0
    began = time.perf_counter()
    while engine.busy or traffic.open(now):
        now = time.perf_counter() - began
        for seen, prompt, params in traffic.due(now):
            name = f"{load_of} {len(requests)}"
            engine.add(name, prompt, replace(params, speculation=next(ways)))
            requests[name] = seen
        if not engine.busy or (engine.slack and traffic.open(now)):
            time.sleep(SHORTEST)
            continue
        started = time.perf_counter()
        outputs = engine.step()
        now = time.perf_counter() - began
        longest = max(longest, now - (started - began))
        for output in outputs:
            seen = requests[output.request.id]
            if output.new_token_ids:
                seen.at.append(now)
                seen.counts.append(len(output.new_token_ids))
            if output.finished:
                traffic.ended(seen)
    exchanges = [Exchange(seen.arrived, seen.at, seen.counts) for seen in requests.values()]
    stats = engine.stats
    return Load(
        **asdict(Times.of(exchanges, *(window or (0.0, now)))),
        name=decoding,
        load=load_of,
        requests=len(requests),
        longest_step=longest * 1e3,
        captures=stats.captures - before[0],
        compilations=stats.compilations - before[1],
        uncaptured={reason: steps - before[2].get(reason, 0) for reason, steps in stats.uncaptured.items()},
    )


def requests_of(load_of: str, seconds: float, vocab: int) -> Iterator[tuple[float, list[int], SamplingParams]]:
    """(when it arrives, prompt, parameters), in order of arrival."""
    rng, due = random.Random(0), 0.0
    for _ in range(BURST) if load_of == "burst" else range(int(float(load_of) * seconds)):
        prompt = [rng.randrange(vocab) for _ in range(rng.randint(*PROMPT))]
        yield due, prompt, SamplingParams(temperature=0.0, max_tokens=rng.randint(*OUTPUT), ignore_eos=True)
        due += 0.0 if load_of == "burst" else rng.expovariate(float(load_of))


if __name__ == "__main__":
    raise SystemExit(main())
