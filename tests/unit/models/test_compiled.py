"""A block that is one compiled call computes what its parts compute, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stridelm import LLM, SamplingParams
from stridelm.draft.frozen_kv.drafter import FrozenKVDrafter
from stridelm.draft.head_drafter import HeadDrafter
from stridelm.kernels.plain import PlainOps
from stridelm.models import MODELS
from stridelm.models.layers.block import Block, CompiledBlocks, Site
from stridelm.models.layers.mlp import GatedMLP, GatedMLPSpec
from stridelm.models.layers.products import PackedProduct
from stridelm.models.layers.rope import Ropes
from support.checkpoints.assistants import write_assistant
from support.checkpoints.heads import write_eagle
from support.checkpoints.models import SMALL_OF
from support.doubles.stand import Stand

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}
PROMPTS = [[5, 6, 7, 8, 9] * (n + 1) for n in range(5)]
PARAMS = SamplingParams(temperature=0.8, seed=3, max_tokens=12, ignore_eos=True, logprobs=4)


KINDS: list[tuple[str, dict[str, object]]] = [
    *((kind, {}) for kind in MODELS if kind not in SMALL_OF),
    ("glm4_moe", {"first_k_dense_replace": 2, "use_qk_norm": True, "attention_bias": True}),
    ("qwen3", {"intermediate_size": 200}),
]
"""Models whose layers are all attention over heads and a gated MLP."""


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_compiled_blocks(kind: str, options: dict[str, object], checkpoint: Callable[..., Path]) -> None:
    """Prompts of up to 25 rows, too many for one call, then five streams: the same tokens and log-probabilities, with
    one thread and with two, and whether all blocks are one call or each is."""
    llm = LLM(
        model=str(checkpoint(kind, **{**SIZES, **options})), dtype="bfloat16", skip_tokenizer_init=True, num_pages=64
    )
    blocks = [module for module in llm.engine.loaded.model.modules() if isinstance(module, Block)]
    product = blocks[0].mixer.get_submodule("o").product
    if not (isinstance(product, PackedProduct) and product.few is not None):
        pytest.skip("this CPU has no kernel for few rows that compiled code could call")
    model = llm.engine.loaded.model
    assert model.compiled is not None and all(block.compiled is not None for block in blocks)

    def outputs() -> list[object]:
        llm.engine.ledger.flush()
        samples = [output.outputs[0] for output in llm.generate(PROMPTS, PARAMS)]
        return [(sample.token_ids, sample.logprobs) for sample in samples]

    whole, threads = outputs(), torch.get_num_threads()
    try:
        for other in {1, 2} - {threads}:
            torch.set_num_threads(other)
            assert outputs() == whole
    finally:
        torch.set_num_threads(threads)
    model.compiled = None
    assert outputs() == whole
    for block in blocks:
        block.compiled = None
    with torch.inference_mode():
        assert outputs() == whole


@pytest.mark.parametrize("bias", [False, True])
def test_further_inner_features(bias: bool) -> None:
    """They add nothing."""
    mlp = GatedMLP(GatedMLPSpec(intermediate_size=40, bias=bias, activation="gelu"), Site(0, 24, 1e-6, Ropes(1)))
    numbers = torch.Generator().manual_seed(0)
    for parameter in mlp.requires_grad_(False).parameters():
        parameter.copy_(torch.randint(-3, 4, parameter.shape, generator=numbers))
    x = torch.randint(-3, 4, (5, 24), generator=numbers).double()
    mlp, ops = mlp.double(), PlainOps()
    wanted = mlp.share(x, ops)
    mlp.fill_up(64)
    assert mlp.down.weight.shape == (24, 64) and mlp.gate_up.weight.shape == (128, 24)
    assert torch.allclose(mlp.share(x, ops), wanted, rtol=1e-12)


@pytest.mark.parametrize("head", ["mtp", "eagle", "eagle1"])
def test_compiled_head(head: str, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """A draft head's block, one without a norm before its attention too, of which some rows only write their entries:
    prompts, and drafts that are followed. The entries, and the states that drafts grow from, have the same bits as
    those of its parts; so do the target's states that a head reads, between the calls of the layers around them."""
    stand = Stand(checkpoint("qwen3", tie_word_embeddings=True, **SIZES), "bfloat16")
    prompts, params = PROMPTS[:4], SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    name, kept, given = head.rstrip("1"), [], {}
    if head == "eagle1":
        given["drafter_model"] = str(write_eagle(tmp_path / head, stand.path, "eagle1"))
    for compiled in (True, False):
        engine = stand.llm(drafter=name, depth=3, page_size=4, **given).engine
        drafter, model = engine.drafters.get(name), engine.loaded.model
        assert isinstance(drafter, HeadDrafter)
        blocks = [module for module in drafter.head.modules() if isinstance(module, Block)]
        if not all(block.compiled for block in blocks):
            pytest.skip("this CPU has no kernel for few rows that compiled code could call")
        calls: list[int] = []
        for block in blocks:
            if not compiled:
                block.compiled = None
            elif block.compiled is not None:
                block.compiled = Counted(block.compiled, calls)
        if not compiled:
            model.compiled = None
            for module in model.modules():
                if isinstance(module, Block):
                    module.compiled = None
        requests = []
        for i, prompt in enumerate(prompts):  # one by one: with AMX a call takes at most 16 rows
            requests.append(engine.add(str(i), prompt, params))
            engine.step()
        for _ in range(8):
            engine.step()
        assert bool(sum(calls)) == compiled
        slots = [request.slot for request in requests]
        kept.append([drafter._hidden[slots].clone(), *(tensor.clone() for tensor in drafter._runner.pool.tensors)])
    for got, wanted in zip(*kept, strict=True):
        assert torch.equal(got, wanted)


class Counted:
    """Notes of each call with rows that only write entries whether it ran."""

    def __init__(self, blocks: CompiledBlocks, calls: list[int]) -> None:
        self._blocks, self._calls = blocks, calls
        self.max_rows = blocks.max_rows

    def __call__(self, *arguments: Any, **options: Any) -> torch.Tensor | None:
        done = self._blocks(*arguments, **options)
        wanted = arguments[4] if len(arguments) > 4 else options.get("wanted_M")
        if wanted is not None:
            self._calls.append(done is not None)
        return done

    def some(self, start: int, stop: int) -> CompiledBlocks:
        return self._blocks.some(start, stop)


@pytest.mark.parametrize("kind", ["qwen3", "gemma4"])
def test_compiled_assistant(
    kind: str, checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers that read another model's entries, with and without a window, norm what they add and scale the stream, in
    one call: the bits of their parts. One row of each of up to five requests, chains and trees."""
    stand = Stand(checkpoint(kind, **SIZES), "bfloat16")
    weights = write_assistant(tmp_path / kind, stand.path, hidden_size=64, intermediate_size=192)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    found: list[list[torch.Tensor]] = []
    for compiled in (True, False):
        engine = stand.llm(drafter="frozen_kv", drafter_model=str(weights), depth=3, page_size=4).engine
        drafter = engine.drafters.get("frozen_kv")
        assert isinstance(drafter, FrozenKVDrafter)
        head = drafter.head
        if head.compiled is None:
            pytest.skip("this CPU has no kernel for few rows that compiled code could call")
        if not compiled:
            head.compiled = None
        made: list[torch.Tensor] = []
        monkeypatch.setattr(head, "forward", noted(head.forward, made))
        for i, prompt in enumerate(PROMPTS):
            engine.add(str(i), prompt, replace(params, speculation={"draft_topk": 2} if i % 2 else None))
            engine.step()
        for _ in range(6):
            engine.step()
        found.append(made)
    assert len(found[0]) == len(found[1]) > 20
    for got, wanted in zip(*found, strict=True):
        assert torch.equal(got, wanted)


def noted(forward: Callable[..., torch.Tensor], made: list[torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Keep what every call returns."""

    def wrapper(*arguments: Any, **options: Any) -> torch.Tensor:
        made.append(forward(*arguments, **options))
        return made[-1]

    return wrapper
