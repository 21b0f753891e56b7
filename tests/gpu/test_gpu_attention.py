"""The paged attention kernel on a GPU: against the definition, against itself bit for bit, and in a captured graph."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from stridelm.attention import BACKENDS
from stridelm.kernels.attention import paged_attention
from stridelm.kernels.attention_plan import HeadStack, make_plan
from support.checks.engine import check_backend
from support.checks.paged_attention import MODES, launch
from support.gpu import NEEDS_GPU
from support.oracles.attention import (
    Case,
    Piece,
    check_attention,
    check_path_invariance,
    check_row_invariance,
    check_values,
    geometry,
    make,
    naive,
    part,
    random_pieces,
    random_tree,
)

pytestmark = [*NEEDS_GPU, pytest.mark.usefixtures("triton_modes")]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HALF = (torch.bfloat16, torch.float16)
NEEDS_FLASHINFER = pytest.mark.skipif("flashinfer" not in BACKENDS, reason="flashinfer is not installed")
BACKEND_NAMES = [*MODES, pytest.param("flashinfer", marks=NEEDS_FLASHINFER)]
RATIOS = ((3, 3), (4, 2), (6, 2), (8, 1), (32, 8))
CHAIN = tuple(range(-1, 63))


# Against the definition


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), RATIOS)
@pytest.mark.parametrize("backend", BACKEND_NAMES)
def test_ragged_spans(backend: str, heads: int, kv_heads: int, dtype: torch.dtype) -> None:
    """Decodes, chunks, prompts, chains and trees in one batch, invalid rows in some, in any GQA ratio."""
    for seed, page_size in enumerate((1, 5, 16)):
        pieces = [*random_pieces(seed, 6, longest=300), Piece(1500, 1), Piece(700, 5, (-1, 0, 0))]
        sizes: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "page_size": page_size}
        check_attention(backend, make(pieces, **sizes, head_dim=64, dtype=dtype, device="cuda", seed=seed))


@pytest.mark.parametrize("head_dim", [8, 16, 24, 64, 80, 96, 128, 256, 512])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("backend", BACKEND_NAMES)
def test_head_sizes(backend: str, window: int | None, head_dim: int) -> None:
    for dtype in DTYPES:
        pieces = [Piece(700, 3, (-1, 0, 0)), Piece(0, 300), Piece(65, 1)]
        case = make(pieces, head_dim=head_dim, window=window, dtype=dtype, device="cuda", page_size=16)
        check_attention(backend, case)


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("backend", BACKEND_NAMES)
def test_plain_steps(backend: str, window: int | None) -> None:
    """Decodes, chunks, prompts and chains, some followed by invalid rows: without branches no backend needs a mask."""
    decodes = [Piece(3000, 1), Piece(0, 1), Piece(64, 1), Piece(99, 1), Piece(100, 1)]
    chains = [Piece(700, 1, CHAIN[:5]), Piece(63, 2, CHAIN), Piece(5, 1, CHAIN[:4], frozenset({1, 2, 3})), Piece(0, 9)]
    prompts = [Piece(0, 300), Piece(700, 130), Piece(1500, 1), Piece(31, 65, CHAIN[:7])]
    for seed, pieces in enumerate((decodes, chains, prompts)):
        sizes: dict[str, Any] = {"heads": 8, "kv_heads": 2, "head_dim": 128, "page_size": 16, "window": window}
        check_attention(backend, make(pieces, **sizes, dtype=torch.bfloat16, device="cuda", seed=seed))


@NEEDS_FLASHINFER
@pytest.mark.parametrize("kind", ["mistral", "qwen3"])
def test_engine_on_flashinfer(checkpoint: Callable[..., Path], kind: str) -> None:
    """Log-probabilities are the reference's, with windows, chains and trees."""
    options = {"sliding_window": 7} if kind == "mistral" else {}
    check_backend(checkpoint(kind, head_dim=128, scale=3.0, **options), "flashinfer", "cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("deterministic", [True, False])
def test_launches(deterministic: bool, dtype: torch.dtype) -> None:
    """Tiles of any height, any number of programs, capped scores; garbage wherever the kernel must not read."""
    pieces = [Piece(3000, 1), Piece(0, 1), Piece(1500, 2, (-1, -1, 0, 1)), Piece(63, 1), Piece(64, 90)]
    case = make(pieces, heads=8, kv_heads=2, head_dim=128, page_size=16, dtype=dtype, device="cuda")
    wanted = naive(case)
    for rows_per_tile in (1, 2, 4, None):
        for programs in (1, 2, 9, None):
            got = launch(case, rows_per_tile=rows_per_tile, programs=programs, deterministic=deterministic)
            check_values(got, wanted)
    check_values(launch(case, deterministic=deterministic, by_paths=True), wanted)
    check_values(launch(case, deterministic=deterministic, soft_cap=3.0), naive(case, soft_cap=3.0))


# Bit for bit


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_invariance(dtype: torch.dtype, head_dim: int, window: int | None) -> None:
    """A row has the same bits alone, in a chunk and in a batch; a candidate has those of the row it may become."""
    rng = random.Random(head_dim)
    for seed, (heads, kv_heads) in enumerate(((8, 2), (3, 1))):
        sizes: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "window": window}
        sizes["page_size"] = 16
        pieces = [*random_pieces(seed, 4, longest=300), Piece(1900, 1), Piece(0, 700)]
        check_row_invariance("exact-triton", make(pieces, **sizes, dtype=dtype, device="cuda", seed=seed), seed)
        trees = [Piece(rng.randrange(1, 1500), 2, random_tree(rng, count)) for count in (12, 40)]
        check_path_invariance("exact-triton", make(trees, **sizes, dtype=dtype, device="cuda", seed=seed))


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 8), (8, 8), (16, 2)])
def test_decode_is_prefill(heads: int, kv_heads: int, dtype: torch.dtype) -> None:
    """One row, alone and with its keys split among programs, has the bits that it had in a prompt of thousands."""
    whole = [Piece(0, 5000), Piece(2000, 3000)]
    case = make(whole, heads=heads, kv_heads=kv_heads, head_dim=128, page_size=16, dtype=dtype, device="cuda")
    prefill = case.attend("exact-triton")
    where = {row: n for n, row in enumerate(case.rows)}
    rng = random.Random(0)
    for rows in (1, 1, 2, 8, 16, 17, 500):
        for request, span in enumerate(whole):
            first = rng.randrange(span.real - rows)
            chunk = part(case, [(request, Piece(span.start + first, rows))])
            n = where[request, first]
            height = min(rows, HeadStack.of(heads, kv_heads, 128, dtype, True).max_rows)
            for programs in (1, 2, 5, None):
                got = launch(chunk, deterministic=True, programs=programs, rows_per_tile=height)
                assert torch.equal(got, prefill[n : n + rows]), (rows, programs)


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_decode_batch_is_decode_alone(dtype: torch.dtype) -> None:
    """In a batch that fills the GPU one program reads all keys of a tile; alone, many programs split them."""
    lengths = [random.Random(n).randrange(1, 6000) for n in range(256)]
    pieces = [Piece(length, 1) for length in lengths]
    case = make(pieces, heads=8, kv_heads=2, head_dim=128, page_size=16, dtype=dtype, device="cuda")
    together = case.attend("exact-triton")
    for n in range(0, 256, 16):
        alone = part(case, [(n, pieces[n])]).attend("exact-triton")
        assert torch.equal(alone[0], together[n]), lengths[n]


# In a captured graph


class Captured:
    """A captured launch over six spans of at most eight rows; all its inputs can be changed between replays."""

    spans, rows, max_keys, page_size = 6, 8, 3000, 16
    heads, kv_heads, dim, rows_per_tile = 8, 2, 128, 4

    def __init__(self, deterministic: bool) -> None:
        width = -(-self.max_keys // self.page_size)
        rows = self.spans * self.rows
        slots = (self.spans * width + 3) * self.page_size
        self.keys, self.values = torch.randn(2, slots, self.kv_heads, self.dim, device="cuda").bfloat16()
        self.queries, self.out = torch.randn(2, rows, self.heads, self.dim, device="cuda").bfloat16()
        tiles = [(span, row) for span in range(self.spans) for row in range(0, self.rows, self.rows_per_tile)]
        self.tile_span, self.tile_row = torch.tensor(tiles, dtype=torch.int32, device="cuda").t().contiguous()
        self.inputs: dict[str, Any] = {
            name: torch.zeros(self.spans, dtype=torch.int32, device="cuda")
            for name in ("firsts_R", "counts_R", "starts_R", "reals_R")
        }
        self.inputs["tables_RP"] = torch.zeros(self.spans, width, dtype=torch.int32, device="cuda")
        self.inputs["ancestors_N"] = torch.zeros(rows, dtype=torch.int64, device="cuda")
        self.inputs["positions_N"] = torch.zeros(rows, dtype=torch.int64, device="cuda")
        self.deterministic = deterministic
        stack = HeadStack.of(self.heads, self.kv_heads, self.dim, torch.bfloat16, deterministic)
        plan = make_plan(stack, len(tiles), self.rows_per_tile, self.max_keys, None, self.queries.device)
        self.workspace = torch.empty(plan.workspace, device="cuda")
        self.run()  # compiles
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.run()

    def run(self) -> None:
        paged_attention(
            self.queries,
            self.keys,
            self.values,
            self.out,
            tile_span_T=self.tile_span,
            tile_row_T=self.tile_row,
            page_size=self.page_size,
            rows_per_tile=self.rows_per_tile,
            scale=self.dim**-0.5,
            max_keys=self.max_keys,
            deterministic=self.deterministic,
            workspace=self.workspace,
            **self.inputs,
        )

    def case(self, pieces: list[Piece]) -> Case:
        """Write a step over this pool into the inputs."""
        sizes: dict[str, Any] = {
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "head_dim": self.dim,
            "page_size": self.page_size,
        }
        case = make(pieces, **sizes, dtype=torch.bfloat16, device="cuda")
        case.keys, case.values, case.queries = self.keys, self.values, self.queries[: len(case.rows)]
        shape = geometry(case)
        wanted = {
            "firsts_R": shape.firsts,
            "counts_R": shape.counts,
            "starts_R": shape.starts,
            "reals_R": shape.reals,
        }
        for tensor in self.inputs.values():
            tensor.zero_()
        for name, values in wanted.items():
            self.inputs[name][: len(pieces)] = values
        for span, table in enumerate(case.tables):
            self.inputs["tables_RP"][span, : len(table)] = torch.tensor(table)
        self.inputs["ancestors_N"][: len(case.rows)] = shape.ancestors
        self.inputs["positions_N"][: len(case.rows)] = shape.positions
        return case


@pytest.mark.parametrize("deterministic", [True, False])
def test_graph(deterministic: bool) -> None:
    """A captured launch stays correct when starts, lengths, trees and tables change between replays."""
    captured = Captured(deterministic)
    rng = random.Random(0)
    for _ in range(6):
        pieces = []
        for _ in range(rng.randint(1, captured.spans)):
            real = rng.randint(1, captured.rows)
            tree = random_tree(rng, rng.randint(0, captured.rows - real))
            pieces.append(Piece(rng.randrange(captured.max_keys - captured.rows), real, tree))
        case = captured.case(pieces)
        captured.workspace.fill_(float("nan"))
        captured.out.fill_(7.0)
        captured.graph.replay()
        replayed = captured.out.clone()
        check_values(replayed[: len(case.rows)], naive(case))
        assert bool((replayed[len(case.rows) :] == 7.0).all()), "a row of no span was written"
        captured.run()
        assert torch.equal(captured.out, replayed)
