"""Rules that weigh probabilities, with captured steps on a GPU: the same output as on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stridelm import SamplingParams
from stridelm.draft import DRAFTERS
from stridelm.verify import RULES
from support.checks.identity import check_identity, mixed_jobs, prompts
from support.doubles.stand import Stand
from support.doubles.tree_drafter import registered
from support.gpu import NEEDS_GPU

pytestmark = NEEDS_GPU
LENGTH, DEPTH = 48, 3
WEIGHING = ("rejection", "block", "typical", "relaxed")
GREEDY = WEIGHING[:3]
"""Rules that equal plain decoding at temperature 0."""
DRAFTED = [("mask", rule) for rule in WEIGHING] + [("ngram", "rejection")]


@pytest.fixture(scope="module", autouse=True)
def _trees() -> Iterator[None]:
    with registered():
        yield


def said(stand: Stand, drafter: str, rule: str, temperature: float) -> list[list[int]]:
    """Each request's tokens except the last: near the end, a host that knows the length drafts less."""
    kind: dict[str, Any] = {"drafter": drafter, "depth": DEPTH, "acceptance": rule}
    params = SamplingParams(temperature=temperature, max_tokens=LENGTH, seed=5, ignore_eos=True, speculation=kind)
    llm = stand.llm()
    outputs = llm.generate(prompts(stand, 6), params)
    assert llm.engine.capture is None or llm.engine.capture._graphs
    return [output.outputs[0].token_ids[: LENGTH - 2 * (DEPTH + 1)] for output in outputs]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(("drafter", "rule"), DRAFTED)
def test_as_on_a_cpu(checkpoint: Callable[..., Path], drafter: str, rule: str, temperature: float) -> None:
    """Both weigh the same noise in float32."""
    path = checkpoint("qwen3", tie_word_embeddings=True)
    here, there = (said(Stand(path, "float32", device), drafter, rule, temperature) for device in ("cpu", "cuda"))
    assert here == there


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_plain_decoding_at_temperature_0(checkpoint: Callable[..., Path], dtype: str) -> None:
    """Chains and trees, with and without a history, all rules in one batch: the output is plain decoding's."""
    stand = Stand(checkpoint("qwen3", tie_word_embeddings=True), dtype, "cuda")
    jobs = mixed_jobs(stand, 8, 0.0, ["nothing", "everything", "repetition_penalty", "bad_words"], seed=5)
    for i, job in enumerate(jobs):
        assert job.speculation is not None
        kind, rule = DRAFTERS.get(job.speculation["drafter"]), GREEDY[i % len(GREEDY)]
        able = RULES.get(rule).works_with(kind.rules, kind.branches)
        job.speculation = {**job.speculation, "acceptance": rule if able else "rejection"}
    check_identity(stand, jobs)
