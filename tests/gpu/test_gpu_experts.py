"""Mixtures of experts on a GPU: against the definitions, against themselves bit for bit, captured, in the engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from stridelm.kernels import ops_for
from stridelm.kernels.ops import ACTIVATIONS, Routing
from stridelm.kernels.plain import whole_logits
from stridelm.kernels.products import product
from stridelm.kernels.sums_in_parts import scores
from stridelm.kernels.triton_rows import TritonOps
from stridelm.models.layers.block import Site
from stridelm.models.layers.expert_products import EveryExpert, ExpertsInput, GroupedExperts, chosen_experts
from stridelm.models.layers.experts import MixtureSpec
from stridelm.models.layers.linear import set_products
from stridelm.models.layers.mlp import GatedMLPSpec
from stridelm.models.layers.rope import Ropes
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
from support.checks.identity import TEMPERATURES, check_crowd, check_identity, mixed_jobs
from support.checks.linear import check_row_bits, rows, weights
from support.checks.row_ops import noise
from support.doubles.stand import Stand
from support.doubles.tree_drafter import registered
from support.gpu import NEEDS_GPU

pytestmark = [
    *NEEDS_GPU,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter's kernels run on the CPU"),
]
every_dtype = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
QWEN = {"experts": 128, "each": 8, "width": 2048, "inner": 768}
"""Of Qwen3-30B-A3B."""
COUNTS = (1, 4, 5, 16, 100, 700)


# The router


@pytest.mark.parametrize("routing", ROUTINGS)
def test_route(routing: str) -> None:
    check_route(TritonOps(), ROUTINGS[routing], "cuda", rows=300)


def test_route_at_the_limits() -> None:
    check_route_shared(TritonOps(), "cuda")
    check_route_scaled(TritonOps(), "cuda")
    check_route_parts(TritonOps(), "cuda")
    check_ties_and_nan(TritonOps(), "cuda")


@pytest.mark.parametrize("dtype", sorted(TritonOps.dtypes, key=str), ids=str)
@pytest.mark.parametrize("width", [1, 63, 2048, 7168])
def test_combine(dtype: torch.dtype, width: int) -> None:
    check_combine(TritonOps(), 37, width, dtype, "cuda")


@every_dtype
@pytest.mark.parametrize(("width", "experts"), [(2048, 128), (7168, 256), (96, 41), (2048, 61)])
def test_scores(width: int, experts: int, dtype: torch.dtype) -> None:
    """A router's product is not rounded to 16 bits, and has the same bits at any number of rows."""
    weight, _ = weights(0, width, experts, dtype, "cuda")
    x = rows(0, 300, width, dtype, "cuda")
    got = whole_logits(scores(x, weight, None))
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), x.double() @ weight.double().t(), rtol=1e-4, atol=1e-4)
    check_row_bits(
        lambda part: whole_logits(scores(part, weight, None)), x, counts=(1, 2, 16, 17, 33, 64, 65, 129, 300)
    )


# Products


@pytest.mark.parametrize(
    ("count", "each", "number"), [(5, 2, 3), (9, 8, 128), (700, 3, 5), (4096, 8, 128), (900, 2, 2)]
)
def test_sort(count: int, each: int, number: int) -> None:
    check_sorted(count, each, number, "cuda")


@every_dtype
@pytest.mark.parametrize("skewed", [False, True])
@pytest.mark.parametrize("count", COUNTS)
def test_experts(count: int, skewed: bool, dtype: torch.dtype) -> None:
    """Few and many rows in tiles of every height, of widths that tiles do not divide."""
    check_experts(Case(count, 6, 2, 72, 136, dtype, "cuda", skewed=skewed), GroupedExperts(), TritonOps())


@pytest.mark.parametrize("skewed", [False, True])
@pytest.mark.parametrize("count", [*COUNTS, 4096])
def test_published_sizes(count: int, skewed: bool) -> None:
    case = Case(count, dtype=torch.bfloat16, device="cuda", skewed=skewed, **QWEN)
    products = chosen_experts(case.gate_up, case.down, case.experts, deterministic=True)
    assert isinstance(products, GroupedExperts)
    check_experts(case, products, TritonOps())


@every_dtype
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation: str, dtype: torch.dtype) -> None:
    check_experts(Case(33, 6, 2, 256, 128, dtype, "cuda"), GroupedExperts(), TritonOps(), activation)


@every_dtype
@pytest.mark.parametrize("inner", [40, 200, 2816])
@pytest.mark.parametrize("count", [1, 3, 4, 5, 16, 17, 63, 64])
def test_shared_in_the_same_launches(count: int, inner: int, dtype: torch.dtype) -> None:
    check_with_shared(Case(count, 12, 6, 2048, 136, dtype, "cuda"), inner)


@every_dtype
def test_bits_of_every_tile(dtype: torch.dtype) -> None:
    check_tiles(Case(90, 8, 2, 1000, 320, dtype, "cuda", skewed=True))


@every_dtype
def test_bits_are_those_of_a_dense_layer(dtype: torch.dtype) -> None:
    """An expert's part of a row is what its matrices give as those of a dense MLP."""
    case = Case(50, 4, 4, 512, 256, dtype, "cuda")
    parts = case.run(GroupedExperts(), TritonOps())
    for expert, (gate_up, down) in enumerate(zip(case.gate_up.chunk(4), case.down.chunk(4))):
        wanted = product(product(case.x, gate_up, None, "silu"), down, None)
        assert torch.equal(parts[case.chosen == expert], wanted)


def test_rows_of_a_mixture_with_a_shared_mlp() -> None:
    """A row has the same bits with so few beside it that launches are shared, and with more."""
    routing = Routing(num_experts=16, num_experts_per_tok=4, norm_topk_prob=True)
    spec = MixtureSpec(moe_intermediate_size=192, routing=routing, shared=GatedMLPSpec(intermediate_size=320))
    with torch.device("cuda"):
        mixture = spec.build(Site(0, 512, 1e-6, Ropes(64))).to(torch.bfloat16).requires_grad_(False)
    for number, weight in enumerate(mixture.parameters()):
        weight.copy_(noise(number, *weight.shape, dtype=torch.float32, device="cuda") * weight.shape[-1] ** -0.5)
    set_products(mixture, deterministic=True)
    x = rows(0, 130, 512, torch.bfloat16, "cuda")
    with mock.patch.object(GroupedExperts, "with_shared", autospec=True, side_effect=GroupedExperts.with_shared) as few:
        check_row_bits(lambda part: mixture(part, TritonOps()), x, counts=(1, 4, 5, 63, 64, 65, 128, 130))
    assert {len(call.args[1].x_NH) for call in few.call_args_list} >= {1, 4, 5, 63, 64}
    assert all(len(call.args[1].x_NH) <= 64 for call in few.call_args_list)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_other_dtypes(dtype: torch.dtype) -> None:
    """Without a kernel, all rows run through all experts."""
    case = Case(20, 6, 2, 64, 32, dtype, "cuda")
    products = chosen_experts(case.gate_up, case.down, 6, deterministic=True)
    assert isinstance(products, EveryExpert)
    check_experts(case, products, ops_for(torch.device("cuda"), dtype))


@pytest.mark.parametrize("count", [1, 4, 5, 64, 300])
def test_captured(count: int) -> None:
    """A captured call is for any choice of experts: it reads nothing on the host."""
    uniform = Case(count, 32, 4, 256, 128, torch.bfloat16, "cuda")
    skewed = Case(count, 32, 4, 256, 128, torch.bfloat16, "cuda", skewed=True)
    x, chosen, ops = uniform.x.clone(), uniform.chosen.clone(), TritonOps()
    weights_NK = torch.rand(count, 4, device="cuda")

    def call() -> torch.Tensor:
        parts = GroupedExperts()(ExpertsInput(x, chosen, uniform.gate_up, uniform.down, "silu"), ops)
        return ops.combine(parts, weights_NK)

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for case in (uniform, skewed, uniform):
        x.copy_(case.x.flip(0))
        chosen.copy_(case.chosen)
        graph.replay()
        assert torch.equal(out, call())


# In the engine


@pytest.fixture(scope="module", autouse=True)
def _trees() -> Iterator[None]:
    with registered():
        yield


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("kind", ["qwen2_moe", "qwen3_moe", "glm4_moe"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_identity(checkpoint: Callable[..., Path], dtype: str, kind: str, temperature: float) -> None:
    """Requests with different drafters in one batch, and after preemptions, emit what they emit alone."""
    stand = Stand(checkpoint(kind, num_experts=8), dtype, "cuda")
    check_identity(stand, mixed_jobs(stand, 8, temperature, ["nothing", "everything"], seed=3))
    check_crowd(stand, temperature, ["nothing"])
