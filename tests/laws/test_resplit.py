"""Memory moves between page groups while requests run: no page is lost, no entry, and no token changes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from stridelm import SamplingParams
from stridelm.cache.backing import HostMemory
from stridelm.cache.layout import HeadsKV, windows_of
from stridelm.cache.ledger import Ledger
from stridelm.cache.pool import Elastic, MemoryBudget, PagePool
from stridelm.config import EngineConfig
from stridelm.engine import load
from stridelm.engine.engine import Engine
from stridelm.engine.resplit import Resplit
from stridelm.params import Speculation
from stridelm.types import Request, Span, StepPlan
from support.checks.identity import check_identity, mixed_jobs
from support.doubles.bounds import LaggingStand, bounds_registered
from support.doubles.ranks import ThreadShard, on_each_rank
from support.doubles.stand import Job, Stand, assert_same
from support.doubles.tight_memory import forced, random_totals, tight
from support.doubles.tree_drafter import registered
from support.oracles.models import VARIANTS

WINDOW, PAGE_SIZE, KIB = 9, 4, 1024
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": {
        "layer_types": ["full_attention", "sliding_attention"],
        "sliding_window": WINDOW,
        "use_sliding_window": True,
    },
    "gemma4_text": VARIANTS["gemma4_text"]["shared-with-inputs"],
    "mistral": {"sliding_window": WINDOW},
}
"""Mistral's layers all slide: its other group is that of the default drafter's own layers."""
OPTIONS: dict[str, Any] = {"page_size": PAGE_SIZE, "max_num_batched_tokens": 40, "max_num_seqs": 8}


@pytest.fixture(scope="module", autouse=True)
def _doubles() -> Iterator[None]:
    with registered(), bounds_registered():
        yield


@pytest.fixture(params=MODELS)
def stand(request: pytest.FixtureRequest, checkpoint: Callable[..., Path]) -> Stand:
    return Stand(checkpoint(request.param, **MODELS[request.param]), "float32")


@pytest.mark.parametrize("lags", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_do_not_change(stand: Stand, temperature: float, lags: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every drafter, chunks, prefix hits and preemptions, while memory moves before every other step."""
    if lags:
        stand = LaggingStand(stand.path, stand.dtype)
    jobs = mixed_jobs(stand, 10, temperature, ["nothing", "repetition_penalty", "logprobs"], seed=3)
    drafter = "mtp" if "mistral" in stand.path.name else "none"
    llm = tight(stand, 320 * KIB, monkeypatch, **OPTIONS, drafter=drafter)
    for seed in range(2):
        with forced(llm.engine, seed, monkeypatch) as moved:
            check_identity(stand, jobs, llm=llm)
        assert sum(moved) > 10
    assert llm.engine.stats.failed == 0


def test_traffic_moves_memory(checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Many short requests, then few long ones: each kind gets the pages that it needs, more of them run at once than
    with the split of the start, and outputs are plain decoding's."""
    stand = Stand(checkpoint("qwen2", **MODELS["qwen2"], max_position_embeddings=512), "float32")
    short = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    long = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    waves = [
        [Job([(7 * n + i) % 60 for n in range(8)], short) for i in range(40)],
        [Job([(5 * n + i) % 60 for n in range(150)], long) for i in range(3)],
    ]
    options = {**OPTIONS, "max_num_seqs": 40, "max_num_batched_tokens": 64}
    most: dict[bool, list[int]] = {}
    for moves in (True, False):
        llm = tight(stand, 400 * KIB, monkeypatch, **options)
        engine = llm.engine
        if not moves:
            monkeypatch.setattr(engine.resplit, "totals", lambda *args, **options: None)
        most[moves] = []
        for wave in waves * 2:
            outputs, at_once = [engine.add(str(i), job.prompt, job.request) for i, job in enumerate(wave)], 0
            while engine.busy:
                engine.step()
                at_once = max(at_once, len(engine.queue.running))
            most[moves].append(at_once)
            for job, request in zip(wave, outputs, strict=True):
                assert request.output_ids == stand.tokens(job.prompt, job.params)
            engine.check()
        assert (engine.stats.resplits > 0) == moves
        assert engine.stats.resplits < 12, "it swings"
    assert all(with_moves >= without for with_moves, without in zip(most[True], most[False], strict=True)), most
    assert most[True] != most[False], most


def test_one_request_gets_all_that_it_needs(checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A context that the split of the start could not hold is served; one that no split could is refused, with the
    pages that it could have had."""
    stand = Stand(checkpoint("qwen2", **MODELS["qwen2"], max_position_embeddings=256), "float32")
    llm = tight(stand, 60 * KIB, monkeypatch, **{**OPTIONS, "max_num_seqs": 64, "max_num_batched_tokens": 16})
    engine = llm.engine
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    at_start = engine.ledger.counts()["full"]["total"]
    prompt = [(5 * n) % 60 for n in range((at_start + 4) * PAGE_SIZE)]
    (output,) = stand.run([Job(prompt, params)], llm)
    assert engine.ledger.counts()["full"]["total"] > at_start and engine.stats.resplits > 0
    assert_same(output, stand.plain(prompt, params))
    with pytest.raises(ValueError, match=r"may need 63 pages of KV and the pool has 5.;"):
        engine.add("long", [1] * 240, params)


def test_ranks_move_alike(checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank decides for itself: if two decided differently, so would the rows of their steps."""
    stand = Stand(checkpoint("qwen2", **MODELS["qwen2"], max_position_embeddings=256), "float64")
    params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    jobs = [Job([(7 * n + i) % 60 for n in range(30)], params) for i in range(20)]
    config = EngineConfig(
        model=str(stand.path),
        dtype="float64",
        device="cpu",
        deterministic=True,
        skip_tokenizer_init=True,
        strict=True,
        drafter="none",
        max_num_seqs=64,
        max_num_batched_tokens=16,
        page_size=PAGE_SIZE,
        kv_memory_fraction=1.0,
        itl_target_ms=0,  # each rank plans for itself here, and must not plan by its own clock
    )
    wanted = [stand.tokens(job.prompt, job.params) for job in jobs]
    monkeypatch.setattr(load, "MemoryBudget", lambda device, *sizes: MemoryBudget(device, 60 * KIB))

    def run(shard: ThreadShard) -> tuple[list[list[int]], int, dict[str, int]]:
        engine = Engine(config, load.load(config, shard))
        asked = [engine.add(str(number), job.prompt, job.params) for number, job in enumerate(jobs)]
        while engine.busy:
            engine.step()
        engine.check()
        return [one.output_ids for one in asked], engine.stats.resplits, engine.loaded.pool.pages

    (one, other), _ = on_each_rank(2, run)
    assert one == other and one[1] > 0
    assert one[0] == wanted


def test_a_device_that_refuses(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If memory cannot be mapped, the log says so once, requests are served with the split as it is, and later ones are
    measured by it."""
    stand = Stand(checkpoint("qwen2", **MODELS["qwen2"], max_position_embeddings=256), "float32")
    llm = tight(stand, 60 * KIB, monkeypatch, **{**OPTIONS, "max_num_seqs": 64, "max_num_batched_tokens": 16})
    engine, resizes = llm.engine, []

    def refuse(pages: dict[str, int]) -> None:
        resizes.append(pages)
        raise RuntimeError("cuMemCreate failed with CUDA_ERROR_OUT_OF_MEMORY")

    monkeypatch.setattr(engine.loaded.pool, "resize", refuse)
    jobs = [
        Job([(7 * n + i) % 60 for n in range(30)], SamplingParams(temperature=0.0, max_tokens=9)) for i in range(20)
    ]
    check_identity(stand, jobs, llm=llm)
    assert len(resizes) == 1 and caplog.text.count("from now on the split stays") == 1
    assert engine.resplit.most_pages(engine.ledger.total()) == engine.ledger.total()


# Pages and what they hold


STATES = (HeadsKV.of(2, 1, 8), HeadsKV.of(2, 1, 16, 6))


class Traffic:
    """Requests that write their tokens into every layer's entries, and find them there as long as they need them."""

    def __init__(self, seed: int, page_size: int) -> None:
        self.rng = random.Random(seed)
        pages = {"full": 400 // page_size, "window_6": 200 // page_size}
        self.pool = PagePool(
            STATES,
            pages,
            page_size,
            torch.float32,
            torch.device("cpu"),
            elastic=Elastic(HostMemory(), {group: 2 * count for group, count in pages.items()}),
        )
        self.ledger = Ledger(dict(pages), page_size, windows=windows_of(STATES), strict=True)
        self.resplit = Resplit(self.ledger, self.pool, 400, 40)
        self.running: list[Request] = []
        self.texts = [[self.rng.randrange(9) for _ in range(60)] for _ in range(6)]
        self.names = self.hits = self.moves = self.renamed = 0
        move = self.pool.move

        def counting(group: str, renamed: dict[int, int]) -> None:
            self.renamed += len(renamed)
            move(group, renamed)

        self.pool.move = counting  # type: ignore[method-assign,assignment]

    def slots(self, one: Request, group: str, first: int) -> torch.Tensor:
        """Of the request's computed tokens from `first` on."""
        table, size = torch.tensor(self.ledger.table(one, group), dtype=torch.int64), self.ledger.page_size
        index = torch.arange(first, one.computed)
        return table[index // size] * size + index % size

    def admit(self) -> None:
        prompt = self.rng.choice(self.texts)[: self.rng.randint(1, 60)] + [self.rng.randrange(9)]
        one = Request(str(self.names), prompt, SamplingParams(max_tokens=40), Speculation())
        self.names += 1
        self.ledger.admit(one)
        self.hits += one.computed > 0
        self.running.append(one)
        self.read(one)

    def step(self) -> None:
        one = self.rng.choice(self.running)
        real = self.rng.randint(1, one.known - one.computed)
        missing = self.ledger.pages_for(one.computed + real) - self.ledger.table_length(one)
        if missing > min(self.ledger.available()):
            return
        start = one.computed
        with self.ledger.reserve([Span(one, start, real)]) as transaction:
            for state, entries in zip(STATES, self.pool.entries, strict=True):
                table, size = torch.tensor(self.ledger.table(one, state.group)), self.ledger.page_size
                index = torch.arange(start, start + real)
                slots = table[index // size] * size + index % size
                for tensor in entries.values():
                    tensor[slots] = self.written(one, start, start + real)[:, None, None].expand_as(tensor[slots])
            transaction.commit([0])
        if one.computed == one.known:
            one.output_ids.append(self.rng.randrange(2))

    @staticmethod
    def written(one: Request, start: int, end: int) -> torch.Tensor:
        """What entries of these tokens hold: the number of ones up to each, which a prefix shares."""
        return torch.tensor(one.token_ids).cumsum(0)[start:end].float() + 1

    def read(self, one: Request) -> None:
        for state, entries in zip(STATES, self.pool.entries, strict=True):
            first = 0 if state.window is None else max(0, one.computed - state.window + 1)
            slots = self.slots(one, state.group, first)
            for tensor in entries.values():
                wanted = self.written(one, first, one.computed)[:, None, None].expand_as(tensor[slots])
                assert torch.equal(tensor[slots], wanted), one.id

    def leave(self) -> None:
        """A request finishes, is aborted or is preempted."""
        one = self.running.pop(self.rng.randrange(len(self.running)))
        self.read(one)
        self.ledger.release(one)

    def move(self) -> None:
        """At random, or by the policy for a random need. What warms up for it changes nothing."""
        self.resplit.warm_up()
        if self.rng.random() < 0.5:
            self.apply(random_totals(self.pool, self.ledger, self.rng))
            return
        lacking = self.ledger.available().all(0)
        short = self.rng.randrange(2)
        pages = [-available for available in self.ledger.available()]
        pages[short] = self.rng.randint(1, 20)
        plan = StepPlan(lacking=lacking + tuple(pages))
        totals = self.resplit.totals(plan, self.running, stuck=self.rng.random() < 0.5)
        if totals is not None:
            self.apply(totals)

    def apply(self, totals: dict[str, int]) -> None:
        self.resplit.apply(totals)
        self.moves += 1
        assert self.pool.bytes_at(self.pool.pages) <= self.pool.budget
        assert self.pool.pages == {group: each["total"] for group, each in self.ledger.counts().items()}
        for one in self.running:
            self.read(one)


@pytest.mark.parametrize(("seed", "page_size"), [(0, 1), (1, 4), (2, 16)])
def test_nothing_is_lost(seed: int, page_size: int) -> None:
    """Through ten thousand admissions, hits, steps, departures and re-splits, free + cached + held == total in every
    group, and every request finds what was written for its tokens."""
    traffic = Traffic(seed, page_size)
    for turn in range(10_000):
        actions = [traffic.admit, traffic.move]
        if traffic.running:
            actions += [traffic.step] * 6 + [traffic.leave]
        if len(traffic.running) > 12:
            actions += [traffic.leave] * 4
        traffic.rng.choice(actions)()
        if turn % 10 == 0:
            traffic.ledger.check(traffic.running)
        for counts in traffic.ledger.counts().values():
            assert counts["free"] + counts["cached"] + counts["held"] == counts["total"]
    while traffic.running:
        traffic.leave()
    assert all(counts["held"] == 0 for counts in traffic.ledger.counts().values())
    assert traffic.moves > 100 and traffic.hits > 100 and traffic.renamed > 100
