"""KV in eight bits on a GPU: as it is written, as it is read, and the laws of identity over it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from stridelm.cache.layout import HeadsKV, in_eight_bits
from stridelm.kernels.triton_rows import TritonOps
from support.checks.compaction import check_compact
from support.checks.eight_bit_kv import OPTION, check_batches, check_effect, write_scaled
from support.checks.row_ops import HEADS, check_eight_bit_latents, check_eight_bits
from support.doubles.stand import Stand
from support.doubles.tree_drafter import registered
from support.gpu import NEEDS_GPU
from support.oracles.attention import (
    Piece,
    check_attention,
    check_path_invariance,
    check_row_invariance,
    make,
    make_latent,
    random_pieces,
    random_tree,
)

pytestmark = NEEDS_GPU
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.fixture(scope="module", autouse=True)
def _trees() -> Iterator[None]:
    with registered():
        yield


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows(dtype: torch.dtype) -> None:
    """As the definition has it: limited, rounded once, and NaN if they are."""
    for sizes in HEADS:
        check_eight_bits(TritonOps(), 40, sizes, dtype, "cuda")
    for interleaved in (False, True):
        check_eight_bit_latents(TritonOps(), 40, 16, 512, 64, interleaved, dtype, "cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.usefixtures("triton_modes")
def test_attention(dtype: torch.dtype) -> None:
    """Over heads and latents, in both modes; the same bits in any batch if they are promised."""
    options: dict[str, Any] = {"dtype": dtype, "device": "cuda", "page_size": 16, "scales": (0.1, 0.1)}
    heads: dict[str, Any] = {"heads": 8, "head_dim": 128}
    latents: dict[str, Any] = {"heads": 16, "rank": 512, "rope_dim": 64}
    tree = random_tree(random.Random(1), 20)
    for built, size in ((make, heads), (make_latent, latents)):
        for mode in ("exact-triton", "fast-triton"):
            check_attention(mode, built(random_pieces(7, 6), **size, **options))
        check_row_invariance("exact-triton", built([Piece(700, 40), Piece(0, 30)], **size, **options))
        check_path_invariance("exact-triton", built([Piece(300, 2, tree)], **size, **options))


def test_compact() -> None:
    layout = in_eight_bits((HeadsKV.of(8, 8, 128, group="main"), HeadsKV.of(1, 1, 6, group="main")))
    check_compact(layout, 4, 9, torch.bfloat16, "cuda")


@pytest.mark.parametrize("model", ["qwen3", "deepseek_v3", "gemma4_text"])
def test_identity(checkpoint: Callable[..., Path], model: str) -> None:
    stand = Stand(checkpoint(model), "bfloat16", "cuda", options=OPTION)
    check_batches(stand, 0.7)
    check_effect(stand)


def test_scales(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """With the scales of a checkpoint."""
    path = write_scaled(tmp_path / "scaled", checkpoint("qwen3"), "compressed-tensors", 1)
    stand = Stand(path, "bfloat16", "cuda", options=OPTION)
    check_batches(stand, 0.0)
    check_effect(stand)
