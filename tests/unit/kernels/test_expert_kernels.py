"""Experts' products and a mixture's router in Triton, through its interpreter."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from stridelm.kernels import expert_pairs
from stridelm.kernels.expert_pairs import Heights, HeightsOf, Tiled, most, one_height, several_heights, tile_pairs
from stridelm.kernels.experts import choose_tile
from stridelm.kernels.ops import ACTIVATIONS
from stridelm.kernels.plain import whole_logits
from stridelm.kernels.products import tile_height
from stridelm.kernels.sums_in_parts import scores
from stridelm.kernels.triton_rows import TritonOps
from stridelm.models.layers.expert_products import GroupedExperts
from support.checks.compiled import compiled
from support.checks.expert_tiles import check_sorted, check_tiles
from support.checks.experts import (
    ROUTINGS,
    Case,
    check_combine,
    check_experts,
    check_route,
    check_route_parts,
    check_route_scaled,
    check_route_shared,
    check_ties_and_nan,
    check_with_shared,
)
from support.checks.linear import rows, weights
from support.doubles.interpreter import INTERPRETED

DTYPE = torch.float16  # the interpreter has no bfloat16 products


@INTERPRETED
@pytest.mark.parametrize("routing", ROUTINGS)
def test_route(routing: str) -> None:
    check_route(TritonOps(), ROUTINGS[routing], "cpu", rows=7)


@INTERPRETED
def test_route_at_the_limits() -> None:
    check_route_shared(TritonOps(), "cpu")
    check_route_scaled(TritonOps(), "cpu")
    check_route_parts(TritonOps(), "cpu")
    check_ties_and_nan(TritonOps(), "cpu")


@INTERPRETED
@pytest.mark.parametrize("dtype", [torch.float32, DTYPE], ids=str)
@pytest.mark.parametrize("width", [1, 63, 1500])
def test_combine(dtype: torch.dtype, width: int) -> None:
    check_combine(TritonOps(), 5, width, dtype, "cpu")


@INTERPRETED
@pytest.mark.parametrize("block", [16, 1024])
@pytest.mark.parametrize(
    ("count", "each", "number"), [(5, 2, 3), (9, 8, 128), (70, 3, 5), (60, 4, 4), (40, 2, 2), (120, 1, 4), (200, 1, 2)]
)
def test_sort(count: int, each: int, number: int, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs that are looked at in one block and in several; tiles of every height."""
    monkeypatch.setattr(expert_pairs, "SORT_BLOCK", block)
    check_sorted(count, each, number, "cpu")


@INTERPRETED
@pytest.mark.parametrize("skewed", [False, True])
@pytest.mark.parametrize("count", [1, 4, 5, 40])
def test_experts(count: int, skewed: bool) -> None:
    """Sorted pairs and unsorted ones, and both when rows are left out; inner widths of one tile and several."""
    check_experts(Case(count, 6, 2, 72, 136, DTYPE, skewed=skewed), GroupedExperts(), TritonOps())


@INTERPRETED
@pytest.mark.parametrize("inner", [40, 200])
@pytest.mark.parametrize("count", [1, 4, 5, 20, 64])
def test_shared_in_the_same_launches(count: int, inner: int) -> None:
    """Sorted pairs and unsorted ones, tiles of rows of every height; a shared width of one tile and of several."""
    check_with_shared(Case(count, 6, 2, 72, 136, DTYPE), inner)


@INTERPRETED
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_shared_activations(activation: str) -> None:
    check_with_shared(Case(3, 3, 2, 64, 40, DTYPE), 48, activation)


@INTERPRETED
def test_high_tiles() -> None:
    """So many rows that tiles have 128 pairs, with inputs of more than one block."""
    check_experts(Case(130, 2, 1, 136, 72, DTYPE, skewed=True), GroupedExperts(), TritonOps())


@INTERPRETED
def test_bits_of_every_tile() -> None:
    check_tiles(Case(70, 4, 2, 136, 72, DTYPE, skewed=True))


@INTERPRETED
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation: str) -> None:
    check_experts(Case(6, 3, 2, 64, 40, DTYPE), GroupedExperts(), TritonOps(), activation)


@INTERPRETED
@pytest.mark.parametrize("width", [96, 256, 600, 5000])
def test_scores(width: int) -> None:
    """A router's product is not rounded to 16 bits. Its sums have parts, which do not depend on the number of rows."""
    weight, _ = weights(0, width, 70, DTYPE, "cpu")
    x = rows(0, 130, width, DTYPE, "cpu")
    parts = scores(x, weight, None)
    assert parts.dtype == torch.float32 and parts.shape == (130, {96: 1, 256: 1, 600: 3, 5000: 7}[width], 70)
    exact = x.double() @ weight.double().t()
    torch.testing.assert_close(whole_logits(parts).double(), exact, rtol=1e-5, atol=1e-5)
    assert all(torch.equal(scores(x[:count], weight, None), parts[:count]) for count in (1, 20, 60))


def test_tiles_fit_the_shared_memory_of_a_processor() -> None:
    """227 KiB, for weights and rows of every stage."""
    for heights in (Heights(16, 1), Heights(16, 2), Heights(16, 3), Heights(32, 3)):
        for number, is_sorted, is_gated in itertools.product(range(heights.kinds), (False, True), (False, True)):
            order = Tiled(heights, torch.empty(int(is_sorted)), torch.empty(500, 3), mean=1)
            tile = choose_tile(order, 768, is_gated, torch.device("cpu"))
            stage = (tile.outputs * (1 + is_gated) + (heights.least << number)) * tile.inputs * 2
            assert stage * (tile.tall_stages if number else tile.stages) <= 227 * 1024


@pytest.mark.parametrize("heights_of", [several_heights, one_height])
@pytest.mark.parametrize("step", [5, 17, 40, 700])
def test_most_tiles_and_places(step: int, heights_of: HeightsOf) -> None:
    """There are as many as any distribution of pairs needs."""
    rng = random.Random(step)
    for _ in range(50):
        number = rng.choice((2, 8, 64))
        each = rng.randint(1, min(number, 8))
        favoured = max(each, int(number * rng.random() ** 3))
        counts = Counter(expert for _ in range(step) for expert in rng.sample(range(favoured), each))
        heights = heights_of(step, -(-step * each // number))
        kinds = [heights.least << kind for kind in range(heights.kinds)]
        full = sum(count // heights.tallest for count in counts.values())
        rests = [count % heights.tallest for count in counts.values()]
        last = [min(height for height in kinds if height >= rest) for rest in rests if rest]
        tiles, places = most(step * each, number, heights)
        assert full + len(last) <= tiles and full * heights.tallest + sum(last) <= places


def test_no_tile_is_taller_than_needed() -> None:
    for step in range(1, 300):
        assert several_heights(step, mean=1).tallest == min(64, tile_height(step))


def test_no_rows() -> None:
    logits = scores(torch.zeros(0, 600, dtype=DTYPE), torch.zeros(128, 600, dtype=DTYPE), None)
    assert [each.shape for each in TritonOps().route(logits, ROUTINGS["renormalised"])] == [(0, 8), (0, 8)]
    case = Case(3, 5, 2, 64, 32, DTYPE)
    assert case.run(GroupedExperts(), TritonOps(), slice(0)).shape == (0, 2, 64)
    assert tile_pairs(case.chosen[:1], 5).tiles == 2


def test_rows_on_hopper(tmp_path: Path) -> None:
    """For compute capability 9.0 the sum of a row's parts and the norm after it fit into a program's registers, and so
    do all experts that a row compares, and parts of a product."""
    kernels = compiled("row_compiles", tmp_path)
    norms, routers = ["_norm_kernel", "_join_norms_kernel", "_combine_norm_kernel"], ["_parts_kernel", "_route_kernel"]
    parts = ["_parts_kernel", "_parts_kernel", "_combine_norm_kernel"]
    assert [kernel["name"] for kernel in kernels] == [*norms * 3, *routers * 3, *parts, "_spread_kernel"]
    assert not any(kernel["stack"] for kernel in kernels)


def test_several_heights_on_hopper(tmp_path: Path) -> None:
    """For compute capability 9.0 code for tiles of several heights fits into registers, and leaves as many programs
    beside one another: one where rows are gated, and two where they are not."""
    kernels = compiled("expert_compiles", tmp_path)
    assert not any(kernel["stack"] for kernel in kernels)
    instructions = {}
    for module in ("experts", "shared_experts"):
        products = [kernel for kernel in kernels if kernel["module"] == module]
        for gated, down in zip(products[::2], products[1::2], strict=True):
            assert gated["shared"] <= 227 * 1024
            assert down["shared"] <= (113 if gated["rows"] <= 64 else 227) * 1024
            instructions[module, gated["rows"]] = gated["wgmma"]
    assert [instructions["experts", rows] for rows in (1, 16, 20, 64)] == [16, 16, 32, 48]
    assert [instructions["shared_experts", rows] for rows in (1, 16, 20, 64)] == [32, 32, 48, 64]
