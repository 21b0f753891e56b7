"""Rows of long prompt chunks attend to latents that were expanded into keys and values of heads, where bits need not be
equal: against the definition, through the interpreter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from stridelm.attention import expanded
from stridelm.attention.expanded import ExpandingLatents, long_spans, passes
from stridelm.attention.host import HostAttention, HostLatents
from stridelm.attention.triton import TritonAttention
from stridelm.attention.triton_latents import TritonLatents
from stridelm.cache.layout import LatentKV
from stridelm.kernels.head_products import head_products
from stridelm.models.layers.latent import KEYS, LatentExpansion
from stridelm.models.layers.slots import WHOLE
from support.checks.compiled import compiled
from support.doubles.binaries import recorded
from support.doubles.interpreter import INTERPRETED
from support.oracles.attention import CLOSE, HeadMatrices, Piece, check_values, geometry, make_latent, naive
from support.oracles.models import check_model

pytestmark = INTERPRETED
EXPANDING = ("triton", "host")
"""Backends that expand."""
PUBLISHED = LatentKV("full", None, 16, 512, 64, 0.07, expands=(128, 128))
CPU = torch.device("cpu")
SIZES: dict[str, Any] = {"heads": 5, "rank": 32, "rope_dim": 8, "page_size": 16}
WIDTH = 16
LONG, SHORT = Piece(37, 40), Piece(60, 3, (-1, 0, 0))
STEPS = {
    "one prompt": [Piece(0, 70)],
    "chunks": [LONG, Piece(0, 33), Piece(16, 17)],
    "beside decodes": [Piece(100, 1), LONG, SHORT, Piece(0, 19), Piece(5, 2)],
    "a chunk with a tree": [Piece(20, 25, (-1, 0, 0, 2, -1)), Piece(64, 1)],
    "padding in a chain": [Piece(20, 25, (-1, 0, 1), frozenset({2})), Piece(9, 1)],
}


@pytest.fixture
def low_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here, spans of 17 rows are expanded."""
    monkeypatch.setattr(ExpandingLatents, "lead", 17 / 32)
    monkeypatch.setattr(TritonLatents, "lead", 17 / 32)


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """(entries, first head, one past the last) of each expansion by a model."""
    found: list[tuple[int, int, int]] = []
    expand = LatentExpansion.expand

    def listening(self: LatentExpansion, latents_LR: torch.Tensor, first: int, last: int) -> torch.Tensor:
        found.append((len(latents_LR), first, last))
        return expand(self, latents_LR, first, last)

    monkeypatch.setattr(LatentExpansion, "expand", listening)
    return found


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("scale", [None, 0.02])
@pytest.mark.parametrize("backend", EXPANDING)
@pytest.mark.usefixtures("low_bar")
def test_values(backend: str, step: str, scale: float | None) -> None:
    """Prompts, chunks after contexts, drafts at their ends, decodes beside them; latents in eight bits."""
    scales = None if scale is None else (scale, scale)
    case = make_latent(STEPS[step], **SIZES, scales=scales)
    matrices = HeadMatrices.of(case, WIDTH)
    assert long_spans(geometry(case), 17)
    check_values(case.attend_from_heads(backend, matrices), naive(case.expanded(matrices)))


@pytest.mark.usefixtures("low_bar")
def test_half_precision() -> None:
    """What is expanded is rounded once more than what is absorbed: to the dtype of the model."""
    case = make_latent(STEPS["beside decodes"], **SIZES, dtype=torch.float16)
    matrices = HeadMatrices.of(case, WIDTH)
    got, wanted = case.attend_from_heads("triton", matrices), naive(case.expanded(matrices))
    valid = ~wanted.isnan()
    assert got.dtype == torch.float16 and bool(got.isfinite().all())
    assert float((got.double() - wanted)[valid].abs().max()) <= 4 * CLOSE[torch.float16]


@pytest.mark.parametrize("heads_at_once", [1, 2, 4])
@pytest.mark.parametrize("backend", EXPANDING)
@pytest.mark.usefixtures("low_bar")
def test_passes(monkeypatch: pytest.MonkeyPatch, backend: str, heads_at_once: int) -> None:
    """Where all heads do not fit, they are taken a few at a time."""
    case = make_latent([LONG, SHORT], **SIZES)
    matrices, entries = HeadMatrices.of(case, WIDTH), 80
    monkeypatch.setattr(expanded, "MAX_EXPANDED", entries * 2 * WIDTH * 4 * heads_at_once)
    check_values(case.attend_from_heads(backend, matrices), naive(case.expanded(matrices)))
    state = replace(PUBLISHED, heads=5, expands=(WIDTH, WIDTH))
    parts = list(passes(state, entries, 4))
    assert [head for first, last in parts for head in range(first, last)] == list(range(5))
    assert max(last - first for first, last in parts) <= heads_at_once


@pytest.mark.usefixtures("low_bar")
def test_spans_beyond_the_room_are_absorbed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expanded, "MAX_ENTRIES", 100)
    case = make_latent([Piece(80, 40), LONG, Piece(0, 20), Piece(0, 16)], **SIZES)
    assert long_spans(geometry(case), 17) == [1], "the first sees 120 entries, and two after it leave room for 20"
    matrices = HeadMatrices.of(case, WIDTH)
    check_values(case.attend_from_heads("triton", matrices), naive(case.expanded(matrices)))


@pytest.mark.usefixtures("low_bar")
def test_never_where_bits_are_promised() -> None:
    """Nor where the bound on each span's end is not known: in captured passes, and in drafters' layers."""
    case = make_latent(STEPS["beside decodes"], **SIZES)
    matrices = replace(HeadMatrices.of(case, WIDTH), expands=False)
    wanted = naive(case.expanded(matrices))
    for backend in (*EXPANDING, "reference"):
        check_values(case.attend_from_heads(backend, matrices, deterministic=True), wanted)
    for backend in EXPANDING:
        check_values(case.attend_from_heads(backend, matrices, shape=replace(geometry(case), ends=())), wanted)
        with pytest.raises(AssertionError, match="latents were expanded"):
            case.attend_from_heads(backend, matrices)


def test_where_it_pays() -> None:
    """From 1.5 times the rows on at which the products of attention save what expanding costs; on a card, where wide
    products reach less of its rate, from a quarter as many on."""
    rows = HostLatents.least_rows(PUBLISHED)
    assert rows is not None
    assert (TritonLatents.least_rows(PUBLISHED), rows) == (64, 256)
    for entries in (1 << 10, 1 << 15, 1 << 20):
        absorbed = rows * entries * (2 * 512 + 64)
        assert 1.1 < absorbed / (rows * entries * (128 + 64 + 128) + entries * 512 * 256) < 1.4
    for changed in (
        replace(PUBLISHED, expands=None),
        replace(PUBLISHED, expands=(512, 512)),
        replace(PUBLISHED, window=4096),
    ):
        assert TritonLatents.least_rows(changed) is HostLatents.least_rows(changed) is None
    uneven = replace(PUBLISHED, expands=(192, 256))
    assert TritonLatents.least_rows(uneven) is None, "its kernel has one width"
    assert HostLatents.least_rows(uneven) == 598


def test_workspace() -> None:
    """Bounded whatever the step, less for small ones, and none where nothing is expanded."""

    def mebibytes(rows: int, reach: int, state: LatentKV = PUBLISHED) -> float:
        return TritonLatents.workspace(state, torch.bfloat16, False, rows, reach) / 2**20

    queries = 16 * (128 + 64) * 2 / 2**20  # of a row
    assert mebibytes(63, 1 << 17) == 63 * queries
    assert mebibytes(64, 1024) < 12
    assert mebibytes(8192, 1 << 20) == mebibytes(8192, 1 << 17) < 600
    assert mebibytes(8192, 1 << 17, replace(PUBLISHED, heads=128)) < 1000
    for kind in (TritonAttention, HostAttention):
        fast, exact = kind(False), kind(True)
        for backend in (fast, exact):
            backend.check((PUBLISHED,), torch.bfloat16)
        assert fast.workspace(8192, 1 << 17) / 2**20 == mebibytes(8192, 1 << 17)
        assert exact.workspace(8192, 1 << 17) == 0


def test_steps_need_only_the_binaries_of_a_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the heads of a pass are fewer than the layer's, and to absorb few rows beside long spans."""
    pieces = [Piece(100, 300), Piece(0, 260), Piece(70, 1)]
    case = make_latent(pieces, heads=4, rank=32, rope_dim=16, page_size=16, dtype=torch.float16)
    matrices = HeadMatrices.of(case, WIDTH)
    assert case.latent is not None
    state = replace(case.latent, expands=(WIDTH, WIDTH))
    backend = TritonAttention(False)
    backend.check((state,), torch.float16)
    with recorded(run=False) as made:
        backend.warm_up(16, CPU)
    expansion = LatentExpansion("kv_b_proj", 4, 32, (WIDTH, WIDTH), WHOLE).half()
    for limit in (expanded.MAX_EXPANDED, 1 << 16):
        monkeypatch.setattr(expanded, "MAX_EXPANDED", limit)
        with recorded(run=False) as needed:
            case.attend_from_heads("triton", matrices)
            for rows in (1, 40):
                head_products(torch.zeros(rows, 4, WIDTH, dtype=torch.float16), expansion.matrices(KEYS))
        assert set(needed) == {"attention_device.attend", "attention_splits.merge", "head_products._product_kernel"}
        for kernel, binaries in needed.items():
            assert binaries <= made[kernel], kernel


@pytest.mark.parametrize("chunk", [1024, 33])
@pytest.mark.parametrize(("attention", "value_dim"), [("triton", 16), ("host", 16), ("host", 12)])
@pytest.mark.usefixtures("low_bar")
def test_logits(
    checkpoint: Callable[..., Path],
    heard: list[tuple[int, int, int]],
    attention: str,
    value_dim: int,
    chunk: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A prompt, whole or in chunks, and the decode steps after it give transformers' logits within 1e-5 in float32."""
    monkeypatch.setattr(TritonAttention, "device", None)  # it runs wherever its kernel does
    path = checkpoint("deepseek_v3", scale=3.0, v_head_dim=value_dim)
    check_model(path, chunk, attention=attention, deterministic=False)
    ends = [90] if chunk > 90 else [33, 66, 90]
    entries = [-(-end // 16) * 16 for end in ends]  # in whole pages
    assert heard == [(count, 0, 4) for count in entries for _ in range(2)], "once in each layer"


def test_on_hopper(tmp_path: Path) -> None:
    """For compute capability 9.0 attention over expanded latents, and what makes few rows' queries, compile in sizes
    that are published, with the matrix instructions of a warp group, and fit into shared memory and registers."""
    kernels = compiled("latent_compiles", tmp_path)
    assert {kernel["name"] for kernel in kernels} == {"attend", "merge", "_queries_kernel", "_product_kernel"}
    assert all(kernel["shared"] <= 227 * 1024 and not kernel["stack"] for kernel in kernels)
    half = [kernel for kernel in kernels if kernel["name"] != "merge" and kernel["dtype"] != "torch.float32"]
    assert len(half) == 36 and all(kernel["wgmma"] for kernel in half)
