"""What the requests of a scenario are like: their lengths, and how often their drafts are accepted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from stridelm.bench.cost.settings import CostSettings
from stridelm.bench.drive import Job, drive
from stridelm.bench.serving.cells import asks_of
from stridelm.bench.serving.in_process import params_of
from stridelm.bench.serving.settings import ServingSettings
from stridelm.engine.engine import Engine
from stridelm.params import Speculation
from stridelm.simulate.table import PLAIN, RecordedRequest
from stridelm.types import Request
from stridelm.verify import RULES


def recorded_requests(
    engine: Engine, drafters: Mapping[str, Speculation], settings: CostSettings, advance: Callable[[int], None]
) -> tuple[RecordedRequest, ...]:
    """The scenario's, with the share of each level's drafts that were accepted. Random weights say nothing of that,
    unless acceptance is simulated."""
    assert engine.tokenizer is not None
    same = ServingSettings(num_prompts=settings.num_prompts, max_tokens=settings.max_tokens, seed=settings.seed)
    asks = asks_of(settings.scenario, same, ignore_eos=True)
    prompts = [engine.tokenizer.encode(ask.prompt.text) for ask in asks]
    chances: list[dict[str, tuple[float, ...]]] = [{} for _ in asks]
    known = engine.loaded.target.weighted or RULES.get(settings.acceptance.partition(":")[0]).simulated
    for name, speculation in drafters.items():
        if name == PLAIN:
            continue
        advance(1)
        if not known:
            continue
        jobs = [Job(ids, params_of(ask, speculation)) for ids, ask in zip(prompts, asks, strict=True)]
        run = drive(engine, jobs, min(max(settings.max_concurrency), len(jobs)))
        requests = [timeline.request for timeline in run.timelines]
        for mine, levels in zip(chances, _shares(requests, speculation.depth or 0), strict=True):
            mine[name] = levels
    return tuple(
        RecordedRequest(len(ids), ask.max_tokens, mine) for ids, ask, mine in zip(prompts, asks, chances, strict=True)
    )


def _shares(requests: Sequence[Request], depth: int) -> list[tuple[float, ...]]:
    """For each request, the share of its drafts that were accepted at each level; where none came so far, the share of
    all requests."""
    right = [[_at(request.stats.accepted_at, level) for level in range(depth)] for request in requests]
    tried = [[_at(request.stats.reached_at, level) for level in range(depth)] for request in requests]
    means = [sum(r[level] for r in right) / max(1, sum(t[level] for t in tried)) for level in range(depth)]
    return [
        tuple(r[level] / t[level] if t[level] else means[level] for level in range(depth))
        for r, t in zip(right, tried, strict=True)
    ]


def _at(counts: Sequence[int], level: int) -> int:
    return counts[level] if level < len(counts) else 0
