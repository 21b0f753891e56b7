"""Checks of a mixture's routing and of its experts' products, for every implementation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from transformers import DeepseekV3Config, Qwen3MoeConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from stridelm.kernels.ops import Ops, Parts, Routing
from stridelm.kernels.plain import PlainOps
from stridelm.models.layers.expert_products import ExpertProducts, ExpertsInput, ExpertsInTurn, GroupedExperts
from stridelm.models.layers.products import InOrderProduct
from support.checks.linear import check_row_bits
from support.checks.row_ops import CLOSE, noise

ROUTINGS = {
    "softmax": Routing(num_experts=12, num_experts_per_tok=4),
    "renormalised": Routing(num_experts=128, num_experts_per_tok=8, norm_topk_prob=True),
    "every-expert": Routing(num_experts=5, num_experts_per_tok=5, norm_topk_prob=True),
    "sigmoid": Routing(num_experts=12, num_experts_per_tok=3, scoring="sigmoid", routed_scaling_factor=2.5),
    "groups": Routing(
        num_experts=24,
        num_experts_per_tok=6,
        scoring="sigmoid",
        n_group=6,
        topk_group=2,
        norm_topk_prob=True,
        routed_scaling_factor=1.5,
    ),
    "deepseek": Routing(
        num_experts=256,
        num_experts_per_tok=8,
        scoring="sigmoid",
        n_group=8,
        topk_group=4,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
    ),
    "many": Routing(num_experts=512, num_experts_per_tok=10, norm_topk_prob=True),
}
"""As published models route, and at the limits."""


def theirs(logits_NE: torch.Tensor, routing: Routing, bias_E: torch.Tensor | None) -> tuple[Any, Any]:
    """(experts, weights) as transformers chooses them. The router is the identity, so that it takes logits as rows."""
    experts = routing.num_experts
    shared = {
        "hidden_size": experts,
        "num_experts_per_tok": routing.num_experts_per_tok,
        "norm_topk_prob": routing.norm_topk_prob,
    }
    if routing.scoring == "softmax":
        router: Any = Qwen3MoeTopKRouter(Qwen3MoeConfig(num_experts=experts, **shared))
    else:
        groups = {"n_group": routing.n_group, "topk_group": routing.topk_group}
        scale = {"routed_scaling_factor": routing.routed_scaling_factor}
        router = DeepseekV3TopkRouter(DeepseekV3Config(n_routed_experts=experts, **shared, **groups, **scale))
    if bias_E is not None:
        router.e_score_correction_bias.copy_(bias_E)
    with torch.no_grad():
        router.weight.copy_(torch.eye(experts))
        _, weights, chosen = router(logits_NE)
    return chosen, weights


def check_route(ops: Ops, routing: Routing, device: str, rows: int = 37) -> None:
    """The experts and weights are transformers', whatever the order; the best comes first. A row's do not depend on
    other rows."""
    logits = noise(1, rows, routing.num_experts, dtype=torch.float32, device=device) * 2
    biases: list[torch.Tensor | None] = [None]
    if routing.scoring == "sigmoid":
        biases.append(noise(2, routing.num_experts, dtype=torch.float32, device=device) / 3)
    for bias in biases:
        chosen, weights = ops.route(logits, routing, bias)
        assert chosen.dtype == torch.int64 and weights.dtype == torch.float32 and chosen.is_contiguous()
        wanted = [torch.zeros(rows, routing.num_experts), torch.zeros(rows, routing.num_experts)]
        pairs = (chosen.cpu(), weights.cpu()), theirs(logits.cpu(), routing, None if bias is None else bias.cpu())
        for dense, (experts, values) in zip(wanted, pairs):
            dense.scatter_(1, experts, values)
        torch.testing.assert_close(*wanted, rtol=2e-6, atol=1e-7)
        if bias is None:
            assert bool((weights.diff() <= 0).all())

        def run(part: torch.Tensor, bias: torch.Tensor | None = bias) -> torch.Tensor:
            return torch.cat(ops.route(part, routing, bias), 1)

        check_row_bits(run, logits, counts=(1, 2, 3, rows))


def check_route_shared(ops: Ops, device: str) -> None:
    """One more logit is the shared expert's: its sigmoid is the last weight, and it cannot be chosen."""
    routing = ROUTINGS["softmax"]
    logits = noise(1, 9, routing.num_experts + 1, dtype=torch.float32, device=device)
    logits[:, -1] += torch.linspace(-100, 100, 9, device=device)
    chosen, weights = ops.route(logits, routing)
    assert all(map(torch.equal, (chosen, weights[:, :-1]), ops.route(logits[:, :-1].contiguous(), routing)))
    exact = logits[:, -1].double().sigmoid().float()
    # exp(-x) is as far off as x was rounded: 100 times 2^-24
    torch.testing.assert_close(weights[:, -1], exact, rtol=6e-6, atol=1e-37)


def check_route_scaled(ops: Ops, device: str) -> None:
    """Logits are scaled before the choice, and each expert's weight by a number of its own after it."""
    routing = ROUTINGS["renormalised"]
    logits = noise(1, 9, routing.num_experts, dtype=torch.float32, device=device) * 40
    own = noise(2, routing.num_experts, dtype=torch.bfloat16, device=device).abs() + 0.5
    chosen, weights = ops.route(logits * 0.05, routing)
    got, scaled = ops.route(logits, replace(routing, logit_scale=0.05), scale_E=own)
    assert torch.equal(got, chosen)
    torch.testing.assert_close(scaled, weights * own[chosen].float(), rtol=1e-5, atol=1e-9)


def check_route_parts(ops: Ops, device: str) -> None:
    """Logits in parts are routed as their sum, of which each is a part."""
    routing = ROUTINGS["groups"]
    parts = noise(1, 9, 3, routing.num_experts + 1, dtype=torch.float32, device=device)
    whole = parts[:, 0] + parts[:, 1] + parts[:, 2]
    assert all(map(torch.equal, ops.route(parts, routing), ops.route(whole, routing)))


def check_ties_and_nan(ops: Ops, device: str) -> None:
    """Of equal scores the first expert's is taken. Where scores are NaN, experts exist, and their weights are NaN; one
    that is comes first, and leaves the others' alone."""
    for routing in (ROUTINGS["softmax"], ROUTINGS["many"]):
        logits = noise(5, 20, routing.num_experts, dtype=torch.float32, device=device).round()
        chosen, _ = ops.route(logits, routing)
        wanted = logits.sort(dim=1, descending=True, stable=True).indices
        assert torch.equal(chosen, wanted[:, : routing.num_experts_per_tok])
    logits = noise(6, 2, 12, dtype=torch.float32, device=device)
    logits[0, 7] = float("nan")
    chosen, weights = ops.route(logits, ROUTINGS["sigmoid"])
    assert chosen[0, 0] == 7 and weights.isnan().sum() == 1 and bool(weights[0, 0].isnan())
    for routing in (ROUTINGS["softmax"], ROUTINGS["groups"]):
        each = routing.num_experts_per_tok
        chosen, _ = ops.route(torch.zeros(3, routing.num_experts, device=device), routing)
        assert chosen.tolist() == [list(range(each))] * 3
        chosen, weights = ops.route(torch.full((2, routing.num_experts), float("nan"), device=device), routing)
        assert bool(((chosen >= 0) & (chosen < routing.num_experts)).all()) and bool(weights.isnan().all())


def check_combine(ops: Ops, rows: int, width: int, dtype: torch.dtype, device: str) -> None:
    parts = noise(1, rows, 5, width, dtype=dtype, device=device)
    shared = noise(2, rows, width, dtype=dtype, device=device)
    weights = noise(3, rows, 6, dtype=torch.float32, device=device).sigmoid()
    for columns, added in ((5, None), (5, shared), (6, shared)):
        used = weights[:, :columns].contiguous()
        wanted = (parts.double() * used[:, :5, None].double()).sum(1)
        if added is not None:
            wanted += added.double() * (used[:, 5:].double() if columns > 5 else 1)
        got = ops.combine(parts, used, added)
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), wanted, rtol=0, atol=CLOSE[dtype])

        def run(index: torch.Tensor, used: torch.Tensor = used, added: torch.Tensor | None = added) -> torch.Tensor:
            return ops.combine(parts[index], used[index], None if added is None else added[index])

        index = torch.arange(rows, device=device)
        for count in (1, 2, rows - 1):
            assert torch.equal(run(index[:count]), run(index)[:count])
        check_combine_norm(ops, Parts(parts, used, added), got)


def check_combine_norm(ops: Ops, of: Parts, delta: torch.Tensor) -> None:
    """The sum, which `combine` makes, is added to the stream and the total normalised, as two operations would."""
    rows, width = delta.shape
    x = noise(4, rows, width, dtype=delta.dtype, device=str(delta.device))
    weight = noise(5, width, dtype=delta.dtype, device=str(delta.device))
    before = x.clone()
    total, normed = ops.combine_norm(of, x, weight, 1e-5)
    assert torch.equal(x, before) and torch.equal(total, x + delta)
    torch.testing.assert_close(normed, ops.norm(total, weight, 1e-5), rtol=0, atol=CLOSE[delta.dtype])
    for some in (slice(1), slice(2), slice(rows - 1, rows)):
        shared = None if of.shared_NC is None else of.shared_NC[some]
        fewer = Parts(of.parts_NKC[some], of.weights_NW[some], shared)
        got = ops.combine_norm(fewer, x[some], weight, 1e-5)
        assert torch.equal(got[0], total[some]) and torch.equal(got[1], normed[some])


def matrix(seed: int, outputs: int, inputs: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Random weights."""
    return (noise(seed, outputs, inputs, dtype=torch.float32, device="cpu") * inputs**-0.5).to(dtype).to(device)


class Case:
    """Random rows, matrices and choices. skewed: half of the rows choose among an eighth of the experts."""

    def __init__(
        self,
        rows: int,
        experts: int,
        each: int,
        width: int,
        inner: int,
        dtype: torch.dtype,
        device: str = "cpu",
        *,
        skewed: bool = False,
    ) -> None:
        self.x = noise(1, rows, width, dtype=dtype, device=device)
        self.gate_up = matrix(2, experts * 2 * inner, width, dtype, device)
        self.down = matrix(3, experts * width, inner, dtype, device)
        scores = noise(4, rows, experts, dtype=torch.float32, device="cpu")
        if skewed:
            scores[: rows // 2, : max(each, experts // 8)] += 100
        self.chosen = scores.topk(each).indices.to(device)
        self.experts = experts

    def run(
        self, products: ExpertProducts, ops: Ops, rows: Any = slice(None), activation: str = "silu"
    ) -> torch.Tensor:
        return products(ExpertsInput(self.x[rows], self.chosen[rows], self.gate_up, self.down, activation), ops)

    def exact(self, activation: str = "silu") -> torch.Tensor:
        """In float64, without roundings between."""
        wide = (self.gate_up.double(), self.down.double())
        return ExpertsInTurn()(ExpertsInput(self.x.double(), self.chosen, *wide, activation), PlainOps())


def check_experts(case: Case, products: ExpertProducts, ops: Ops, activation: str = "silu", close: float = 1.0) -> None:
    """Each part is its expert's result, and a row's bits do not depend on who shares its experts."""
    got, wanted = case.run(products, ops, activation=activation), case.exact(activation)
    assert got.dtype == case.x.dtype and got.shape == wanted.shape
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=close * CLOSE[case.x.dtype])
    rows = len(case.x)
    for part in (slice(1), slice(rows - 1, rows), slice(0, rows, 2), slice(rows // 3, rows // 2 + 1)):
        assert torch.equal(case.run(products, ops, part, activation), got[part]), part


def check_with_shared(case: Case, inner: int, activation: str = "silu") -> None:
    """In the same launches the experts and a shared MLP of that inner width give the bits that they give apart, whether
    that reads the same rows or others."""
    width, dtype, device = case.x.shape[1], case.x.dtype, str(case.x.device)
    gate_up, down = matrix(5, 2 * inner, width, dtype, device), matrix(6, width, inner, dtype, device)
    inputs, products = ExpertsInput(case.x, case.chosen, case.gate_up, case.down, activation), GroupedExperts()
    assert products.takes_shared(len(case.x))
    in_order = InOrderProduct(deterministic=True)
    for x in (case.x, case.x.flip(1)):
        parts, shared = products.with_shared(inputs, x, gate_up, down)
        assert torch.equal(parts, case.run(products, PlainOps(), activation=activation))
        assert torch.equal(shared, in_order(in_order(x, gate_up, None, activation), down, None))
