"""What the FlashInfer backend passes to FlashInfer: pages, masks, windows. FlashInfer itself needs a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stridelm.attention.flash_infer import LONG, FlashInferAttention, FlashInferHeads, is_causal, paged_tables, visible
from stridelm.attention.host_view import HostView
from stridelm.cache.layout import HeadsKV
from stridelm.engine.load import pick_attention
from support.checks.engine import check_backend
from support.doubles.flash_infer import NAME, BatchPrefillWithPagedKVCacheWrapper, install
from support.oracles.attention import Case, Piece, check_attention, check_values, geometry, make, naive, random_pieces

WINDOWS = (None, 1, 2, 7, 64)
CHAIN = tuple(range(-1, 63))
PLAIN = [Piece(70, 1), Piece(0, 30), Piece(9, 5, CHAIN), Piece(33, 1, CHAIN[:7], frozenset({4, 5, 6}))]
"""Spans without drafts, and with chains that are valid only up to some row."""


@pytest.fixture
def _peer(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)


def view(case: Case) -> HostView:
    return HostView.of(geometry(case))


def seen_by(case: Case, i: int, row: int, window: int | None) -> set[int]:
    """Storage indices that a valid row sees, by the definition."""
    piece = case.pieces[i]
    path = piece.path(row - piece.real) if row >= piece.real else []
    real = range(min(piece.base, piece.start + row + 1))
    ordered = [*real, *(piece.base + member for member in path)]
    return set(ordered if window is None else ordered[-window:])


def masks(case: Case, window: int | None) -> list[torch.Tensor]:
    """Each row's part of the mask."""
    lengths = [case.pieces[i].storage for i, _ in case.rows]
    return list(visible(view(case), window).split(lengths))


@pytest.mark.parametrize("window", WINDOWS)
def test_mask_is_the_definition(window: int | None) -> None:
    """Valid rows of any step see what they should; rows of padding see something, but only of their own request."""
    for seed in range(12):
        case = make(random_pieces(seed, 5, longest=90), seed=seed)
        for (i, row), mask in zip(case.rows, masks(case, window), strict=True):
            seen = set(mask.nonzero()[:, 0].tolist())
            if row - case.pieces[i].real in case.pieces[i].dead:
                assert seen
            else:
                assert seen == seen_by(case, i, row, window), (seed, i, row)


@pytest.mark.parametrize("window", WINDOWS)
def test_causal_steps(window: int | None) -> None:
    """Without a mask, a window over storage that ends at the row lets through what the mask would have."""
    case = make(PLAIN)
    assert is_causal(view(case))
    for (i, row), mask in zip(case.rows, masks(case, window), strict=True):
        if row - case.pieces[i].real in case.pieces[i].dead:
            continue
        last = case.pieces[i].start + row
        first = 0 if window is None else max(0, last + 1 - window)
        assert mask.nonzero()[:, 0].tolist() == list(range(first, last + 1))


@pytest.mark.parametrize("parents", [(-1, -1), (-1, 0, 0), (*CHAIN[:63], 61), (-1,) * 64], ids=len)
def test_trees_are_not_causal(parents: tuple[int, ...]) -> None:
    """A single branch anywhere gives the step a mask; an invalid branch does not."""
    assert not is_causal(view(make([*PLAIN, Piece(5, 1, parents)])))
    branches = frozenset(row for row, parent in enumerate(parents) if parent != row - 1)
    dead = branches | {row for row in range(len(parents)) if set(Piece(5, 1, parents).path(row)) & branches}
    assert is_causal(view(make([*PLAIN, Piece(5, 1, parents, dead)])))


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_tables(page_size: int) -> None:
    """Pages and the last page's length give every stored entry its slot, whatever follows in the page table."""
    case = make(random_pieces(0, 8), page_size=page_size)
    for table in case.tables:
        table += [10**6] * 2
    rows, firsts, pages, last = paged_tables(view(case), "main")
    assert rows.diff().tolist() == view(case).counts and int(rows[0]) == 0
    for i, piece in enumerate(case.pieces):
        own = pages[firsts[i] : firsts[i + 1]].tolist()
        slots = [page * page_size + offset for page in own for offset in range(page_size)]
        length = (len(own) - 1) * page_size + int(last[i])
        assert slots[:length] == [case.slot(i, index) for index in range(piece.storage)]
        assert 1 <= int(last[i]) <= page_size


# With a torch stand-in for FlashInfer


@pytest.mark.usefixtures("_peer")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", WINDOWS)
def test_attention(window: int | None, dtype: torch.dtype) -> None:
    """Any mixture of spans is dense attention, masked or causal."""
    for seed, (heads, kv_heads) in enumerate(((3, 3), (6, 2), (8, 1))):
        for pieces in (random_pieces(seed, 5), PLAIN):
            sizes: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "page_size": (1, 5, 16)[seed]}
            check_attention(NAME, make(pieces, **sizes, head_dim=64, window=window, dtype=dtype, seed=seed))


@pytest.mark.usefixtures("_peer")
def test_steps_and_layers() -> None:
    """Layers of different windows plan once per step each; steps of every kind run in turn on one backend."""
    backend = FlashInferAttention(False)
    layout = tuple(HeadsKV.of(4, 2, 64, window, "main") for window in (None, 7, None, 3))
    for seed, pieces in enumerate((PLAIN, [Piece(0, 2 * LONG)], random_pieces(1, 4), PLAIN)):
        case = make(pieces, head_dim=64, dtype=torch.float16, seed=seed)
        mixer = backend.prepare(geometry(case)).mixer(layout[0])
        assert isinstance(mixer, FlashInferHeads)
        for case.kv in layout:
            check_values(mixer.attend(case.kv, case.queries, case.keys, case.values), naive(case))
        assert len(mixer._planned) == 3
    kinds = {(kv.window, kernels) for kv, kernels in backend._wrappers}
    assert kinds == {(window, kernels) for window in (None, 7, 3) for kernels in ("fa2", "auto")}


@pytest.mark.usefixtures("_peer")
def test_whole_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool is passed without a copy."""
    pools: list[torch.Tensor] = []
    run = BatchPrefillWithPagedKVCacheWrapper.run

    def watching(
        self: BatchPrefillWithPagedKVCacheWrapper,
        q: torch.Tensor,
        pool: tuple[torch.Tensor, torch.Tensor],
        **out: torch.Tensor,
    ) -> object:
        pools.extend(pool)
        return run(self, q, pool, **out)

    monkeypatch.setattr(BatchPrefillWithPagedKVCacheWrapper, "run", watching)
    case = make(PLAIN, head_dim=64, dtype=torch.float16)
    case.attend(NAME)
    assert [pool.data_ptr() for pool in pools] == [case.keys.data_ptr(), case.values.data_ptr()]


@pytest.mark.usefixtures("_peer")
@pytest.mark.parametrize("kind", ["mistral", "qwen3"])
def test_engine(checkpoint: Callable[..., Path], kind: str) -> None:
    """An engine on this backend, with windows and drafts."""
    options = {"sliding_window": 7} if kind == "mistral" else {}
    check_backend(checkpoint(kind, head_dim=64, scale=3.0, **options), NAME, "cpu")


# What it refuses


@pytest.mark.usefixtures("_peer")
def test_refusals() -> None:
    """Before FlashInfer is called."""
    with pytest.raises(ValueError, match="cannot promise equal bits; use attention='triton', or deterministic=False"):
        pick_attention(NAME, torch.device("cuda"), deterministic=True)
    with pytest.raises(ValueError, match="head sizes 64, 128, 256, not 80"):
        make(PLAIN, head_dim=80, dtype=torch.float16).attend(NAME)
    with pytest.raises(ValueError, match="float16 and bfloat16, not in torch"):
        make(PLAIN, head_dim=64).attend(NAME)
    with pytest.raises(ValueError, match="leave kv_cache_dtype at 'auto', or use attention='triton'"):
        make(PLAIN, head_dim=64, dtype=torch.float16, scales=(1.0, 1.0)).attend(NAME)
