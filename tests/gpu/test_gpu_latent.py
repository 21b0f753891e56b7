"""Attention over latent rows on a GPU: against the definition, against itself bit for bit, and in a captured graph."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from stridelm.attention.paged_step import stack_of
from stridelm.attention.triton import TritonAttention
from stridelm.kernels import OPS
from stridelm.models.layers.head_linear import HeadLinear
from stridelm.models.layers.linear import set_products
from stridelm.models.layers.slots import WHOLE
from support.checks.engine import check_backend
from support.checks.identity import check_identity, mixed_jobs
from support.checks.latent_launches import check_queries
from support.checks.linear import check_row_bits
from support.checks.paged_attention import MODES, launch
from support.checks.row_ops import check_latent
from support.doubles.stand import Stand
from support.doubles.tree_drafter import registered
from support.gpu import NEEDS_GPU
from support.oracles.attention import (
    CLOSE,
    HeadMatrices,
    Piece,
    check_attention,
    check_path_invariance,
    check_row_invariance,
    check_values,
    geometry,
    make_latent,
    naive,
    part,
    random_pieces,
    random_tree,
)
from support.oracles.models import check_model

pytestmark = [*NEEDS_GPU, pytest.mark.usefixtures("triton_modes")]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
PUBLISHED: dict[str, Any] = {"rank": 512, "rope_dim": 64, "page_size": 16, "device": "cuda"}
"""DeepSeek's and Kimi's rows."""
HEADS = (16, 64, 128)
"""Of DeepSeek-V2-Lite, Kimi-K2 and DeepSeek-V3."""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("backend", MODES)
def test_ragged_spans(backend: str, heads: int, dtype: torch.dtype) -> None:
    """Decodes, chunks, prompts, chains and trees in one batch, invalid rows in some."""
    pieces = [*random_pieces(heads, 5, longest=300), Piece(1500, 1), Piece(700, 5, (-1, 0, 0)), Piece(0, 1)]
    check_attention(backend, make_latent(pieces, heads=heads, dtype=dtype, seed=heads, **PUBLISHED))


@pytest.mark.parametrize("sizes", [(4, 32, 8), (20, 40, 12), (80, 64, 16), (3, 128, 32), (8, 256, 64)], ids=str)
@pytest.mark.parametrize("backend", MODES)
def test_sizes(backend: str, sizes: tuple[int, int, int]) -> None:
    """Other numbers of heads and widths, powers of two or not, with and without a window."""
    heads, rank, rope_dim = sizes
    for dtype in DTYPES:
        for window in (None, 100):
            pieces = [Piece(700, 3, (-1, 0, 0)), Piece(0, 300), Piece(65, 1)]
            options: dict[str, Any] = {"rank": rank, "rope_dim": rope_dim, "window": window, "page_size": 16}
            check_attention(backend, make_latent(pieces, heads=heads, dtype=dtype, device="cuda", **options))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("deterministic", [True, False])
def test_launches(deterministic: bool, heads: int, dtype: torch.dtype) -> None:
    """Tiles of any height, any number of programs; garbage wherever the kernel must not read."""
    pieces = [Piece(3000, 1), Piece(0, 1), Piece(1500, 2, (-1, -1, 0, 1)), Piece(63, 1), Piece(64, 40)]
    case = make_latent(pieces, heads=heads, dtype=dtype, **PUBLISHED)
    assert case.latent is not None
    wanted = naive(case)
    for height in range(1, stack_of(case.latent, dtype, deterministic).max_rows + 1):
        for programs in (1, 2, 9, None):
            got = launch(case, rows_per_tile=height, programs=programs, deterministic=deterministic)
            check_values(got, wanted)
    check_values(launch(case, deterministic=deterministic, by_paths=True), wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", HEADS)
def test_invariance(heads: int, dtype: torch.dtype) -> None:
    """A row has the same bits alone, in a chunk and in a batch; a candidate has those of the row it may become."""
    rng = random.Random(heads)
    pieces = [*random_pieces(heads, 3, longest=200), Piece(1900, 1), Piece(0, 500)]
    check_row_invariance("exact-triton", make_latent(pieces, heads=heads, dtype=dtype, **PUBLISHED), heads)
    trees = [Piece(rng.randrange(1, 1500), 2, random_tree(rng, count)) for count in (12, 30)]
    check_path_invariance("exact-triton", make_latent(trees, heads=heads, dtype=dtype, **PUBLISHED))


@pytest.mark.parametrize("heads", HEADS)
def test_decode_is_prefill(heads: int) -> None:
    """One row, alone and with its keys split among programs, has the bits that it had in a prompt of thousands."""
    whole = Piece(0, 3000)
    case = make_latent([whole], heads=heads, dtype=torch.bfloat16, **PUBLISHED)
    prefill = case.attend("exact-triton")
    rng = random.Random(0)
    for rows in (1, 1, 2, 8, 17):
        first = rng.randrange(whole.real - rows)
        chunk = part(case, [(0, Piece(first, rows))])
        for programs in (1, 2, 5, None):
            got = launch(chunk, deterministic=True, programs=programs)
            assert torch.equal(got, prefill[first : first + rows]), (rows, programs)


@pytest.mark.parametrize("deterministic", [True, False])
def test_graph(deterministic: bool) -> None:
    """A captured step of single rows, replayed over other spans of its size, gives what it gives outside a graph."""
    backend = TritonAttention(deterministic)
    first, second = (
        make_latent([Piece(start, 1) for start in starts], heads=16, dtype=torch.bfloat16, **PUBLISHED)
        for starts in ((5, 1900, 0, 64, 63, 700), (1999, 1, 130, 8))
    )
    state = first.latent
    assert state is not None
    shape = geometry(first)
    kind = backend.static_kind(shape, (state,), torch.bfloat16)
    assert kind is not None
    wide = max(geometry(case).tables["main"].shape[1] for case in (first, second))
    for case in (first, second):
        case.tables = [table + [0] * (wide - len(table)) for table in case.tables]
    static = backend.static(kind, 8, 8, 2001, geometry(first))
    slots = max(len(first.keys), len(second.keys))
    latents = torch.zeros(slots, state.rank + state.rope_dim, dtype=torch.bfloat16, device="cuda")
    queries = torch.zeros(8, state.heads, state.rank + state.rope_dim, dtype=torch.bfloat16, device="cuda")

    def attend() -> torch.Tensor:
        mixer: Any = backend.prepare(static.geometry).mixer(state)
        out: torch.Tensor = mixer.attend(state, queries[..., : state.rank], queries[..., state.rank :], latents)
        return out

    static.fill(geometry(first))
    attend()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend()
    for case in (first, second, first):
        latents[: len(case.keys)] = case.keys[:, 0]
        queries[: len(case.rows)] = case.queries
        static.fill(geometry(case))
        graph.replay()
        check_values(out[: len(case.rows)], naive(case))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("heads", HEADS)
def test_row_operation(heads: int, interleaved: bool, dtype: torch.dtype) -> None:
    check_latent(OPS.get("triton")(), 17, heads, 512, 64, interleaved, dtype, "cuda")


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("heads", [*HEADS, 20])
def test_queries_in_one_launch(heads: int, interleaved: bool, dtype: torch.dtype) -> None:
    for rows in (1, 2, 4, 16, 17, 64):
        check_queries(rows, heads, 512, 64, 128, interleaved, dtype, "cuda")
        check_queries(rows, heads, 512, 64, 192, interleaved, dtype, "cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", HEADS)
def test_absorbed_products(heads: int, dtype: torch.dtype) -> None:
    """From either side, for 1 to 300 rows, a row has the same bits; and they are near the library's products."""
    layer = HeadLinear("kv_b_proj", heads, 512, (128, 128), WHOLE).to("cuda", dtype).requires_grad_(False)
    layer.weight.normal_(0, 512**-0.5)
    for run, width in ((partial(layer, 1), 512), (partial(layer.transposed, 0), 128)):
        x = torch.randn(300, heads, width, device="cuda").to(dtype)
        set_products(layer, deterministic=False)
        wanted = run(x).double()
        set_products(layer, deterministic=True)
        assert float((run(x).double() - wanted).abs().max()) <= (1e-4 if dtype == torch.float32 else 3e-2)
        check_row_bits(run, x, counts=(1, 2, 15, 16, 17, 63, 64, 65, 255, 300))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", HEADS)
def test_expanded(heads: int, dtype: torch.dtype) -> None:
    """Long chunks over expanded latents, alone and beside decodes and drafts, give what absorbed expansions give, which
    are rounded at other places."""
    decodes = [Piece(1500, 1), Piece(200, 2, (-1, 0, 0))]
    for pieces in ([Piece(0, 600)], [Piece(1000, 300, (-1, 0, -1)), *decodes, Piece(0, 257)]):
        case = make_latent(pieces, heads=heads, dtype=dtype, **PUBLISHED)
        matrices = HeadMatrices.of(case, 128)
        wanted = case.attend_from_heads("triton", replace(matrices, expands=False), deterministic=True).double()
        with pytest.raises(AssertionError, match="latents were expanded"):
            case.attend_from_heads("triton", replace(matrices, expands=False))
        got = case.attend_from_heads("triton", matrices)
        assert float((got.double() - wanted).abs().max()) <= 4 * CLOSE[dtype]


def test_expanded_logits(checkpoint: Callable[..., Path]) -> None:
    """Chunks that are long for the widths of a small model, after contexts: transformers' logits."""
    check_model(checkpoint("deepseek_v3", scale=3.0, v_head_dim=16), 64, "cuda", close=2e-5, deterministic=False)


def test_engine(checkpoint: Callable[..., Path]) -> None:
    """Log-probabilities are the reference's, with chains and trees."""
    check_backend(checkpoint("deepseek_v3", scale=3.0), "triton", "cuda")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_identity(checkpoint: Callable[..., Path], dtype: str) -> None:
    """With drafters of every kind beside one another, requests emit what they emit alone."""
    stand = Stand(checkpoint("deepseek_v3"), dtype, "cuda")
    with registered():
        check_identity(stand, mixed_jobs(stand, 8, 0.7, ["nothing", "everything"], seed=1), page_size=16)
