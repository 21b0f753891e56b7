"""Models, attention, products and noise on a GPU, against the same oracles as on the CPU."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from stridelm.kernels.noise import bits, gumbel
from stridelm.models.layers.products import tiled_product
from stridelm.sample.rows import Rows
from stridelm.sample.sampler import Sampler
from stridelm.sample.table import SamplingTable
from support.checks.linear import check_close, check_row_bits, rows, weights
from support.gpu import NEEDS_GPU
from support.oracles.attention import (
    Piece,
    backends,
    check_attention,
    check_path_invariance,
    check_row_invariance,
    make,
    random_pieces,
    random_tree,
)
from support.oracles.models import check_model, options, variants

pytestmark = NEEDS_GPU
DTYPES = (torch.float32, torch.bfloat16)
BACKEND_NAMES = backends("cuda")


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize(("kind", "variant"), variants())
def test_logits(checkpoint: Callable[..., Path], kind: str, variant: str, deterministic: bool) -> None:
    """Prefill in chunks and decode steps give transformers' logits (computed on the CPU) within 1e-5."""
    path = checkpoint(kind, **options(kind, variant))
    check_model(path, 33, "cuda", close=2e-5, deterministic=deterministic)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (4, 2), (6, 2), (4, 1), (16, 2)])
@pytest.mark.parametrize("backend", BACKEND_NAMES)
def test_attention(backend: str, heads: int, kv_heads: int, dtype: torch.dtype) -> None:
    """Any mixture of spans is dense attention, windowed or not."""
    for seed, window in enumerate((None, 7)):
        pieces = random_pieces(seed, 6, longest=150)
        case = make(
            pieces, heads=heads, kv_heads=kv_heads, window=window, head_dim=(16, 80)[seed], dtype=dtype, device="cuda"
        )
        check_attention(backend, case)


@pytest.mark.parametrize("head_dim", [16, 64, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", BACKEND_NAMES)
def test_attention_invariance(backend: str, dtype: torch.dtype, head_dim: int) -> None:
    """A row has the same bits alone, in a chunk and in a batch; a candidate has those of the row it may become."""
    rng = random.Random(head_dim)
    for seed, (heads, kv_heads) in enumerate(((4, 2), (8, 1))):
        pieces = [*random_pieces(seed, 4, longest=300), Piece(900, 1), Piece(0, 140)]
        case = make(pieces, heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, device="cuda", seed=seed)
        check_row_invariance(backend, case, seed)
        trees = [Piece(rng.randrange(150), 2, random_tree(rng, count)) for count in (12, 40)]
        case = make(trees, heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, device="cuda", seed=seed)
        check_path_invariance(backend, case)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(64, 160), (383, 97), (1024, 96), (96, 2048), (4096, 512)], ids=str)
def test_tiles(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Fixed tiles: the same bits at 1 to 64 rows, and at hundreds."""
    weight, bias = weights(0, *shape, dtype, "cuda")
    x = rows(0, 64, shape[0], dtype, "cuda")
    check_row_bits(lambda part: tiled_product(part, weight, bias), x)
    many = rows(1, 700, shape[0], dtype, "cuda")
    check_row_bits(lambda part: tiled_product(part, weight, None), many, counts=(1, 2, 17, 65, 256, 699))
    check_close(tiled_product(x, weight, bias), x, weight, bias)


def test_noise_has_the_same_bits() -> None:
    """The integers behind the noise are those of the CPU; the floats agree to rounding, and stay finite."""
    generator = torch.Generator().manual_seed(0)
    seeds = torch.randint(-(2**63), 2**63 - 1, (50,), generator=generator)
    positions = torch.randint(0, 2**20, (50,), generator=generator)
    samples = torch.randint(0, 2**10, (50,), generator=generator)
    there = seeds.cuda(), positions.cuda(), samples.cuda()
    assert torch.equal(bits(*there, 5003).cpu(), bits(seeds, positions, samples, 5003))
    noise = gumbel(*there, 5003).cpu()
    assert bool(noise.isfinite().all()) and torch.allclose(noise, gumbel(seeds, positions, samples, 5003), atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [5, 1000, 128_256])
def test_ties_go_to_the_lowest_id(vocab: int, dtype: torch.dtype) -> None:
    """A greedy row takes the lowest id among its best tokens, whatever the vocabulary size."""
    rng = random.Random(vocab)
    logits = torch.zeros(64, vocab, dtype=dtype)
    firsts = []
    for row in range(64):
        tied = sorted(rng.sample(range(vocab), rng.randint(2, min(vocab, 40))))
        logits[row, tied] = 3.0
        firsts.append(tied[0])
    table = SamplingTable(64, vocab, "cuda")
    rows = Rows(torch.arange(64, device="cuda"), torch.arange(64, device="cuda"))
    drawn = Sampler(table, None).draw(logits.cuda(), rows, list(range(64)))  # type: ignore[arg-type]
    assert drawn.tolist() == firsts
