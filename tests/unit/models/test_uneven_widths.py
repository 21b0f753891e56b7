"""Products on a CPU of widths that fill no vector, and of few outputs: a row has the same bits in every place of its
tile, whatever kernels a library has for this processor or for lesser ones."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from stridelm import LLM, SamplingParams
from stridelm.attention import BACKENDS, MADE_FOR
from stridelm.models.layers.products import TILE_ROWS, exact_product_by_head, tiled_product

PROCESSORS: dict[str, dict[str, str]] = {
    "this": {},
    "AVX2": {"MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2", "OPENBLAS_CORETYPE": "Haswell"},
    "SSE4.2": {"MKL_ENABLE_INSTRUCTIONS": "SSE4_2", "ONEDNN_MAX_CPU_ISA": "SSE41", "OPENBLAS_CORETYPE": "Nehalem"},
}
WIDTHS = range(1, 41)
OUTPUTS = (*range(1, 18), 23, 31, 33)
OFFSETS = (1, 2, 3, 4, 6, 7, 9, 12, 16)
ROWS = 3 * TILE_ROWS
Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def by_heads(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Two heads, of which the first has these matrices."""
    heads = torch.stack((weight.t(), weight.t().flip(0)))
    return exact_product_by_head(x[:, None].expand(-1, 2, -1), heads)[:, 0]


PRODUCTS: dict[str, Product] = {
    "tiled": lambda x, weight: tiled_product(x, weight, None),
    "by heads": by_heads,
}


def uneven(product: Product, dtype: torch.dtype) -> list[tuple[int, int, int]]:
    """(inputs, outputs, offset) of products in which a row that is moved by `offset` has other bits, or is wrong."""
    numbers = torch.Generator().manual_seed(0)
    found = []
    for width in WIDTHS:
        x = torch.randn(ROWS, width, generator=numbers, dtype=dtype)
        for out in OUTPUTS:
            weight = torch.randn(out, width, generator=numbers, dtype=dtype)
            whole = product(x, weight)
            close = torch.allclose(whole.double(), x.double() @ weight.double().t(), rtol=0.05, atol=0.3)
            right = close and whole.shape == (ROWS, out)
            parts = {at: slice(at, at + TILE_ROWS) for at in OFFSETS}
            moved = [at for at, part in parts.items() if not torch.equal(product(x[part], weight), whole[part])]
            found += [(width, out, at) for at in (moved if right else [0, *moved])]
    return found


@pytest.mark.parametrize("processor", PROCESSORS)
def test_a_row_s_place(processor: str) -> None:
    """In a process of its own, since libraries look at the processor once."""
    here = Path(__file__)
    paths = os.pathsep.join([str(here.parent), *filter(None, sys.path)])
    environment = {**os.environ, **PROCESSORS[processor], "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, here], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("attention", sorted({"reference", MADE_FOR["cpu"]} & {*BACKENDS}))
@pytest.mark.parametrize(("heads", "head"), [(1, 6), (3, 2), (1, 10)])
def test_prompts_cut_anywhere(tmp_path: Path, heads: int, head: int, attention: str) -> None:
    """Log-probabilities of a model of such widths do not depend on how its prompt was cut into steps."""
    torch.manual_seed(head)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=heads * head,
        intermediate_size=33,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=1,
        head_dim=head,
        max_position_embeddings=160,
        eos_token_id=None,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        parameter.data.normal_(0.0, parameter.shape[-1] ** -0.5) if parameter.dim() > 1 else parameter.data.uniform_()
    model.save_pretrained(tmp_path)
    ids = torch.randint(0, 50, (60,)).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, ignore_eos=True)
    heard = []
    for rows in (1024, 13, 5, 1):
        llm = LLM(
            str(tmp_path),
            dtype="float32",
            attention=attention,
            drafter="none",
            num_pages=100,
            max_num_batched_tokens=rows,
            skip_tokenizer_init=True,
        )
        logprobs = llm.generate([ids], params)[0].prompt_logprobs
        assert logprobs is not None
        heard.append([next(iter(each.values())).logprob for each in logprobs[1:] if each is not None])
    assert all(each == heard[0] for each in heard)


if __name__ == "__main__":
    torch.set_num_threads(1)
    wrong = {
        (name, str(dtype)): found
        for name, product in PRODUCTS.items()
        for dtype in (torch.float32, torch.float64)
        if (found := uneven(product, dtype))
    }
    for key, places in wrong.items():
        print(key, len(places), places[:20])
    sys.exit(bool(wrong))
