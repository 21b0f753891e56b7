"""Every attention backend against the definition in float64, and against itself with other rows in the batch."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from stridelm.attention import BACKENDS
from stridelm.cache.layout import HeadsKV, LatentKV
from support.doubles.means import MeanState
from support.oracles.attention import (
    INEXACT,
    Piece,
    backends,
    check_attention,
    check_path_invariance,
    check_row_invariance,
    make,
    make_latent,
    random_pieces,
    random_tree,
)

DTYPES = (torch.bfloat16, torch.float32, torch.float64)
RATIOS = ((3, 3), (4, 2), (6, 2), (4, 1), (16, 2))
"""(query heads, KV heads): 1, 2, 3, 4 and 8 query heads per KV head."""
BACKEND_NAMES = backends("cpu")
LATENT_NAMES = [name for name in BACKEND_NAMES if LatentKV in BACKENDS.get(name).mixers]
CHAIN = tuple(range(-1, 63))
STAR = (-1,) * 64


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), RATIOS)
@pytest.mark.parametrize("backend", BACKEND_NAMES)
def test_ragged_spans(backend: str, heads: int, kv_heads: int, dtype: torch.dtype) -> None:
    """Any mixture of decodes, chunks, prompts, chains and trees, in any GQA ratio and dtype, is dense attention."""
    for seed in range(3):
        pieces = random_pieces(seed, 6, longest=150)
        case = make(pieces, heads=heads, kv_heads=kv_heads, dtype=dtype, seed=seed, page_size=(1, 5, 16)[seed])
        check_attention(backend, case)


@pytest.mark.parametrize("head_dim", [16, 24, 64, 80, 128, 256, 512])
@pytest.mark.parametrize("backend", BACKEND_NAMES)
def test_head_sizes(backend: str, head_dim: int) -> None:
    """Head sizes from 16 to 512, powers of two or not."""
    for dtype in DTYPES:
        check_attention(backend, make(random_pieces(head_dim, 4), head_dim=head_dim, dtype=dtype))


@pytest.mark.parametrize("backend", BACKEND_NAMES)
def test_keys_and_values_of_two_widths(backend: str) -> None:
    """Served, or refused when the model is loaded."""
    case = make(random_pieces(5, 4), head_dim=24, value_dim=16, window=9)
    if backend == "reference":
        check_attention(backend, case)
        check_row_invariance(backend, case, 0)
    else:
        with pytest.raises(ValueError, match="need attention='reference'"):
            case.attend(backend)


@pytest.mark.parametrize("backend", list(BACKENDS))
def test_unknown_layers_are_refused(backend: str) -> None:
    """The error at load time names a kind of layer state for which a backend has no mixer."""
    made = BACKENDS.get(backend)(backend not in INEXACT)
    with pytest.raises(ValueError, match=r"MeanState, only with .*HeadsKV"):
        made.check((HeadsKV.of(4, 2, 64), MeanState("full", None, 8)), torch.bfloat16)


@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.013, 0.2)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", BACKEND_NAMES)
def test_eight_bits(backend: str, dtype: torch.dtype, scales: tuple[float, float]) -> None:
    """Entries in eight bits are what they stand for, times their scales: in attention over heads and over latents, for
    any rows in any batch."""
    for seed in range(2):
        pieces = random_pieces(seed, 4, longest=150)
        check_attention(backend, make(pieces, dtype=dtype, seed=seed, page_size=5, scales=scales, window=40))
    tree = random_tree(random.Random(3), 9)
    bits = make([Piece(130, 9), Piece(0, 30)], dtype=dtype, scales=scales)
    check_row_invariance(backend, bits)
    check_path_invariance(backend, make([Piece(124, 2, tree)], dtype=dtype, scales=scales))
    if backend in LATENT_NAMES:
        scale = scales[:1] * 2
        check_attention(backend, make_latent(random_pieces(3, 4, longest=150), dtype=dtype, scales=scale))
        check_path_invariance(backend, make_latent([Piece(124, 2, tree)], dtype=dtype, scales=scale))


@pytest.mark.parametrize("window", [1, 2, 7, 64, 129, 1000])
@pytest.mark.parametrize("backend", BACKEND_NAMES)
def test_windows(backend: str, window: int) -> None:
    """A sliding window counts positions: along a branch it drops the prompt, not the branch's siblings."""
    for seed in range(3):
        check_attention(backend, make(random_pieces(seed, 6), window=window, seed=seed))


@pytest.mark.parametrize("backend", BACKEND_NAMES)
def test_long_contexts(backend: str) -> None:
    """Contexts of many key blocks, beside ones of a single token."""
    tree = random_tree(random.Random(1), 64)
    pieces = [
        Piece(1500, 1),
        Piece(0, 1),
        Piece(700, 300),
        Piece(0, 1),
        Piece(1200, 2, tree),
        Piece(127, 1),
        Piece(128, 1),
    ]
    for dtype in DTYPES:
        check_attention(backend, make(pieces, dtype=dtype, page_size=16))


@pytest.mark.parametrize("backend", BACKEND_NAMES)
def test_whole_trees(backend: str) -> None:
    """Chains and stars of 64 rows: the last row uses the bitmask's sign bit."""
    for parents in (CHAIN, STAR, tuple(max(-1, row - 2) for row in range(64)), CHAIN[:63] + (-1,)):
        for real in (1, 7):
            check_attention(backend, make([Piece(60, real, parents), Piece(3, 1)]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("backend", BACKEND_NAMES)
def test_row_invariance(backend: str, window: int | None, dtype: torch.dtype) -> None:
    """A real row has the same bits alone, in a chunk of any size, and in a batch."""
    for seed, (heads, kv_heads) in enumerate(RATIOS):
        pieces = random_pieces(seed, 5, longest=300)
        case = make(pieces, heads=heads, kv_heads=kv_heads, window=window, dtype=dtype, seed=seed)
        check_row_invariance(backend, case, seed)


@pytest.mark.parametrize("head_dim", [16, 64, 128, 256])
@pytest.mark.parametrize("backend", BACKEND_NAMES)
def test_row_invariance_of_wide_heads(backend: str, head_dim: int) -> None:
    """Also at the head sizes of real models, and over contexts of many blocks."""
    for dtype in DTYPES:
        pieces = [Piece(900, 1), Piece(0, 140), Piece(300, 37), Piece(5, 1)]
        check_row_invariance(backend, make(pieces, head_dim=head_dim, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("backend", BACKEND_NAMES)
def test_path_invariance(backend: str, window: int | None, dtype: torch.dtype) -> None:
    """A candidate of any tree has the bits of the real row that may later take its place."""
    rng = random.Random(3)
    for seed, (heads, kv_heads) in enumerate(RATIOS):
        pieces = [
            Piece(rng.randrange(150), rng.choice((1, 3)), random_tree(rng, rng.choice((3, 12, 64)))) for _ in range(2)
        ]
        case = make(pieces, heads=heads, kv_heads=kv_heads, window=window, dtype=dtype, seed=seed)
        check_path_invariance(backend, case)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", LATENT_NAMES)
def test_latents(backend: str, dtype: torch.dtype) -> None:
    """Latent rows: any mixture of spans, with few heads, many, and a number that is no power of two, in widths that are
    powers of two or not, with and without a window."""
    sizes: tuple[dict[str, Any], ...] = (
        {},
        {"heads": 20, "rank": 40, "rope_dim": 12, "window": 9},
        {"heads": 80, "rank": 64, "rope_dim": 16},
    )
    for seed, size in enumerate(sizes):
        case = make_latent(
            random_pieces(seed, 5, longest=150), dtype=dtype, seed=seed, page_size=(16, 5, 1)[seed], **size
        )
        check_attention(backend, case)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", LATENT_NAMES)
def test_bits_of_latents(backend: str, dtype: torch.dtype) -> None:
    """A row over latents has the same bits in chunks of any size, beside any other rows, and as a candidate."""
    tree = random_tree(random.Random(7), 24)
    check_path_invariance(backend, make_latent([Piece(70, 2, tree), Piece(0, 1)], dtype=dtype))
    for seed, heads in enumerate((3, 16, 72)):
        pieces = [Piece(400, 1), Piece(0, 40), Piece(290, 20), *random_pieces(seed, 2, longest=60)]
        check_row_invariance(backend, make_latent(pieces, heads=heads, dtype=dtype, seed=seed), seed)


@pytest.mark.parametrize("backend", BACKEND_NAMES)
def test_dead_rows_are_silent(backend: str) -> None:
    """Invalid rows do not change the bits of any other row."""
    parents = random_tree(random.Random(5), 30)
    dead = frozenset(row for row in range(30) if set(Piece(0, 1, parents).path(row)) & {3, 8, 21})
    alive, padded = (make([Piece(40, 2, parents, rows), Piece(9, 3)]) for rows in (frozenset(), dead))
    keep = [n for n, (i, row) in enumerate(alive.rows) if i or row - 2 not in dead]
    assert torch.equal(alive.attend(backend)[keep], padded.attend(backend)[keep])
