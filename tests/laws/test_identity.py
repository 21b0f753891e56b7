"""Law 3: whatever is drafted, and whatever shares the batch, the output equals plain decoding's, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stridelm import LLM, SamplingParams
from stridelm.draft import DRAFTERS
from stridelm.models import MODELS as ARCHITECTURES
from support.checks.identity import (
    FEATURES,
    LENGTH,
    TEMPERATURES,
    check_alone,
    check_crowd,
    check_identity,
    mixed_jobs,
    prompts,
    sampling,
    teach,
    tree_speculations,
    trusting_neighbours,
)
from support.doubles.stand import DEPTHS, Job, Stand, accepted, all_speculations, cases, depths_of, speculation
from support.doubles.tree_drafter import NAME as TREE
from support.doubles.tree_drafter import registered
from support.oracles.models import VARIANTS

DTYPES = ("bfloat16", "float32")
CHUNKS = (1, 7, 1024)
PAGES = (1, 16)
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": 9},
    "qwen2_moe": {"num_experts": 8},
    "deepseek_v3": {},
    "gemma4_text": VARIANTS["gemma4_text"]["shared-with-inputs"],
}
"""Full attention with a tied head, a window shorter than most trees, experts, latent rows, and layers that read others'
entries."""


@pytest.fixture(scope="module", autouse=True)
def _trees() -> Iterator[None]:
    with registered():
        yield


@pytest.fixture(scope="module")
def stands(checkpoint: Callable[..., Path]) -> Callable[[str, str], Stand]:
    made: dict[tuple[str, str], Stand] = {}

    def get(model: str, dtype: str) -> Stand:
        if (model, dtype) not in made:
            made[model, dtype] = Stand(checkpoint(model, **MODELS[model]), dtype)
        return made[model, dtype]

    return get


@pytest.fixture(scope="module")
def engines(stands: Callable[[str, str], Stand]) -> Callable[[str, str, int], LLM]:
    """engines(model, dtype, page size): an engine that remembers nothing of earlier requests, made once per module."""
    made: dict[tuple[str, str, int], LLM] = {}

    def get(model: str, dtype: str, page_size: int) -> LLM:
        key = model, dtype, page_size
        if key not in made:
            made[key] = stands(model, dtype).llm(page_size=page_size)
        made[key].engine.forget()
        return made[key]

    return get


def turn(values: tuple[Any, ...], *of: object) -> Any:
    """One of the values; the same test gets the same one on every machine."""
    return random.Random(repr(of)).choice(values)


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize(("drafter", "depth"), [*cases(), *((TREE, d) for d in DEPTHS)])
def test_alone(
    stands: Callable[[str, str], Stand],
    engines: Callable[[str, str, int], LLM],
    drafter: str,
    depth: str,
    temperature: float,
) -> None:
    """A request by itself emits the same with every drafter at every depth, in every dtype and model that it serves:
    each of these pairs at two of its depths and temperatures."""
    kinds = {model: stands(model, "float32").target for model in MODELS}
    unable = {model: reason for model, target in kinds.items() if (reason := DRAFTERS.get(drafter).why_not(target))}
    if len(unable) == len(MODELS):
        pytest.skip(f"{drafter}: {unable}")
    able = [(model, dtype) for model in MODELS if model not in unable for dtype in DTYPES]
    twice = [*random.Random(drafter).sample(able, len(able)), *able]
    depths = DEPTHS if drafter == TREE else depths_of(drafter)
    number, count = depths.index(depth) + len(depths) * TEMPERATURES.index(temperature), len(depths) * len(TEMPERATURES)
    for model, dtype in twice[number::count] or able[:1]:
        stand = stands(model, dtype)
        kind = speculation(stand, drafter, depth)
        feature = turn(tuple(FEATURES), drafter, depth, temperature, model, dtype)
        which = [turn((0, 1), dtype, model, temperature, depth, drafter)]
        check_alone(stand, kind, temperature, feature, which, llm=engines(model, dtype, turn(PAGES, feature, dtype)))


@pytest.mark.parametrize("kind", [kind for kind in ARCHITECTURES if kind not in MODELS])
def test_every_architecture(checkpoint: Callable[..., Path], kind: str) -> None:
    """The same for all others: requests with different drafters in one batch, and requests that preempt one another."""
    temperature = turn(TEMPERATURES, kind)
    stand = Stand(checkpoint(kind), turn(DTYPES, kind))
    check_identity(stand, mixed_jobs(stand, 8, temperature, ["nothing", "everything"]), max_num_batched_tokens=33)
    check_crowd(stand, temperature, ["nothing"])


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("feature", FEATURES)
def test_each_parameter(stands: Callable[[str, str], Stand], feature: str, temperature: float) -> None:
    """Each sampling parameter is exact at every row: eight requests that use it, each with its own drafter."""
    stand = stands(turn(tuple(MODELS), feature, temperature), turn(DTYPES, temperature, feature))
    jobs = mixed_jobs(stand, 8, temperature, [feature], seed=len(feature))
    chunk = turn((33, 1024), feature, temperature)
    check_identity(stand, jobs, page_size=turn(PAGES, feature, temperature), max_num_batched_tokens=chunk)


@pytest.mark.parametrize("feature", FEATURES)
def test_parameters_matter(stands: Callable[[str, str], Stand], feature: str) -> None:
    """Each parameter under test changes the output; otherwise its tests would show nothing."""
    stand = stands("qwen3", "float32")
    free = [stand.plain(p, sampling(stand, p, 1.0, "nothing")) for p in prompts(stand, 4)]
    changed = [stand.plain(p, sampling(stand, p, 1.0, feature)) for p in prompts(stand, 4)]
    if feature in ("nothing", "samples", "logprobs", "hidden_states"):
        assert [o.outputs[0].token_ids for o in changed] == [o.outputs[0].token_ids for o in free]
    else:
        assert all(b.outputs[0].token_ids != f.outputs[0].token_ids for b, f in zip(changed, free))


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("page_size", PAGES)
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_chunks_and_pages(
    stands: Callable[[str, str], Stand], dtype: str, chunk: int, page_size: int, temperature: float
) -> None:
    """Prompts cut into chunks of 1, of 7 or not at all, on pages of 1 or 16 tokens: the same output."""
    stand = stands(turn(tuple(MODELS), dtype, chunk, page_size), dtype)
    features = random.Random(f"{chunk} {page_size} {temperature}").sample(sorted(FEATURES), 4)
    jobs = mixed_jobs(stand, 8, temperature, features, seed=chunk)
    lossy = trusting_neighbours(stand, temperature) if chunk > 100 else []
    check_identity(stand, jobs, lossy, page_size=page_size, max_num_batched_tokens=chunk)


@pytest.mark.parametrize(("drafter", "depth"), [*cases(), (TREE, "default")])
def test_drafts_are_accepted(stands: Callable[[str, str], Stand], drafter: str, depth: str) -> None:
    """Identity is not achieved by accepting nothing: guesses of every drafter are accepted, and none at depth 0."""
    stand = stands("qwen3", "float32")
    reason = DRAFTERS.get(drafter).why_not(stand.target)
    if reason:
        pytest.skip(f"{drafter}: {reason}")
    kind = speculation(stand, drafter, depth)
    params = SamplingParams(temperature=0.0, max_tokens=3 * LENGTH, seed=1, ignore_eos=True)
    outputs = check_identity(stand, [Job(prompt, params, kind) for prompt in prompts(stand, 8)])
    drafts = DRAFTERS.get(drafter).default_depth > 0
    assert (accepted(outputs) > 0) == drafts
    if drafts:
        off = [Job(prompt, params, {**kind, "depth": 0}) for prompt in prompts(stand, 8)]
        assert accepted(check_identity(stand, off)) == 0


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_prefix_cache(stands: Callable[[str, str], Stand], dtype: str, temperature: float) -> None:
    """A prefix computed before, in the steps of any drafter, gives the same output as a cold one."""
    stand = stands(turn(tuple(MODELS), dtype, temperature), dtype)
    rng = random.Random(11)
    shared = [rng.randrange(60) for _ in range(37)]
    jobs = mixed_jobs(stand, 8, temperature, ["nothing", "everything", "logprobs", "repetition_penalty"], seed=2)
    for job in jobs[::2]:
        job.prompt = shared + job.prompt[:5]
        job.params = sampling(stand, job.prompt, temperature, "everything")
    llm = stand.llm(page_size=4)
    check_identity(stand, jobs, llm=llm)
    # Again, each with the next job's drafter; and then each with its own output appended to the prompt.
    kinds = [job.speculation for job in jobs]
    jobs = [replace(job, speculation=kind) for job, kind in zip(jobs, [*kinds[1:], kinds[0]])]
    warm = check_identity(stand, jobs, llm=llm)
    for job, output in zip(jobs, warm):
        # A drafter with KV of its own hits only pages that it has written itself.
        keeps_kv = DRAFTERS.get((job.speculation or {})["drafter"]).keeps_kv
        if not keeps_kv and not job.params.reads_prompt:
            assert output.metrics is not None and output.metrics.cached_tokens > 0
    longer = [replace(job, prompt=job.prompt + output.outputs[0].token_ids) for job, output in zip(jobs, warm)]
    again = check_identity(stand, longer, llm=llm)
    grown = [o.metrics.cached_tokens > len(job.prompt) for o, job in zip(again, jobs) if o.metrics is not None]
    assert any(grown), "no page of an output was found again"
    llm.engine.ledger.flush()
    check_identity(stand, jobs, llm=llm)


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_preemption(stands: Callable[[str, str], Stand], dtype: str, caching: bool, temperature: float) -> None:
    """Requests that are preempted and computed again, with drafts in flight, emit the same."""
    stand = stands("qwen3", dtype)  # for a model with sliding windows, see test_page_groups.py
    features = ["nothing", "everything", "samples", "stop_token_ids"]
    check_crowd(stand, temperature, features, enable_prefix_caching=caching)


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_abort(stands: Callable[[str, str], Stand], dtype: str, temperature: float) -> None:
    """Neighbours that are aborted at random moments, and others that arrive, have no effect on the output."""
    stand = stands(turn(tuple(MODELS), dtype, temperature), dtype)
    jobs = mixed_jobs(stand, 8, temperature, ["nothing", "everything", "bad_words"], seed=6)
    rng = random.Random(f"{dtype} {temperature}")
    llm = stand.llm(page_size=rng.choice(PAGES), max_num_seqs=6, max_num_batched_tokens=48)
    engine = llm.engine
    for job in jobs:
        teach(stand, job)
    spare = [job for seed in range(4) for job in mixed_jobs(stand, 8, temperature, ["nothing"], seed)]
    requests = [engine.add(f"kept-{i}", job.prompt, job.request) for i, job in enumerate(jobs)]
    doomed: list[str] = []
    while any(request.finish_reason is None for request in requests):
        if spare and rng.random() < 0.6:
            job = spare.pop()
            doomed.append(engine.add(f"doomed-{len(spare)}", job.prompt, job.request).id)
        if doomed and rng.random() < 0.5:
            engine.abort(doomed.pop(rng.randrange(len(doomed))))
        engine.step()
    for name in doomed:
        engine.abort(name)
    llm.check()
    assert not engine.busy
    assert engine.ledger.counts()["full"]["held"] == 0
    for request, job in zip(requests, jobs):
        wanted = stand.plain(job.prompt, job.params).outputs[0]
        assert (request.output_ids, request.finish_reason) == (wanted.token_ids, wanted.finish_reason)


def test_stream(stands: Callable[[str, str], Stand]) -> None:
    """A stream yields incrementally what `generate` returns; closing it early disturbs no other request and leaves
    nothing behind."""
    stand = stands("qwen3", "float32")
    llm = stand.llm(page_size=4)
    for job in mixed_jobs(stand, 6, 0.7, ["nothing", "everything"], seed=9):
        teach(stand, job)
        wanted = stand.plain(job.prompt, job.params).outputs[0]
        seen = [list(output.outputs[0].token_ids) for output in llm.stream(job.prompt, job.request)]
        assert seen[-1] == wanted.token_ids
        assert all(wanted.token_ids[: len(part)] == part for part in seen)
        left = llm.stream(job.prompt, job.request)
        next(left)
        left.close()
        llm.check()
        assert not llm.engine.busy


def test_prompt_logprobs_cover_the_prompt(stands: Callable[[str, str], Stand]) -> None:
    """One entry per prompt token, None for the first, which nothing predicts; in chunks or not."""
    stand = stands("qwen3", "float32")
    params = SamplingParams(max_tokens=2, seed=1, prompt_logprobs=1)
    for prompt in ([5], [5, 6], list(range(20))):
        for chunk in (1, 3, 1024):
            scored = stand.run([Job(prompt, params)], max_num_batched_tokens=chunk)[0].prompt_logprobs
            assert scored is not None and len(scored) == len(prompt) and scored[0] is None
            assert all(entry is not None and token in entry for token, entry in zip(prompt[1:], scored[1:]))


def test_random_mixtures(stands: Callable[[str, str], Stand]) -> None:
    """Everything at once: random features, temperatures, drafters, chunks, pages, pools and batch sizes."""
    for seed in range(8):
        rng = random.Random(seed)
        stand = stands(rng.choice(tuple(MODELS)), rng.choice(DTYPES))
        features = rng.sample(sorted(FEATURES), 6)
        jobs = [
            job
            for temperature in TEMPERATURES
            for job in mixed_jobs(stand, 4, temperature, rng.sample(features, 2), seed=seed)
        ]
        options: dict[str, Any] = {
            "page_size": rng.choice((1, 3, 16)),
            "max_num_batched_tokens": rng.choice((9, 70, 1024)),
            "max_num_seqs": rng.choice((2, 5, 16)),
            "enable_prefix_caching": rng.random() < 0.7,
        }
        check_identity(stand, jobs, **options)


def test_every_seed_differs(stands: Callable[[str, str], Stand]) -> None:
    """Seeds and sample indices matter: the same prompt with other noise gives another output."""
    stand = stands("qwen3", "float32")
    prompt = prompts(stand, 1)[0]
    params = SamplingParams(temperature=1.0, max_tokens=LENGTH, n=4, seed=0, ignore_eos=True)
    said = [s.token_ids for seed in range(3) for s in stand.plain(prompt, replace(params, seed=seed)).outputs]
    assert len({tuple(tokens) for tokens in said}) == len(said)
    assert all_speculations(stand) and tree_speculations()
