"""Paged attention in Triton, run by its interpreter: against the definition in float64, and against itself."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

import triton
import triton.language as tl

from stridelm.attention.host_view import HostView
from stridelm.attention.paged_step import paths
from stridelm.attention.triton import TritonAttention
from stridelm.cache.layout import HeadsKV, LatentKV
from stridelm.kernels import attention_plan
from stridelm.kernels.attention_plan import HeadStack, LatentStack, Stack, forms, make_plan
from stridelm.kernels.attention_splits import splits_of
from support.checks.compiled import compiled
from support.checks.paged_attention import MODES, launch
from support.doubles.binaries import recorded
from support.doubles.interpreter import INTERPRETED
from support.oracles.attention import (
    Piece,
    check_attention,
    check_path_invariance,
    check_row_invariance,
    check_values,
    geometry,
    make,
    make_latent,
    naive,
    random_pieces,
)

pytestmark = [INTERPRETED, pytest.mark.usefixtures("triton_modes")]
DTYPES = (torch.float32, torch.float16)  # the interpreter has no bfloat16 products
CPU = torch.device("cpu")


@pytest.fixture
def short_splits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Splits of 64 keys, so that small contexts have many."""
    monkeypatch.setattr(attention_plan, "SPLIT_KEYS", 64)
    make_plan.cache_clear()
    yield
    make_plan.cache_clear()


# Against the definition


@pytest.mark.parametrize(("heads", "kv_heads", "page_size"), [(2, 2, 1), (4, 2, 5), (3, 1, 16), (8, 1, 32)])
@pytest.mark.parametrize("backend", MODES)
def test_ragged_spans(backend: str, heads: int, kv_heads: int, page_size: int) -> None:
    """Decodes, chunks, prompts, chains and trees in one batch, invalid rows in some, in any GQA ratio."""
    for seed, dtype in enumerate(DTYPES):
        pieces = random_pieces(heads + 8 * seed, 3, longest=60, rows=12)
        check_attention(backend, make(pieces, heads=heads, kv_heads=kv_heads, dtype=dtype, page_size=page_size))


@pytest.mark.parametrize("head_dim", [16, 24, 80, 128, 256, 512])
@pytest.mark.parametrize("backend", MODES)
def test_head_sizes(backend: str, head_dim: int) -> None:
    """Head sizes from 16 to 512, powers of two or not."""
    for dtype in DTYPES:
        pieces = [Piece(70, 3, (-1, 0, 0)), Piece(0, 20)]
        check_attention(backend, make(pieces, heads=2, kv_heads=1, head_dim=head_dim, dtype=dtype, page_size=16))


@pytest.mark.parametrize("heads", [8, 4])
@pytest.mark.parametrize(("head_dim", "window"), [(256, 96), (512, None)])
@pytest.mark.parametrize("backend", MODES)
def test_layers_of_two_kinds(backend: str, head_dim: int, window: int | None, heads: int) -> None:
    """Gemma 4's sliding and full layers over the same spans of a step, and an assistant's rows (half as many heads, a
    span each at the newest entry), which see entries of the target in both."""
    chain = [] if heads == 4 else [Piece(110, 1, (-1, 0, 1))]
    pieces = [Piece(140, 1), Piece(0, 1), Piece(30, 1), *chain]
    for dtype in DTYPES:
        case = make(pieces, heads=heads, kv_heads=2, head_dim=head_dim, dtype=dtype, page_size=16, window=window)
        check_attention(backend, case)


@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.013, 0.2)])
@pytest.mark.parametrize("backend", MODES)
def test_eight_bits(backend: str, scales: tuple[float, float]) -> None:
    """Keys and values in eight bits, and latents, times their scales; the same bits in any batch if it promises so."""
    for seed, dtype in enumerate(DTYPES):
        pieces = random_pieces(seed, 3, longest=60, rows=12)
        for page_size, head_dim in ((5, 16), (16, 80)):
            check_attention(backend, make(pieces, dtype=dtype, page_size=page_size, head_dim=head_dim, scales=scales))
        latent = make_latent(pieces, heads=16, dtype=dtype, page_size=16, scales=scales[:1] * 2)
        check_attention(backend, latent)


@pytest.mark.parametrize("programs", [1, 2, 9])
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.usefixtures("short_splits")
def test_shared_keys_in_eight_bits(deterministic: bool, programs: int) -> None:
    """Partial sums of several programs are multiplied by the values' scale once."""
    pieces = [Piece(400, 1), Piece(0, 1), Piece(150, 2, (-1, -1, 0, 1)), Piece(64, 10)]
    case = make(pieces, page_size=16, dtype=torch.float16, scales=(0.5, 0.2))
    check_values(launch(case, programs=programs, deterministic=deterministic), naive(case))


@pytest.mark.usefixtures("short_splits")
def test_bits_of_eight_bits() -> None:
    """A row has the same bits in chunks of any size, beside other rows, and as a candidate."""
    tree = (-1, 0, 0, 1, 2, 2, -1, 6)
    for built, dtype in ((make, torch.float16), (make_latent, torch.float32)):
        check_row_invariance("exact-triton", built([Piece(130, 9), Piece(0, 30)], dtype=dtype, scales=(0.3, 0.3)))
        check_path_invariance("exact-triton", built([Piece(124, 2, tree)], dtype=dtype, scales=(0.3, 0.3)))


@pytest.mark.parametrize("window", [1, 7, 64, 1000])
@pytest.mark.parametrize("backend", MODES)
def test_windows(backend: str, window: int) -> None:
    """A sliding window counts positions: along a branch it drops the prompt, not the branch's siblings."""
    case = make(random_pieces(window, 3, longest=150, rows=12), heads=2, kv_heads=1, window=window)
    check_attention(backend, case)


@pytest.mark.parametrize("deterministic", [True, False])
def test_soft_cap(deterministic: bool) -> None:
    """Scores are capped before the mask is applied, so that masked ones stay masked."""
    case = make([Piece(80, 2, (-1, 0, 0, 2)), Piece(0, 30)])
    check_values(launch(case, soft_cap=3.0, deterministic=deterministic), naive(case, soft_cap=3.0))


@pytest.mark.parametrize("backend", MODES)
def test_whole_trees(backend: str) -> None:
    """Chains and stars of 64 rows: the last row uses the bitmask's sign bit."""
    for parents in (tuple(range(-1, 63)), (-1,) * 64, tuple(max(-1, row - 2) for row in range(64))):
        check_attention(backend, make([Piece(60, 2, parents), Piece(3, 1)], heads=2, kv_heads=1, dtype=torch.float16))


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("programs", [1, 2, 9])
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.usefixtures("short_splits")
def test_shared_keys(deterministic: bool, programs: int, window: int | None) -> None:
    """Any number of programs may share the keys of a tile, also with spans shorter than a split and with windows."""
    pieces = [Piece(400, 1), Piece(0, 1), Piece(150, 2, (-1, -1, 0, 1)), Piece(63, 1), Piece(64, 10)]
    case = make(pieces, heads=2, kv_heads=1, window=window, page_size=16, dtype=torch.float16)
    wanted = naive(case)
    for rows_per_tile in (2, 8):
        got = launch(case, programs=programs, rows_per_tile=rows_per_tile, deterministic=deterministic)
        check_values(got, wanted)


def test_long_context() -> None:
    """Splits as long as outside the tests, and more of them than `merge` loads at once."""
    case = make([Piece(5000, 1, (-1,)), Piece(3, 1)], heads=2, kv_heads=1, page_size=16, dtype=torch.float16)
    for deterministic in (True, False):
        check_values(launch(case, deterministic=deterministic), naive(case))


LATENTS: tuple[dict[str, Any], ...] = (
    {"heads": 4, "rank": 32, "rope_dim": 8},
    {"heads": 20, "rank": 40, "rope_dim": 12, "window": 9},
    {"heads": 80, "rank": 64, "rope_dim": 16},
)
"""Fewer heads than fill a tile, a number that is no power of two, and more than fit."""


@pytest.mark.parametrize("size", LATENTS, ids=str)
@pytest.mark.parametrize("backend", MODES)
def test_latents(backend: str, size: dict[str, Any]) -> None:
    """Latent rows as keys and, without their tails, as values, for any mixture of spans."""
    for seed, dtype in enumerate(DTYPES):
        pieces = random_pieces(seed, 2, longest=50, rows=9)
        check_attention(backend, make_latent(pieces, dtype=dtype, page_size=(16, 5)[seed % 2], seed=seed, **size))


@pytest.mark.parametrize("programs", [1, 2, 9])
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.usefixtures("short_splits")
def test_shared_latents(deterministic: bool, programs: int) -> None:
    """Any number of programs may share the latents of a tile."""
    pieces = [Piece(400, 1), Piece(0, 1), Piece(150, 2, (-1, -1, 0, 1)), Piece(63, 1), Piece(64, 10)]
    case = make_latent(pieces, heads=16, page_size=16, dtype=torch.float16)
    check_values(launch(case, programs=programs, deterministic=deterministic), naive(case))


def test_latents_of_published_sizes() -> None:
    """128 heads over rows of 512 + 64."""
    case = make_latent([Piece(40, 1, (-1,))], heads=128, rank=512, rope_dim=64, page_size=16, dtype=torch.float16)
    for deterministic in (True, False):
        check_values(launch(case, deterministic=deterministic), naive(case))


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("heads", [16, 64])
def test_latents_of_a_fixed_size(heads: int, deterministic: bool) -> None:
    """What a captured pass reads, filled with one step after another: with 64 heads a tile has room for one row."""
    backend, chain = TritonAttention(deterministic), tuple(range(-1, 4))
    steps = ([Piece(30, 1, chain), Piece(0, 16), Piece(7, 25)], [Piece(60, 17), Piece(5, 1)], [Piece(3, 1)] * 5)
    cases = [
        make_latent(pieces, heads=heads, page_size=16, dtype=torch.float16, seed=n) for n, pieces in enumerate(steps)
    ]
    for case in cases:
        case.tables = [table + [0] * (7 - len(table)) for table in case.tables]
    state, like = cases[0].latent, geometry(cases[0])
    assert state is not None
    kind = backend.static_kind(like, (state,), torch.float16)
    assert kind is not None
    static = backend.static(kind, 50, 5, 100, like)
    for case in cases:
        static.fill(geometry(case))
        mixer: Any = backend.prepare(static.geometry).mixer(state)
        queries = torch.zeros(50, heads, state.rank + state.rope_dim, dtype=torch.float16)
        queries[: len(case.rows)] = case.queries
        latent, turned = queries.split((state.rank, state.rope_dim), dim=2)
        got = mixer.attend(state, latent, turned, case.keys[:, 0])
        check_values(got[: len(case.rows)], naive(case))


# Against itself


@pytest.mark.parametrize("size", LATENTS[:2], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.usefixtures("short_splits")
def test_bits_of_latents(dtype: torch.dtype, size: dict[str, Any]) -> None:
    """A row has the same bits in chunks of any size, beside other rows, and as a candidate."""
    # A tile has at most 8 rows: spans of several tiles, with several splits of keys and with one.
    check_row_invariance("exact-triton", make_latent([Piece(130, 9), Piece(0, 12)], dtype=dtype, **size))
    tree = (-1, 0, 0, 1, 2, 2, -1, 6)
    check_path_invariance("exact-triton", make_latent([Piece(124, 2, tree)], dtype=dtype, **size))


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.usefixtures("short_splits")
def test_row_invariance(dtype: torch.dtype, window: int | None) -> None:
    """A real row has the same bits alone, in a chunk of any size, and in a batch."""
    case = make([Piece(130, 9), Piece(0, 40)], heads=3, kv_heads=1, window=window, dtype=dtype)
    check_row_invariance("exact-triton", case)


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.usefixtures("short_splits")
def test_path_invariance(dtype: torch.dtype, window: int | None) -> None:
    """A candidate of any tree has the bits of the real row that may later take its place."""
    pieces = [Piece(124, 2, (-1, 0, 0, 1, 2, 2, -1, 6, 3, 8, 5, 7))]
    check_path_invariance("exact-triton", make(pieces, heads=2, kv_heads=1, window=window, dtype=dtype))


@pytest.mark.usefixtures("short_splits")
def test_what_the_host_decides_is_not_in_the_bits() -> None:
    """The bits depend neither on the tile height, nor on how many programs share keys, nor on the bound on keys."""
    pieces = [Piece(300, 1), Piece(90, 12), Piece(0, 30), Piece(129, 1, (-1, 0, 1))]
    case = make(pieces, heads=2, kv_heads=1, dtype=torch.float16)
    wanted = launch(case, deterministic=True, programs=1)
    for rows, programs, max_keys in ((4, 2, 500), (3, 3, 301), (32, 9, 10_000), (8, 1, 4096)):
        got = launch(case, deterministic=True, rows_per_tile=rows, programs=programs, max_keys=max_keys)
        assert torch.equal(got, wanted)


@pytest.mark.usefixtures("short_splits")
def test_other_bits_are_seen() -> None:
    """In the other mode the number of programs changes the bits: the interpreter hides no such dependence."""
    case = make([Piece(300, 1), Piece(90, 12)], heads=2, kv_heads=1, dtype=torch.float32)
    assert not torch.equal(launch(case, programs=1), launch(case, programs=3))


@pytest.mark.parametrize("window", [None, 5])
def test_paths_are_the_bitmasks(window: int | None) -> None:
    """Columns by path agree with the bitmask; for rows whose path is contiguous, bit for bit."""
    case = make([Piece(60, 2, (-1, 0, 1, 0, 3, -1)), Piece(0, 3)], window=window)
    by_paths, by_masks = launch(case, deterministic=True, by_paths=True), launch(case, deterministic=True)
    check_values(by_paths, naive(case))
    is_chain = ~HostView.of(geometry(case)).ordered
    assert torch.equal(by_paths[is_chain], by_masks[is_chain])


def test_paths_of_bitmasks() -> None:
    masks = torch.tensor([0, 0b1, 0b1011, -(1 << 63) | 0b100])
    wanted = [[], [0], [0, 1, 3], [2, 63]]
    assert [[row for row in path if row >= 0] for path in paths(masks).tolist()] == wanted
    assert all(path == sorted(path, key=lambda row: row < 0) for path in paths(masks).tolist())


@pytest.mark.usefixtures("short_splits")
def test_what_the_host_decides_is_not_in_the_bits_of_latents() -> None:
    pieces = [Piece(300, 1), Piece(90, 12), Piece(129, 1, (-1, 0, 1))]
    case = make_latent(pieces, heads=16, dtype=torch.float16)
    wanted = launch(case, deterministic=True, programs=1)
    for rows, programs, max_keys in ((2, 2, 500), (1, 3, 301), (1, 9, 10_000)):
        got = launch(case, deterministic=True, rows_per_tile=rows, programs=programs, max_keys=max_keys)
        assert torch.equal(got, wanted)


# Decisions of the host


def test_latent_groups() -> None:
    """As many heads as a tile has room for, equally many in each group; and as many rows."""

    def sizes(deterministic: bool, dtype: torch.dtype = torch.bfloat16) -> list[tuple[int, int]]:
        stacks = [LatentStack.of(heads, 512, dtype, deterministic) for heads in (1, 4, 16, 20, 64, 80, 128, 67)]
        return [(stack.per_group, stack.max_rows) for stack in stacks]

    assert sizes(False) == [(1, 64), (4, 16), (16, 4), (20, 3), (64, 1), (40, 1), (64, 1), (1, 64)]
    assert sizes(True) == [(1, 32), (4, 8), (16, 2), (20, 1), (32, 1), (20, 1), (32, 1), (1, 32)]
    assert sizes(True, torch.float32) == [(1, 16), (4, 4), (16, 1), (10, 1), (16, 1), (16, 1), (16, 1), (1, 16)]
    with pytest.raises(ValueError, match="float64"):
        LatentStack.of(16, 512, torch.float64, True)


def test_programs_run_at_once() -> None:
    """On a card of 132 processors: a tile's keys are shared by as many programs as run at once, and by few if sharing
    hardly pays. Blocks are long where one program for each processor keeps most of them busy, and short if that lets
    all tiles run at once."""

    def plan(tiles: int, max_keys: int, rows: int = 1, deterministic: bool = False) -> tuple[int, int]:
        stack = HeadStack.of(32, 8, 128, torch.bfloat16, deterministic)
        made = make_plan(stack, tiles, rows, max_keys, None, CPU)
        return made.programs, made.shape.keys

    assert [plan(tiles, 1 << 15) for tiles in (1, 2, 8, 16)] == [(16, 128), (8, 128), (2, 128), (1, 128)]
    assert [plan(tiles, 1 << 15)[0] for tiles in (6, 10, 12, 17, 21, 256)] == [6, 4, 3, 2, 1, 1]
    assert [plan(tiles, 1 << 15)[1] for tiles in (5, 6, 7, 9, 12, 13, 16, 17)] == [128, 64, 128, 64, 64, 128, 128, 64]
    assert [plan(tiles, 1 << 15, rows=8)[1] for tiles in (1, 16, 17)] == [128, 128, 64]
    assert [plan(tiles, 1 << 15, rows=9)[1] for tiles in (1, 16, 17)] == [64, 64, 64]
    assert plan(1, 513) == (5, 128)
    assert [plan(10, keys)[0] for keys in (512, 513, 1025, 9999)] == [1, 2, 3, 4]
    assert [plan(tiles, 1024)[1] for tiles in (49, 50, 66, 67)] == [64, 32, 32, 64]
    assert [plan(tiles, 1024, rows=8)[1] for tiles in (33, 34, 49, 50)] == [64, 32, 32, 64]
    assert plan(48, 1024, deterministic=True) == (1, 64)


@triton.jit(do_not_specialize=["blocks", "programs", "least"])
def _divide(out: Any, blocks: Any, programs: Any, least: Any, merging: Any) -> None:
    origin, unit, number = splits_of(3, 3 + blocks, programs, least, merging, UNIT=0)
    tl.store(out, origin)
    tl.store(out + 1, unit)
    tl.store(out + 2, number)


def test_tiles_that_fill_a_captured_size_share_no_keys() -> None:
    """On a card of 132 processors: a chunk of 256 rows beside few others has 64 tiles of latents, and its pass is
    captured with 80; of a usual width 128 rows have 4 tiles, of 11. Programs are for those that have rows, and there is
    a workspace for all, if it is small. Not where splits are fixed."""

    def plan(stack: Stack, tiles: int, filled: int) -> tuple[int, int]:
        made = make_plan(stack, tiles, stack.max_rows, 1 << 15, None, CPU, filled_tiles=filled)
        return made.programs, made.workspace

    latents = LatentStack.of(16, 512, torch.bfloat16, False)
    assert plan(latents, 80, 80) == (1, 0)
    assert plan(latents, 80, 64) == (2, 2 * 80 * 64 * 514)
    assert [plan(latents, 80, filled)[0] for filled in (32, 16, 8)] == [4, 8, 12]
    assert plan(latents, 1100, 1) == (1, 0)
    heads = HeadStack.of(32, 8, 128, torch.bfloat16, False)
    assert [plan(heads, 11, filled)[0] for filled in (11, 8, 4)] == [1, 2, 4]
    for stack in (HeadStack.of(32, 8, 128, torch.bfloat16, True), LatentStack.of(16, 512, torch.bfloat16, True)):
        assert plan(stack, 24, 8) == plan(stack, 24, 24)


def test_keys_are_divided_as_is_soonest_done() -> None:
    """Splits are longer over more keys, since somebody merges them; never more than programs, nor shorter than is worth
    one."""

    def divided(blocks: int, programs: int = 1000, least: int = 1, merging: float = 0.125) -> tuple[int, int]:
        out_3 = torch.zeros(3, dtype=torch.int32)
        _divide[(1,)](out_3, blocks, programs, least, merging)
        assert out_3[0] == 3
        return int(out_3[1]), int(out_3[2])

    assert [divided(blocks) for blocks in (1, 9, 33, 129)] == [(1, 1), (1, 9), (2, 17), (4, 33)]
    assert divided(129, merging=0.03125) == (2, 65)
    assert divided(129, programs=10) == (13, 10)
    assert [divided(blocks, least=16) for blocks in (9, 23, 24, 129)] == [(9, 1), (23, 1), (12, 2), (17, 8)]


def test_shorter_blocks() -> None:
    pieces = random_pieces(5, 20, longest=70, rows=2)
    case = make(pieces, heads=8, kv_heads=8, head_dim=128, dtype=torch.float16, page_size=16)
    check_attention("fast-triton", case)


def test_workspace() -> None:
    """A full grid needs none; a small one needs room for its splits, in deterministic mode for all of `max_keys`."""

    def floats(tiles: int, max_keys: int, deterministic: bool, rows: int = 1, window: int | None = None) -> int:
        stack = HeadStack.of(32, 8, 128, torch.bfloat16, deterministic)
        return make_plan(stack, tiles, rows, max_keys, window, CPU).workspace

    assert floats(256, 1 << 17, True) == floats(256, 1 << 17, False) == 0
    assert floats(1, 64, True) == floats(1, 64, False) == 0
    assert floats(1, 1 << 15, True) == 128 * 32 * 130
    assert floats(1, 1 << 15, False) == 16 * 32 * 130
    assert floats(1, 1 << 20, True, window=1000) == 6 * 32 * 130
    assert floats(32, 1 << 17, True, rows=16) == 0, "over the limit: one program per tile"


def test_refusals() -> None:
    with pytest.raises(ValueError, match="float64"):
        HeadStack.of(32, 8, 128, torch.float64, True)
    with pytest.raises(ValueError, match="256 query heads"):
        HeadStack.of(256, 1, 128, torch.float16, True)
    with pytest.raises(ValueError, match="heads of width 1024 need attention='reference'"):
        HeadStack.of(8, 1, 1024, torch.float16, True)


def test_long_blocks_only_where_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program of them takes 136 KiB of shared memory, which not every card has."""
    stack = HeadStack.of(32, 8, 128, torch.bfloat16, False)
    monkeypatch.setattr("stridelm.kernels.attention_plan.shared_memory", lambda device: 99 << 10)
    assert {shape.keys for _, shape, _ in forms(stack, CPU)} == {32, 64}
    make_plan.cache_clear()
    assert make_plan(stack, 1, 1, 1 << 15, None, CPU).shape.keys == 64
    make_plan.cache_clear()


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(32, 8, 128), (16, 16, 64), (64, 4, 256), (32, 4, 512)])
def test_every_plan_has_a_form(heads: int, kv_heads: int, dim: int, dtype: torch.dtype, deterministic: bool) -> None:
    """A start launches all binaries that a step may need: block sizes, and whether programs share a tile's keys."""
    stack = HeadStack.of(heads, kv_heads, dim, dtype, deterministic)
    check_forms(stack, [1 << exponent for exponent in range(stack.max_rows.bit_length())])


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("heads", [16, 20, 128])
def test_every_plan_over_latents_has_a_form(heads: int, dtype: torch.dtype, deterministic: bool) -> None:
    stack = LatentStack.of(heads, 512, dtype, deterministic)
    check_forms(stack, range(1, stack.max_rows + 1))


def check_forms(stack: Stack, heights: Iterable[int]) -> None:
    """What is planned for tiles of these numbers of rows is launched by a start."""
    launched = {(shape, programs > 1) for _, shape, programs in forms(stack, CPU)}
    planned = set()
    for rows in heights:
        for tiles, keys in itertools.product((1, 2, 5, 13, 40, 90, 130, 300, 2000), (1, 300, 5000, 100_000)):
            made = make_plan(stack, tiles, rows, keys, None, CPU)
            planned.add((made.shape, made.splits > 0))
    assert planned <= launched
    assert len(planned) > 1


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_start_launches_over_no_rows(deterministic: bool) -> None:
    """Heads and latents, on empty pools: nothing is read that does not exist."""
    backend = TritonAttention(deterministic)
    backend.check((HeadsKV.of(4, 2, 16), LatentKV("full", None, 16, 32, 8, 1.0)), torch.float16)
    backend.warm_up(16, CPU)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("deterministic", [True, False])
def test_steps_need_only_the_binaries_of_a_start(deterministic: bool, window: int | None) -> None:
    cases = []
    for seed in range(12):
        pieces = random_pieces(seed, 1 + seed % 4, longest=600 if seed % 3 else 60, rows=20)
        if deterministic:  # rows on side branches have a launch of their own there, which is made when it is needed
            pieces = [Piece(each.start, each.real, tuple(range(-1, len(each.parents) - 1))) for each in pieces]
        cases.append(make(pieces, window=window, dtype=torch.float16, page_size=16, seed=seed))
    backend = TritonAttention(deterministic)
    backend.check((cases[0].kv,), torch.float16)
    with recorded(run=False) as made:
        backend.warm_up(16, CPU)
    with recorded(run=False) as needed:
        for case in cases:
            case.attend("exact-triton" if deterministic else "fast-triton")
    assert {name.partition(".")[2] for name in needed} == {"attend", "merge"}
    for kernel, binaries in needed.items():
        assert binaries <= made[kernel], kernel


# As it is compiled


def test_fp8_on_hopper(tmp_path: Path) -> None:
    """For compute capability 9.0 all kernels that write or read KV in eight bits compile, convert it by instructions
    that do so, and fit into shared memory. They fit into registers, too, but for float32, which is for tests, and
    latents in splits of a fixed size, whose sums pass through shared memory; and but for two of them over latents."""
    kernels = compiled("kv_compiles", tmp_path, "eight")
    assert {kernel["name"] for kernel in kernels} == {"attend", "merge", "_turn_kernel", "_latent_kernel"}
    assert all(kernel["conversions"] for kernel in kernels if kernel["name"] != "merge")
    assert all(kernel["shared"] <= 227 * 1024 for kernel in kernels)
    for kernel in kernels:
        is_latent = kernel["kind"] == "TritonLatents"
        if kernel["dtype"] != "torch.float32" and not (is_latent and kernel["deterministic"]):
            assert kernel["stack"] <= (8 if is_latent else 0), kernel


def test_programs_that_fit_on_hopper(tmp_path: Path) -> None:
    """For compute capability 9.0 as many programs as plans count on have room on a processor, where keys are shared or
    blocks are not short, which they are only for many tiles. Long blocks, too, fit into registers."""
    kernels = compiled("kv_compiles", tmp_path, "planned")
    assert all(kernel["shared"] <= 227 * 1024 for kernel in kernels)
    tiles = [kernel for kernel in kernels if kernel["name"] == "attend"]
    assert {kernel["counted"] for kernel in tiles} == {1, 2, 3, 4}
    assert not any(kernel["stack"] for kernel in tiles if kernel["keys"] == 128)
    for kernel in tiles:
        assert kernel["counted"] <= kernel["fit"] or (kernel["keys"] == 32 and kernel["shared_keys"]), kernel
