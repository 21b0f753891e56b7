"""Tokens per step of each drafter, by how much the text repeats itself.

A prompt's bucket is decided by the share of distinct 4-grams in its plain continuation at the same temperature and
seed, the same for all drafters. The headline is the bucket above 0.6; the others show how much loops would flatter.
The prefix cache and what drafters have learnt are cleared before every run, so that no drafter has seen the answers.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from stridelm.bench.drive import Timeline, drive
from stridelm.bench.environment import device_name, dtype_name
from stridelm.bench.metrics import Acceptance, acceptance_of
from stridelm.bench.prompts import PromptSet
from stridelm.bench.repetition import BUCKETS, SHORTEST, Bucket, bucket_of, distinct_share, loop_start
from stridelm.bench.settings import AcceptanceSettings
from stridelm.bench.stand import check_variants, checkpoint_name, encode, make_jobs
from stridelm.bench.variants import Variant, plain
from stridelm.engine.engine import Engine
from stridelm.params import SamplingParams

ALL = Bucket("all")


@dataclass(frozen=True)
class AcceptanceRow:
    """One variant at one temperature on the prompts of one bucket."""

    model: str
    device: str
    dtype: str
    label: str
    drafter: str
    acceptance_rule: str
    lossless: bool
    simulated: bool
    """Acceptance was drawn at random: the tokens are not the model's."""
    depth: int
    confidence: float | None
    acceptance_length: float | None
    temperature: float
    bucket: str
    headline: bool
    prompt_set: str
    prompts: int
    max_tokens: int
    completion_tokens: int
    acceptance: Acceptance | None
    """None if the bucket is empty."""
    identical: bool | None
    """Whether every output was plain decoding's; None if the rule does not promise it."""
    identical_outputs: int

    def to_json(self) -> dict[str, Any]:
        row = asdict(self)
        acceptance = row.pop("acceptance")
        return {**row, **(acceptance or {})}


@dataclass(frozen=True)
class PlainText:
    """Plain decoding's output at one temperature."""

    temperature: float
    prompts: int
    too_short: int
    """Continuations that ended before their repetition could be judged; they are in no bucket."""
    buckets: dict[str, int]
    median_distinct_share: float | None
    loops: int
    """Continuations that end in a loop."""
    loop_share: float
    median_loop_start: float | None
    """Tokens before the loop begins."""

    @classmethod
    def of(cls, temperature: float, outputs: Sequence[list[int]]) -> PlainText:
        homes = [bucket_of(tokens) for tokens in outputs]
        shares = [share for tokens in outputs if (share := distinct_share(tokens)) is not None]
        starts = [start for tokens in outputs if (start := loop_start(tokens)) is not None]
        return cls(
            temperature=temperature,
            prompts=len(outputs),
            too_short=homes.count(None),
            buckets={bucket.name: homes.count(bucket) for bucket in BUCKETS},
            median_distinct_share=statistics.median(shares) if shares else None,
            loops=len(starts),
            loop_share=len(starts) / len(outputs),
            median_loop_start=statistics.median(starts) if starts else None,
        )


@dataclass(frozen=True)
class AcceptanceReport:
    rows: list[AcceptanceRow]
    plain: list[PlainText]


def count_runs(variants: Sequence[Variant], settings: AcceptanceSettings) -> int:
    """Runs that `measure_acceptance` makes."""
    return len(settings.temperature) * (1 + len(variants))


def measure_acceptance(
    engine: Engine,
    variants: Sequence[Variant],
    prompts: PromptSet,
    settings: AcceptanceSettings,
    on_run: Callable[[str], None] = lambda what: None,
) -> AcceptanceReport:
    """Rows for each variant, temperature and bucket, and for all prompts together. Raises ValueError for a variant
    that cannot be run, a prompt that cannot be served, and a max_tokens too small to judge repetition."""
    if settings.max_tokens < SHORTEST:
        raise ValueError(f"max_tokens {settings.max_tokens} is too few to judge repetition; give at least {SHORTEST}")
    check_variants(engine, variants)
    ids = encode(engine, prompts)
    rows: list[AcceptanceRow] = []
    texts: list[PlainText] = []
    for temperature in settings.temperature:
        params = SamplingParams(temperature=temperature, max_tokens=settings.max_tokens)

        def run(variant: Variant, params: SamplingParams = params) -> tuple[Timeline, ...]:
            on_run(f"temperature {params.temperature:g}, {variant.label}")
            engine.forget()
            return drive(engine, make_jobs(ids, variant, params, settings.seed), settings.batch).timelines

        truth = [timeline.token_ids for timeline in run(plain(engine.loaded.target))]
        texts.append(PlainText.of(temperature, truth))
        for variant in variants:
            rows += _rows(engine, variant, temperature, run(variant), truth, prompts, settings)
    return AcceptanceReport(rows, texts)


def _rows(
    engine: Engine,
    variant: Variant,
    temperature: float,
    timelines: Sequence[Timeline],
    truth: Sequence[list[int]],
    prompts: PromptSet,
    settings: AcceptanceSettings,
) -> list[AcceptanceRow]:
    homes = [bucket_of(tokens) for tokens in truth]
    rows = []
    for bucket in (*BUCKETS, ALL):
        chosen = [i for i, home in enumerate(homes) if bucket is ALL or home is bucket]
        members = [timelines[i] for i in chosen]
        same = [timelines[i].token_ids == truth[i] for i in chosen]
        rows.append(
            AcceptanceRow(
                model=checkpoint_name(engine),
                device=device_name(engine),
                dtype=dtype_name(engine),
                label=variant.label,
                drafter=variant.drafter,
                acceptance_rule=variant.acceptance,
                lossless=variant.lossless,
                simulated=variant.simulated,
                depth=variant.speculation.depth or 0,
                confidence=variant.speculation.given.get("confidence"),
                acceptance_length=variant.speculation.acceptance_length,
                temperature=temperature,
                bucket=bucket.name,
                headline=bucket.headline,
                prompt_set=prompts.name,
                prompts=len(members),
                max_tokens=settings.max_tokens,
                completion_tokens=sum(len(timeline.token_ids) for timeline in members),
                acceptance=acceptance_of(members) if members else None,
                identical=all(same) if variant.repeats(temperature) else None,
                identical_outputs=sum(same),
            )
        )
    return rows
