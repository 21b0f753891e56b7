"""The laws on a GPU with deterministic settings: the same checks as in the CPU's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stridelm import SamplingParams
from stridelm.draft import DRAFTERS
from support.checks.identity import (
    FEATURES,
    TEMPERATURES,
    check_alone,
    check_crowd,
    check_identity,
    mixed_jobs,
    trusting_neighbours,
)
from support.checks.trust import THRESHOLDS, WINDOWS, check_trust, job, load, random_prompts
from support.doubles.lab import Lab, check_joint, lossless_cases, trees_registered
from support.doubles.stand import Stand, accepted, cases, speculation
from support.doubles.tree_drafter import NAME as TREE
from support.doubles.tree_drafter import registered
from support.gpu import NEEDS_GPU

pytestmark = NEEDS_GPU
DTYPES = ("float32", "bfloat16")
GROUPS = (sorted(FEATURES)[0::3], sorted(FEATURES)[1::3], sorted(FEATURES)[2::3])


@pytest.fixture(scope="module", autouse=True)
def _trees() -> Iterator[None]:
    with registered():
        yield


@pytest.fixture(scope="module")
def stands(checkpoint: Callable[..., Path]) -> dict[str, Stand]:
    path = checkpoint("qwen3", tie_word_embeddings=True)
    return {dtype: Stand(path, dtype, "cuda") for dtype in DTYPES}


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("features", GROUPS, ids=lambda names: names[0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_identity(stands: dict[str, Stand], dtype: str, features: list[str], temperature: float) -> None:
    """Eight requests with different drafters and parameters, beside trusted windows, emit what they emit alone."""
    stand = stands[dtype]
    jobs = mixed_jobs(stand, 8, temperature, features, seed=len(features[0]))
    lossy = trusting_neighbours(stand, temperature)[:2]
    check_identity(stand, jobs, lossy, page_size=(1, 16)[len(features[0]) % 2])


@pytest.mark.parametrize("chunk", [1, 7])
@pytest.mark.parametrize("dtype", DTYPES)
def test_chunks(stands: dict[str, Stand], dtype: str, chunk: int) -> None:
    """Prompts cut into chunks of 1 or 7 rows: the same output."""
    jobs = mixed_jobs(stands[dtype], 4, 0.7, ["nothing", "everything"], seed=chunk)
    check_identity(stands[dtype], jobs, max_num_batched_tokens=chunk)


@pytest.mark.parametrize(("drafter", "depth"), [*cases(), (TREE, "default")])
def test_alone(stands: dict[str, Stand], drafter: str, depth: str) -> None:
    """Each drafter by itself, in both dtypes; guesses are accepted."""
    taken = 0
    for dtype, temperature, feature in zip(DTYPES, (0.0, 1.0), ("nothing", "everything")):
        stand = stands[dtype]
        reason = DRAFTERS.get(drafter).why_not(stand.target)
        if reason:
            pytest.skip(f"{drafter}: {reason}")
        taken += check_alone(stand, speculation(stand, drafter, depth), temperature, feature)
    assert taken > 0 or drafter != TREE


@pytest.mark.parametrize("dtype", DTYPES)
def test_prefix_and_preemption(stands: dict[str, Stand], dtype: str) -> None:
    """A warm cache and preemptions change nothing."""
    stand = stands[dtype]
    check_crowd(stand, 1.0, ["nothing", "everything"])
    jobs = mixed_jobs(stand, 8, 1.0, ["nothing", "everything"], seed=4)
    roomy = stand.llm(page_size=4)
    check_identity(stand, jobs, llm=roomy)
    warm = check_identity(stand, jobs, llm=roomy)
    assert accepted(warm) > 0 and all(o.metrics is not None and o.metrics.cached_tokens > 0 for o in warm)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_trust(checkpoint: Callable[..., Path], temperature: float) -> None:
    """Trusted windows of all sizes and thresholds in one batch emit what the naive reference emits on a CPU."""
    stand = Stand(checkpoint("qwen3", scale=10.0), "float32", "cuda")
    settings = SamplingParams(temperature=temperature, seed=3, max_tokens=19, ignore_eos=True, presence_penalty=0.3)
    prompts = iter(random_prompts(len(WINDOWS) + len(THRESHOLDS), seed=2))
    jobs = [job(next(prompts), settings, k) for k in WINDOWS]
    jobs += [job(next(prompts), settings, 4, tau) for tau in THRESHOLDS]
    check_trust(stand, load(stand), jobs, page_size=3)


@pytest.mark.timeout(900)  # 200,000 admissions are many small launches: five minutes on a card that others use too
@pytest.mark.parametrize(("drafter", "rule"), lossless_cases())
def test_joint(drafter: str, rule: str) -> None:
    """The first three tokens of 200,000 requests have the target's joint distribution."""
    options = {"prompt_lookup_min": 1} if drafter == "ngram" else {}
    with trees_registered():
        lab = Lab({"drafter": drafter, "acceptance": rule, **options}, size=20_000, device="cuda")
        check_joint(lab, 200_000)
