"""Mixtures of experts: what is multiplied by which expert, and that a row's bits do not depend on who shares it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from stridelm.kernels import ops_for
from stridelm.kernels.ops import ACTIVATIONS, Routing
from stridelm.models.fitting import fill
from stridelm.models.layers.block import Site
from stridelm.models.layers.expert_products import EveryExpert, ExpertsInTurn, PackedExperts, chosen_experts
from stridelm.models.layers.experts import Mixture, MixtureSpec
from stridelm.models.layers.linear import set_products
from stridelm.models.layers.mlp import GatedMLPSpec
from stridelm.models.layers.products import bfloat16_is_native, tiled_product
from stridelm.models.layers.rope import Ropes
from stridelm.models.loader import fill_randomly, screaming
from support.checks.experts import Case, check_experts
from support.checks.linear import check_row_bits

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.float64, torch.bfloat16)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@every_dtype
@pytest.mark.parametrize("skewed", [False, True])
@pytest.mark.parametrize("rows", [2, 7, 100])
def test_chosen_products(rows: int, skewed: bool, dtype: torch.dtype) -> None:
    """Whatever is chosen under `deterministic` keeps a row's bits."""
    case = Case(rows, 16, 3, 64, 96, dtype, skewed=skewed)
    products = chosen_experts(case.gate_up, case.down, 16, deterministic=True)
    assert isinstance(products, PackedExperts) == (dtype == torch.bfloat16 and bfloat16_is_native())
    check_experts(case, products, ops_for(CPU, dtype))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_one_call_for_all_experts(activation: str) -> None:
    """The same bits as one expert after another, whatever the number of rows that an expert has and of threads."""
    case, ops = Case(100, 7, 3, 128, 192, torch.bfloat16, skewed=True), ops_for(CPU, torch.bfloat16)
    products = chosen_experts(case.gate_up, case.down, 7, deterministic=True)
    if not (isinstance(products, PackedExperts) and products.few):
        pytest.skip("this CPU has no kernel for few rows that compiled code could call")
    threads, got = torch.get_num_threads(), [case.run(products, ops, activation=activation)]
    try:
        for other in {1, 2} - {threads}:
            torch.set_num_threads(other)
            got.append(case.run(products, ops, activation=activation))
    finally:
        torch.set_num_threads(threads)
    products.few = None
    assert all(torch.equal(each, case.run(products, ops, activation=activation)) for each in got)


@every_dtype
def test_every_expert(dtype: torch.dtype) -> None:
    """All rows through all experts give the same bits as each row through its own."""
    case, ops = Case(40, 6, 2, 64, 32, dtype), ops_for(CPU, dtype)
    check_experts(case, EveryExpert(tiled_product), ops)
    assert torch.equal(case.run(EveryExpert(tiled_product), ops), case.run(ExpertsInTurn(tiled_product), ops))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_odd_sizes_and_activations(activation: str, dtype: torch.dtype) -> None:
    case = Case(20, 5, 2, 41, 19, dtype)
    for deterministic in (True, False):
        products = chosen_experts(case.gate_up, case.down, 5, deterministic=deterministic)
        close = case.run(products, ops_for(CPU, dtype), activation=activation).double() - case.exact(activation)
        assert float(close.abs().max()) < 0.05


def test_no_rows() -> None:
    case = Case(3, 5, 2, 64, 32, torch.float32)
    for products in (ExpertsInTurn(), EveryExpert(F.linear)):
        assert case.run(products, ops_for(CPU, torch.float32), slice(0)).shape == (0, 2, 64)


def mixture(dtype: torch.dtype = torch.float32, **changes: Any) -> Mixture:
    """Of random weights, made as the loader makes it."""
    spec = MixtureSpec(
        **{"moe_intermediate_size": 32, "routing": Routing(num_experts=4, num_experts_per_tok=2), **changes}
    )
    with torch.device("meta"):
        made = spec.build(Site(0, 64, 1e-6, Ropes(8)))
    made = screaming(made, dtype, CPU).requires_grad_(False)
    fill_randomly(made, lambda _: None)
    return made


def test_the_correction_bias_stays_in_float32() -> None:
    """In any dtype of the model, and it is a tensor of the checkpoint."""
    made = mixture(torch.bfloat16, correction_bias=True)
    assert made.router.bias is not None and made.router.bias.dtype == torch.float32
    assert made.router.scores.weight.dtype == torch.bfloat16
    assert "gate.e_score_correction_bias" in dict(made.slots())
    bias = torch.tensor([0.1, 0.2, 0.3, 1 / 3])
    only = {name: slot for name, slot in made.slots() if "bias" in name}
    made.slots = lambda theirs="": iter(only.items())  # type: ignore[method-assign]
    fill(made, iter({"gate.e_score_correction_bias": bias}.items()), Path("x"))
    assert torch.equal(made.router.bias, bias)


def test_scores_are_not_rounded() -> None:
    """In bfloat16, experts whose scores differ by less than its precision are told apart."""
    made = mixture(torch.bfloat16, routing=Routing(num_experts=2, num_experts_per_tok=1))
    made.router.scores.weight.zero_()
    made.router.scores.weight[:, 0] = 1.0
    made.router.scores.weight[1, 1] = 2.0**-12
    set_products(made, deterministic=True)
    x = torch.zeros(3, 64, dtype=torch.bfloat16)
    x[:, 0], x[:, 1] = 8.0, torch.tensor([1.0, 0.0, -1.0])
    assert made.router(x, ops_for(CPU, torch.bfloat16))[0].flatten().tolist() == [1, 0, 0]


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=str)
def test_scores_in_every_dtype(dtype: torch.dtype, deterministic: bool) -> None:
    """Those of the weights as they are stored, in float32 or wider, with the same bits at any number of rows."""
    made = mixture(dtype, routing=Routing(num_experts=41, num_experts_per_tok=2))
    weight = made.router.scores.weight.double()
    set_products(made, deterministic=deterministic)
    x = torch.randn(40, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    got = made.router.scores(x)
    assert got.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(got.double(), x.double() @ weight.t(), rtol=1e-5, atol=1e-5)
    if deterministic:
        check_row_bits(made.router.scores, x)


@pytest.mark.parametrize("gate", [None, "shared_gate"])
def test_shared_expert(gate: str | None) -> None:
    """It is added to the others, whole or scaled."""
    made = mixture(shared=GatedMLPSpec(name="shared", intermediate_size=48), shared_gate=gate)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    ops = ops_for(CPU, torch.float64)
    both = made(x, ops)
    shared, made.shared = made.shared, None
    assert shared is not None
    scale = torch.ones(5, 1) if gate is None else (x @ made.router.scores.weight[4]).sigmoid()[:, None]
    torch.testing.assert_close(both, made(x, ops) + scale * shared(x, ops))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9 exceeds the 8 experts"),
        ({"n_group": 3}, "8 experts cannot be divided into n_group 3 groups"),
        ({"n_group": 2, "topk_group": 3}, "topk_group 3 exceeds n_group 2"),
        ({"n_group": 8, "topk_group": 4}, "n_group 8 leaves each only one"),
        ({"n_group": 4, "topk_group": 1, "num_experts_per_tok": 3}, "exceeds the 2 experts of topk_group 1 groups"),
        ({"n_group": 0}, "n_group must be at least 1"),
        ({"scoring": "softplus"}, "'softplus' is not supported; supported: softmax, sigmoid"),
    ],
)
def test_numbers_that_do_not_fit_together(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Routing(**{"num_experts": 8, "num_experts_per_tok": 2, **changes})
