"""Whichever of a head and lookup drafts, and however often that changes: the output is plain decoding's, and the head
knows what it would know if it had always drafted."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from stridelm import SamplingParams
from stridelm.cache.layout import FULL
from stridelm.draft import DRAFTERS
from stridelm.engine.engine import Engine
from stridelm.types import Request
from support.checks.identity import check_identity, prompts, sampling
from support.doubles.bounds import LaggingStand, bounds_registered
from support.doubles.replays import replays
from support.doubles.stand import Job, Stand

pytestmark = pytest.mark.skipif(
    not {"hybrid", "mtp", "eagle", "model"} <= {*DRAFTERS}, reason="a drafter is not installed"
)
PARTNERS = ("mtp", "eagle", "model")
CAPTURED = "captured"
WAYS = ("at once", "in flight", CAPTURED)


@pytest.fixture(scope="module")
def stands(checkpoint: Callable[..., Path]) -> Iterator[dict[str, Stand]]:
    path = checkpoint("qwen3", tie_word_embeddings=True)
    with bounds_registered():
        lagging = LaggingStand(path, "float32")
        yield {"at once": Stand(path, "float32"), "in flight": lagging, CAPTURED: lagging}


def weights(stand: Stand, partner: str) -> list[str]:
    return [path for path in stand.heads if Path(path).name == partner]


def choose_at_random(engine: Engine, seed: int) -> list[bool]:
    """From now on chance decides, also for lookup where nothing was found. Returns what it decided, as it grows."""
    rng, made = random.Random(seed), list[bool]()
    ops = engine.tokens.ops
    choose = ops.choose_sources

    def at_random(*found: Any) -> torch.Tensor:
        chosen = choose(*found)
        made.extend(rng.random() < 0.5 for _ in chosen)
        return torch.tensor(made[-len(chosen) :])

    ops.choose_sources = at_random  # type: ignore[assignment, method-assign]
    return made


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("partner", PARTNERS)
def test_any_choice(stands: dict[str, Stand], partner: str, temperature: float) -> None:
    """Chosen by chance for each request and step, with chunks, prefix hits and preemption: plain decoding's output."""
    stand = stands["at once"]
    kind = {"drafter": "hybrid", "depth": 5}
    jobs = [
        Job(prompt, sampling(stand, prompt, temperature, "nothing"), kind) for prompt in prompts(stand, 8, len(partner))
    ]
    crowded: dict[str, Any] = {"page_size": 4, "max_num_seqs": 5, "max_num_batched_tokens": 24, "num_pages": 40}
    llm = stand.llm(drafter="hybrid", drafter_model=weights(stand, partner), **crowded)
    made = choose_at_random(llm.engine, 1)
    for _ in range(2):  # the second time prompts are found
        check_identity(stand, jobs, llm=llm)
    assert {True, False} <= {*made}


def serve(stand: Stand, way: str, partner: str, drafter: str, count: int, length: int) -> tuple[Engine, list[Request]]:
    options: dict[str, Any] = {"drafter": drafter, "drafter_model": weights(stand, partner), "page_size": 4}
    engine = stand.llm(**options).engine
    if way == CAPTURED:
        replays(engine)
    if drafter == "hybrid" and way != CAPTURED:  # in a graph nothing may come from the host
        choose_at_random(engine, 2)
    params = SamplingParams(temperature=0.0, max_tokens=length + 40, ignore_eos=True)
    requests = [engine.add(str(i), prompt, params) for i, prompt in enumerate(prompts(stand, count, seed=3))]
    while any(len(request.output_ids) < length for request in requests):
        engine.step()
    return engine, requests


def entries(engine: Engine, partner: str, request: Request, tokens: int) -> list[torch.Tensor]:
    """What the partner has stored for the request's first tokens."""
    pool = engine.drafters.get(partner)._runner.pool  # type: ignore[attr-defined]
    pages, size = engine.ledger.table(request, FULL), engine.config.page_size
    rows = [page * size + at for page in pages for at in range(size)][:tokens]
    return [tensor[rows] for tensor in pool.tensors]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("partner", PARTNERS)
def test_the_head_follows(stands: dict[str, Stand], partner: str, way: str) -> None:
    """Bit for bit, its entries for every committed token are those of an engine in which it always drafted."""
    stand, count, length = stands[way], 3, 30
    always, alone = serve(stand, way, partner, partner, count, length)
    engine, requests = serve(stand, way, partner, "hybrid", count, length)
    for ours, theirs in zip(requests, alone, strict=True):
        assert ours.output_ids[:length] == theirs.output_ids[:length]
        both = len(ours.prompt_ids) + length - 8  # what a small model runs at its next proposal is not there yet
        mine, wanted = entries(engine, partner, ours, both), entries(always, partner, theirs, both)
        assert all(map(torch.equal, mine, wanted))
    assert {source for request in requests for source in request.stats.by_source} == {partner, "lookup"}
    assert engine.drafters.get("hybrid").partner is engine.drafters.get(partner)  # type: ignore[attr-defined]


def test_pages_are_shared_with_the_head_itself(stands: dict[str, Stand]) -> None:
    """A prompt served by `hybrid` is a prefix hit for a request that names the head, and the other way round."""
    stand = stands["at once"]
    prompt = prompts(stand, 1, seed=5)[0] * 3
    for first, second in (("hybrid", "mtp"), ("mtp", "hybrid")):
        llm = stand.llm(page_size=4)
        params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
        hits = []
        for name in (first, second):
            [output] = stand.run([Job(prompt, params, {"drafter": name})], llm)
            assert output.metrics is not None
            hits.append(output.metrics.cached_tokens)
        assert hits[0] == 0 and hits[1] > len(prompt) // 2


def test_memory_is_counted_once(stands: dict[str, Stand]) -> None:
    """It needs what its head needs."""
    stand = stands["at once"]
    target, model = stand.target, stand._reference.engine.loaded.model
    assert DRAFTERS.get("hybrid").memory_need(target, model) == DRAFTERS.get("mtp").memory_need(target, model)
