"""Serving on a GPU: the host waits only for the previous step's verdict, and in the steady state nothing is compiled or
captured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

import triton

from stridelm import SamplingParams
from stridelm.draft import DRAFTERS
from stridelm.engine.engine import Engine
from support.checks.identity import prompts
from support.doubles.poison import KINDS as ALL_KINDS
from support.doubles.stand import Stand
from support.gpu import NEEDS_GPU

pytestmark = NEEDS_GPU
KINDS = [kind for kind in ALL_KINDS if not DRAFTERS.get(kind["drafter"]).host_bound]
"""Not those that draft on the host: they learn, so that every round differs."""
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8, "top_k": 8, "top_p": 0.9, "min_p": 0.01},
    "penalties": {"temperature": 0.7, "presence_penalty": 0.5, "repetition_penalty": 1.2},
}
MORE_PARAMS: dict[str, dict[str, Any]] = {
    **PARAMS,
    "logprobs": {"temperature": 0.0, "logprobs": 3, "logprob_token_ids": [5]},
    "prompt-logprobs": {"temperature": 0.0, "prompt_logprobs": 2},
    "ends": {"temperature": 0.5, "bad_words_token_ids": [[5], [6, 7]], "min_tokens": 5, "stop_token_ids": [9]},
    "bias": {"temperature": 0.5, "logit_bias": {3: 1.0}},
}
MORE_KINDS: dict[str, list[dict[str, Any]]] = {
    "none": [{"drafter": "none"}],
    "lookup": [{"drafter": "ngram", "depth": "auto", "prompt_lookup_min": 1}, {"drafter": "suffix"}],
    "hybrid": [{"drafter": "hybrid"}],
    "chosen": [{"drafter": "eagle", "depth": "auto"}],
    "tree": [{"drafter": "eagle", "depth": 3, "draft_topk": 2, "num_draft_tokens": 6}],
    "all": ALL_KINDS,
}


@contextmanager
def nothing_waits() -> Iterator[None]:
    """Within this context, a wait for the device raises, except for the event after a step's verdict."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextmanager
def nothing_new(engine: Engine, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """The same, and compiling a kernel or capturing a graph raises, too."""

    def compiled(**kernel: Any) -> None:
        raise AssertionError(f"compiled {kernel.get('repr')}")

    assert engine.capture is not None
    graphs = engine.capture.pool.graphs
    patch.setattr(triton.knobs.runtime, "jit_post_compile_hook", compiled)
    with nothing_waits():
        yield
    assert engine.capture.pool.graphs == graphs


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("kinds", [*([kind] for kind in KINDS), KINDS], ids=lambda kinds: str(len(kinds)))
def test_decoding(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, kinds: list[dict[str, Any]], params: str
) -> None:
    """Five requests or more that are admitted and decode, of one kind (captured whole) or of several (only their
    forward pass)."""
    stand = Stand(checkpoint("qwen3", tie_word_embeddings=True), "bfloat16", "cuda")
    engine = stand.llm(deterministic=False, strict=False, page_size=8).engine
    for number in range(3):  # all but the first hit the prefix cache, so the last two rounds run alike
        with nothing_new(engine, monkeypatch) if number == 2 else nullcontext():
            for i, prompt in enumerate(prompts(stand, max(5, len(kinds)))):
                kind = kinds[i % len(kinds)]
                settings = SamplingParams(**PARAMS[params], seed=i, max_tokens=60, ignore_eos=True, speculation=kind)
                engine.add(f"{number}-{i}", prompt, settings)
            for _ in range(11):  # prefills are the first five
                assert engine.busy
                engine.step()
        while engine.busy:
            engine.step()
    engine.check()


@pytest.mark.parametrize("params", MORE_PARAMS)
@pytest.mark.parametrize("kinds", MORE_KINDS)
def test_nothing_else_is_waited_for(checkpoint: Callable[..., Path], kinds: str, params: str) -> None:
    """From admission to the end, with prompts in chunks, for what a request may ask for and every way to draft."""
    stand = Stand(checkpoint("qwen3", tie_word_embeddings=True), "bfloat16", "cuda")
    engine = stand.llm(deterministic=False, strict=False, page_size=8, max_num_batched_tokens=48).engine
    asked = MORE_KINDS[kinds]
    for number in range(3):  # kernels are compiled in the first, and prefixes are found in the others
        with nothing_waits() if number == 2 else nullcontext():
            for i, prompt in enumerate(prompts(stand, max(5, len(asked)))):
                own = {**MORE_PARAMS[params], "seed": i, "max_tokens": 20 + 3 * i, "ignore_eos": params != "ends"}
                request = SamplingParams(**own, speculation=asked[i % len(asked)])
                engine.add(f"{number}-{i}", (prompt * 8)[: 40 + 7 * i], request)
            while engine.busy:
                engine.step()
    engine.check()
