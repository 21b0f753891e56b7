"""Trees that heads grow on a GPU equal those grown on a CPU: each level sees itself and its ancestors."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from stridelm import LLM, SamplingParams
from support.checkpoints.assistants import write_assistant
from support.checkpoints.heads import write_eagle, write_modules
from support.checkpoints.models import write
from support.checks.step_lengths import step_lengths
from support.checks.watch import VOCAB, engine, prompts
from support.gpu import NEEDS_GPU

pytestmark = NEEDS_GPU

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"depth": 4, "draft_sample_method": "greedy"},
    "dynamic": {"depth": 4, "draft_topk": 3, "num_draft_tokens": 16},
    "static": {"depth": 3, "token_tree": "[(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (1, 0, 0)]"},
}

LENGTH, NEAR_THE_END = 40, 30
"""Tokens. Near the end a CPU's host, which knows how many are left, drafts less, and so its trees are broader."""

WRITE: dict[str, Callable[[Path, Path], Path | None]] = {
    "mtp": write_modules,
    "eagle": lambda path, model: write_eagle(path, model, "eagle3"),
    "frozen_kv": write_assistant,
}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("drafter", ["mtp", "eagle", "frozen_kv"])
def test_as_on_a_cpu(tmp_path: Path, drafter: str, kind: str, temperature: float) -> None:
    """The output is the same whatever is drafted; how many tokens each step emits tells the trees apart."""
    model = write(tmp_path / "model", "qwen3", vocab_size=VOCAB)
    head = WRITE[drafter](tmp_path / "head", model)
    params = SamplingParams(temperature=temperature, max_tokens=LENGTH, seed=3, ignore_eos=True)
    found = []
    for device in ("cpu", "cuda"):
        llm = engine(model, drafter_model=str(head), drafter=drafter, device=device, deterministic=True, **KINDS[kind])
        found.append(said_by_step(llm, params))
        llm.check()
    assert found[0] == found[1]


def said_by_step(llm: LLM, params: SamplingParams) -> list[tuple[list[int], list[int]]]:
    """Of four requests, the tokens, and how many of them each step emitted that began before the end was near."""
    requests = [llm.engine.add(str(number), prompt, params) for number, prompt in enumerate(prompts(4))]
    early = []
    for lengths in step_lengths(llm.engine, requests):
        began = accumulate(lengths, initial=0)
        early.append([length for length, emitted in zip(lengths, began) if emitted < NEAR_THE_END])
    return [(request.output_ids, lengths) for request, lengths in zip(requests, early, strict=True)]
