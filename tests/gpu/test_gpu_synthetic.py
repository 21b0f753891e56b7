"""Simulated acceptance with captured steps on a GPU: as many tokens as on a CPU, step by step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stridelm import SamplingParams
from support.checks.identity import prompts
from support.checks.step_lengths import step_lengths
from support.doubles.stand import Job, Stand
from support.gpu import NEEDS_GPU

pytestmark = NEEDS_GPU
LENGTH = 48


def lengths_of(stand: Stand, rule: str, temperature: float) -> list[list[int]]:
    """Tokens per step of each request, except its last: near the end, a host that knows the length drafts less."""
    kind: dict[str, Any] = {"drafter": "mask", "depth": 3, "acceptance": rule}
    engine = stand.llm().engine
    requests = []
    for i, prompt in enumerate(prompts(stand, 6)):
        params = SamplingParams(temperature=temperature, max_tokens=LENGTH, seed=i, ignore_eos=True, speculation=kind)
        requests.append(engine.add(str(i), prompt, params))
    lengths = step_lengths(engine, requests)
    assert engine.capture is None or engine.capture._graphs
    return [steps[:-1] for steps in lengths]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("rule", ["synthetic:2.5", "synthetic-trust:2.5", "synthetic-trust:4"])
def test_as_on_a_cpu(checkpoint: Callable[..., Path], rule: str, temperature: float) -> None:
    """Mask drafts are full from the second step on, so only seed and position decide how many tokens a step emits."""
    path = checkpoint("qwen3", tie_word_embeddings=True)
    here, there = (lengths_of(Stand(path, "float32", device), rule, temperature) for device in ("cpu", "cuda"))
    assert here == there and any(length > 1 for steps in here for length in steps)


def test_mixed(checkpoint: Callable[..., Path]) -> None:
    """Several lengths and rules in a step, which runs eagerly: each request emits what it emits alone."""
    stand = Stand(checkpoint("qwen3", tie_word_embeddings=True), "float32", "cuda")
    kinds: list[dict[str, Any]] = [
        {"drafter": "mask", "depth": 3, "acceptance": "synthetic:1.5"},
        {"drafter": "mask", "depth": 3, "acceptance": "synthetic:3"},
        {"drafter": "mask", "depth": 3, "acceptance": "synthetic-trust:3"},
        {"drafter": "ngram", "acceptance": "synthetic:2", "prompt_lookup_min": 1},
        {"drafter": "none"},
    ]
    params = SamplingParams(temperature=0.8, max_tokens=LENGTH, seed=3, ignore_eos=True)
    jobs = [Job(prompt, params, kind) for prompt, kind in zip(prompts(stand, len(kinds)), kinds)]
    for job, output in zip(jobs, stand.run(jobs)):
        assert output.outputs[0].token_ids == stand.alone(job).outputs[0].token_ids, job.speculation
