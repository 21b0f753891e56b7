"""Steady state on a GPU: nothing is compiled or captured, and the host waits only for the previous step's verdict."""

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


@contextmanager
def nothing_new(engine: Engine, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within this context, a wait for the device raises, except for the event after a step's verdict; so does compiling
    a kernel or capturing a graph."""

    def compiled(**kernel: Any) -> None:
        raise AssertionError(f"compiled {kernel.get('repr')}")

    assert engine.capture is not None
    graphs = engine.capture.pool.graphs
    patch.setattr(triton.knobs.runtime, "jit_post_compile_hook", compiled)
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
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
