"""Gemma 4 and its assistants, step by step as transformers' assisted generation runs them: the same drafts, the same
tokens, the same number of the target's forward passes."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stridelm import SamplingParams
from stridelm.batch import Draft, ForwardBatch
from stridelm.engine.outcome import Outcome
from stridelm.types import StepPlan
from support.checkpoints.assistants import write_assistant
from support.checks.watch import engine
from support.oracles.assistants import Generated, Pair
from support.oracles.models import FULL, SLIDING, VARIANTS

Checkpoint = Callable[..., Path]
VOCAB, TOKENS, DEPTH, WINDOW = 24, 40, 3, 9
LAYERS: dict[str, Any] = {
    "layer_types": [SLIDING, FULL, SLIDING, FULL],
    "num_hidden_layers": 4,
    "sliding_window": WINDOW,
}
TARGETS: dict[str, dict[str, Any]] = {
    "own": {**LAYERS, "global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
    "shared": {**VARIANTS["gemma4_text"]["shared-with-inputs"], "global_head_dim": 24},
}
HEADS: dict[str, dict[str, Any]] = {
    "both types": {},
    "three layers": {"kinds": [SLIDING, SLIDING, FULL]},
    "ordered": {"centroids": (6, 2)},
    "own output": {"tied": False, "hidden_activation": "silu"},
}


class Steps:
    """Records an engine's steps."""

    def __init__(self) -> None:
        self.made = Generated([])

    def __call__(self, plan: StepPlan, draft: Draft, batch: ForwardBatch, outcome: Outcome) -> None:
        (span,) = plan.spans
        self.made.forwards += 1
        valid = int(draft.valid[0].sum())
        if valid:
            self.made.drafts.append((span.request.known, draft.tokens[0, :valid].tolist()))


@pytest.fixture(scope="module")
def pairs(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Path]]:
    def get(target: str, head: str, scale: float) -> tuple[Path, Path]:
        path = checkpoint("gemma4_text", **{"vocab_size": VOCAB, "scale": scale, **TARGETS[target]})
        made = write_assistant(tmp_path_factory.mktemp("assistant"), path, **HEADS[head], scale=scale)
        assert made is not None
        return path, made

    return get


def run(target: Path, head: Path, prompt: list[int], **options: Any) -> Generated:
    llm = engine(target, drafter="frozen_kv", drafter_model=str(head), depth=DEPTH, **options)
    steps = Steps()
    llm.engine.tracer = steps
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    steps.made.tokens = llm.generate([prompt], params)[0].outputs[0].token_ids
    llm.check()
    return steps.made


@pytest.mark.parametrize("attention", ["host", "reference"])
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("target", TARGETS)
def test_steps_are_transformers(
    pairs: Callable[..., tuple[Path, Path]], target: str, head: str, attention: str
) -> None:
    """With texts of many windows' length."""
    path, assistant = pairs(target, head, 8.0)
    pair = Pair(path, assistant)
    rejected = accepted = 0
    for seed in range(3):
        rng = random.Random(seed)
        prompt = [rng.randrange(VOCAB) for _ in range(rng.choice((2, 5, 23)))]
        wanted = pair.generate(prompt, TOKENS, DEPTH)
        ours = run(path, assistant, prompt, attention=attention)
        assert wanted.margin > 1e-4, "rounding could decide"
        assert ours.tokens == wanted.tokens
        assert ours.drafts == wanted.drafts
        assert ours.forwards == wanted.forwards
        accepted += TOKENS - ours.forwards
        rejected += sum(len(draft) for _, draft in ours.drafts) - accepted
    assert accepted > 0 and rejected > 0


@pytest.mark.parametrize("target", TARGETS)
def test_the_first_draft_is_transformers_own(pairs: Callable[..., tuple[Path, Path]], target: str) -> None:
    """Without the correction that the oracle makes: nothing has been rejected yet, and no window is full."""
    path, assistant = pairs(target, "both types", 8.0)
    for length in (2, 5, WINDOW - 1):
        prompt = [(7 * i + length) % VOCAB for i in range(length)]
        wanted = Pair(path, assistant).generate(prompt, TOKENS, DEPTH, cut=False)
        assert run(path, assistant, prompt).drafts[0] == wanted.drafts[0]
