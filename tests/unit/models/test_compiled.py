"""A block that is one compiled call computes what its parts compute, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from stridelm import LLM, SamplingParams
from stridelm.models import MODELS
from stridelm.models.layers.block import Block
from stridelm.models.layers.products import PackedProduct
from support.checkpoints.models import SMALL_OF

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
]
"""Models whose layers are all attention over heads and a gated MLP."""


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_compiled_blocks(kind: str, options: dict[str, object], checkpoint: Callable[..., Path]) -> None:
    """Prompts of up to 25 rows, too many for one call, then five streams: the same tokens and log-probabilities, with
    one thread and with two, and whether all blocks are one call or each is."""
    llm = LLM(model=str(checkpoint(kind, **SIZES, **options)), dtype="bfloat16", skip_tokenizer_init=True, num_pages=64)
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
