"""How fast each drafter is, as a ratio to plain decoding.

Plain decoding and the variants take turns on the same prompts in one process, round after round, in alternating order,
with a run of plain decoding for every few variants. A ratio is taken to the neighbouring plain run, so that a machine
that slows down meanwhile does not change it; the figure is the median over the rounds. The prefix cache and what
drafters have learnt are cleared before every run.
If the rule promises plain decoding's output, token for token, the row states whether the outputs were equal.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from stridelm.bench.drive import Run, drive
from stridelm.bench.environment import device_name, dtype_name
from stridelm.bench.metrics import Acceptance, Times, acceptance_of
from stridelm.bench.prompts import PromptSet
from stridelm.bench.settings import LatencySettings
from stridelm.bench.stand import check_variants, checkpoint_name, encode, make_jobs
from stridelm.bench.variants import Variant, plain
from stridelm.engine.engine import Engine
from stridelm.params import SamplingParams

WARM_UP_TOKENS = 8
BESIDE = 3
"""Variants that are compared with one run of plain decoding."""


@dataclass(frozen=True)
class LatencyRow:
    """One variant at one concurrency: the median of its runs."""

    model: str
    device: str
    dtype: str
    deterministic: bool
    label: str
    drafter: str
    acceptance_rule: str
    lossless: bool
    simulated: bool
    """Acceptance was drawn at random: the tokens are not the model's."""
    depth: int
    confidence: float | None
    acceptance_length: float | None
    concurrency: int
    prompt_set: str
    prompt_order: str
    prompts: int
    prompt_tokens: int
    max_tokens: int
    temperature: float
    ignore_eos: bool
    prefix_cache: str
    completion_tokens: int
    """In one run."""
    seconds: float
    tokens_per_s: float
    ratio: float
    """Tokens per second over those of the neighbouring plain run; median over the rounds."""
    ratios: tuple[float, ...]
    """The ratio of each run."""
    times: Times
    """Over the requests of all rounds."""
    steps: int
    rows: int
    acceptance: Acceptance
    peak_pages: int
    page_size: int
    preemptions: int
    identical: bool | None
    """Whether every output of every round was plain decoding's; None if the rule does not promise it."""
    identical_outputs: int
    """How many prompts' outputs were plain decoding's in the first round."""

    def to_json(self) -> dict[str, Any]:
        """Flat except for percentiles and positions."""
        row = asdict(self)
        times, acceptance = row.pop("times"), row.pop("acceptance")
        return {**row, **times, **acceptance}


def count_runs(variants: Sequence[Variant], settings: LatencySettings) -> int:
    """Runs that `measure_latency` makes, warm-up included."""
    every_round = len(variants) + max(1, -(-len(variants) // BESIDE))
    return len(settings.batch) * (1 + len(variants) + settings.repeats * every_round)


def measure_latency(
    engine: Engine,
    variants: Sequence[Variant],
    prompts: PromptSet,
    settings: LatencySettings,
    on_run: Callable[[str], None] = lambda what: None,
) -> list[LatencyRow]:
    """Rows for plain decoding and each variant at each concurrency. on_run is called before each run starts.

    The engine must have room for the largest concurrency, and a prefix cache if `prefix_cache` is "cold". Raises
    ValueError for a variant that cannot be run, and for a prompt that cannot be served.
    """
    check_variants(engine, variants)
    contenders = [plain(engine.loaded.target), *variants]
    rows: list[LatencyRow] = []
    for streams in settings.batch:
        # Prompts are repeated until every stream has one.
        count = max(len(prompts.prompts), streams)
        ids = list(itertools.islice(itertools.cycle(encode(engine, prompts)), count))
        timed = _timed(engine, contenders, ids, streams, settings, on_run)
        rows += [
            _row(engine, variant, runs, beside, prompts, streams, settings)
            for variant, (runs, beside) in zip(contenders, timed, strict=True)
        ]
    return rows


def _timed(
    engine: Engine,
    contenders: Sequence[Variant],
    ids: Sequence[list[int]],
    streams: int,
    settings: LatencySettings,
    on_run: Callable[[str], None],
) -> list[tuple[list[Run], list[Run]]]:
    """For each contender (the first is plain decoding): its runs, and each one's neighbouring run of plain decoding.
    The warm-up is discarded."""
    params = SamplingParams(
        temperature=settings.temperature, max_tokens=settings.max_tokens, ignore_eos=settings.ignore_eos
    )
    first, brief = ids[:streams], replace(params, max_tokens=min(WARM_UP_TOKENS, settings.max_tokens))
    if engine.loaded.device.type == "cuda":
        # Each kind of step is captured when it first occurs, and some kinds occur only at the end of a request.
        first, brief = ids, params
    for variant in contenders:
        on_run(f"{streams} streams, warming up, {variant.label}")
        engine.forget()
        drive(engine, make_jobs(first, variant, brief, settings.seed), streams)
    timed: list[tuple[list[Run], list[Run]]] = [([], []) for _ in contenders]
    turns = [(0, *range(i, min(i + BESIDE, len(contenders)))) for i in range(1, len(contenders), BESIDE)] or [(0,)]
    for repeat in range(settings.repeats):
        back = -1 if repeat % 2 else 1
        for turn in turns[::back]:
            runs: dict[int, Run] = {}
            for i in turn[::back]:
                on_run(f"{streams} streams, round {repeat + 1}, {contenders[i].label}")
                engine.forget()
                runs[i] = drive(engine, make_jobs(ids, contenders[i], params, settings.seed), streams)
            for i, run in runs.items():
                timed[i][0].append(run)
                timed[i][1].append(runs[0])
    return timed


def _row(
    engine: Engine,
    variant: Variant,
    runs: Sequence[Run],
    plain_runs: Sequence[Run],
    prompts: PromptSet,
    streams: int,
    settings: LatencySettings,
) -> LatencyRow:
    ratios = tuple(run.tokens_per_s / base.tokens_per_s for run, base in zip(runs, plain_runs, strict=True))
    middle = sorted(runs, key=lambda run: run.seconds)[len(runs) // 2]
    timelines = [timeline for run in runs for timeline in run.timelines]
    truth = [timeline.token_ids for timeline in plain_runs[0].timelines]
    same = [[t.token_ids == tokens for t, tokens in zip(run.timelines, truth, strict=True)] for run in runs]
    speculation = variant.speculation
    return LatencyRow(
        model=checkpoint_name(engine),
        device=device_name(engine),
        dtype=dtype_name(engine),
        deterministic=engine.config.deterministic is not False and engine.loaded.device.type == "cpu",
        label=variant.label,
        drafter=variant.drafter,
        acceptance_rule=variant.acceptance,
        lossless=variant.lossless,
        simulated=variant.simulated,
        depth=speculation.depth or 0,
        confidence=speculation.given.get("confidence"),
        acceptance_length=speculation.acceptance_length,
        concurrency=streams,
        prompt_set=prompts.name,
        prompt_order="as in the set",
        prompts=len(truth),
        prompt_tokens=sum(len(t.request.prompt_ids) for t in runs[0].timelines),
        max_tokens=settings.max_tokens,
        temperature=settings.temperature,
        ignore_eos=settings.ignore_eos,
        prefix_cache=settings.prefix_cache,
        completion_tokens=middle.tokens,
        seconds=statistics.median(run.seconds for run in runs),
        tokens_per_s=statistics.median(run.tokens_per_s for run in runs),
        ratio=statistics.median(ratios),
        ratios=ratios,
        times=Times.of(timelines),
        steps=middle.steps,
        rows=middle.rows,
        acceptance=acceptance_of(timelines),
        peak_pages=max(run.peak_pages for run in runs),
        page_size=engine.config.page_size,
        preemptions=max(run.preemptions for run in runs),
        identical=all(all(run) for run in same) if variant.repeats(settings.temperature) else None,
        identical_outputs=sum(same[0]),
    )
