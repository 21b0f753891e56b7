"""Products of rows with the matrices of the experts that they have chosen. As in products.py, a row's bits must not
depend on the rows beside it, here: on how many others have chosen the same expert.

- in turn: one expert after another, each with the rows that have chosen it, by a product that keeps bits;
- packed: the same on a CPU in bfloat16, with each matrix in oneDNN's own layout; with instructions for it, all experts
  in one call unless they have hundreds of rows each;
- grouped: on a GPU in 16-bit precision, our kernels, which always add in the same order;
- every: all rows through every expert. For a GPU in dtypes for which there is no kernel: which experts were chosen is
  not known on the host, and reading it could not be captured.

Legend: N rows, K experts that a row has chosen, E experts, H width, I inner width, Q = 2 I E, R = H E.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from stridelm.kernels.ops import Ops
from stridelm.kernels.row_forms import Rows, dense_of
from stridelm.models.layers.products import PackedProduct, Product, chosen, runs_in_order, tiled_product

if TYPE_CHECKING:
    from stridelm.kernels.host.experts import FewRowsOfExperts


FEW_ROWS = 128
"""Rows per expert, on average, up to which one call for all experts is faster."""


@dataclass(frozen=True, eq=False)  # hashed by identity: the compiler hashes what it traces
class ExpertsInput:
    """Rows, the experts that each has chosen, and the matrices of all experts, one below the other."""

    x: Rows
    """[N, H]; those of a mixture's `row_form` have been kept as they were too."""
    chosen_NK: torch.Tensor
    """int64."""
    gate_up_QH: torch.Tensor
    """2 I rows per expert, gate above up."""
    down_RI: torch.Tensor
    """H rows per expert."""
    activation: str

    @property
    def x_NH(self) -> torch.Tensor:
        return dense_of(self.x)

    @property
    def matrices(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Gate and up, and down, of each expert."""
        experts = len(self.down_RI) // self.x_NH.shape[1]
        return list(zip(self.gate_up_QH.chunk(experts), self.down_RI.chunk(experts), strict=True))


class StoredExperts(Protocol):
    """What products may know of a mixture's experts."""

    count: int
    gate_up: nn.Parameter
    down: nn.Parameter

    def get_parameter(self, target: str, /) -> nn.Parameter:
        """What a format stores beside them, such as "down_scale"."""
        ...


class ExpertProducts(Protocol):
    packs: ClassVar[bool]
    """Whether it keeps the weights in a form of its own, and does not read the tensors that it is given."""

    def __call__(self, inputs: ExpertsInput, ops: Ops) -> torch.Tensor:
        """[N, K, H]: down(activation(gate x) * up x) of each of a row's experts."""
        ...


def in_turn(inputs: ExpertsInput, experts: int, run: Callable[[int, torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """[N, K, H] of `run(expert, its rows)`."""
    x_NH, (rows, each) = inputs.x_NH, inputs.chosen_NK.shape
    flat_P = inputs.chosen_NK.flatten()
    pairs_P = flat_P.argsort(stable=True)
    parts_PH = x_NH.new_empty(rows * each, x_NH.shape[1])
    for expert, pairs in enumerate(pairs_P.split(flat_P.bincount(minlength=experts).tolist())):
        if len(pairs):
            parts_PH.index_copy_(0, pairs, run(expert, x_NH.index_select(0, pairs // each)))
    return parts_PH.view(rows, each, x_NH.shape[1])


def of_every_expert(
    inputs: ExpertsInput, experts: int, run: Callable[[int, torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """[N, K, H] of `run(expert, all rows)`: nothing is read on the host."""
    x_NH, chosen_NK = inputs.x_NH, inputs.chosen_NK
    parts_NKH = x_NH.new_zeros(*chosen_NK.shape, x_NH.shape[1])
    for expert in range(experts):
        made_NH = run(expert, x_NH)
        parts_NKH = torch.where((chosen_NK == expert)[..., None], made_NH[:, None], parts_NKH)
    return parts_NKH


class ExpertsInTurn:
    packs: ClassVar[bool] = False
    through = staticmethod(in_turn)

    def __init__(self, product: Product = F.linear) -> None:
        self.product = product

    def __call__(self, inputs: ExpertsInput, ops: Ops) -> torch.Tensor:
        matrices = inputs.matrices

        def run(expert: int, x: torch.Tensor) -> torch.Tensor:
            gate_up, down = matrices[expert]
            inner = ops.gate(self.product(x, gate_up, None), inputs.activation)
            return self.product(inner, down, None)

        return self.through(inputs, len(matrices), run)


class PackedExperts:
    """Each product holds its expert's packed matrix."""

    packs: ClassVar[bool] = True

    def __init__(self, gate_up: Sequence[PackedProduct], down: Sequence[PackedProduct]) -> None:
        self.gate_up, self.down = gate_up, down
        self.few = _few(gate_up, down)

    def __call__(self, inputs: ExpertsInput, ops: Ops) -> torch.Tensor:
        if self.few is not None and 0 < inputs.chosen_NK.numel() <= len(self.down) * FEW_ROWS:
            return self.few(inputs.x_NH, inputs.chosen_NK, inputs.activation)

        def run(expert: int, x: torch.Tensor) -> torch.Tensor:
            inner = ops.gate(self.gate_up[expert](x, inputs.gate_up_QH, None), inputs.activation)
            return self.down[expert](inner, inputs.down_RI, None)

        return in_turn(inputs, len(self.down), run)


def _few(gate_up: Sequence[PackedProduct], down: Sequence[PackedProduct]) -> FewRowsOfExperts | None:
    """One call for all experts, if there is a kernel for few rows of each matrix."""
    few = [[product.few for product in some if product.few is not None] for some in (gate_up, down)]
    if len(few[0]) + len(few[1]) < 2 * len(down) or not (few[0][0].splits_into(2) and few[1][0].splits_into(1)):
        return None
    from stridelm.kernels.host.experts import FewRowsOfExperts

    return FewRowsOfExperts(*few)


class GroupedExperts:
    """All experts in two or three launches (kernels/experts.py), in which few rows also take an MLP that all share
    (kernels/shared_experts.py)."""

    packs: ClassVar[bool] = False

    def __call__(self, inputs: ExpertsInput, ops: Ops) -> torch.Tensor:
        from stridelm.kernels.experts import expert_parts

        return expert_parts(inputs.x_NH, inputs.chosen_NK, inputs.gate_up_QH, inputs.down_RI, inputs.activation)

    def takes_shared(self, rows: int) -> bool:
        """Whether `with_shared` is for so many rows."""
        from stridelm.kernels.shared_experts import MAX_ROWS

        return 0 < rows <= MAX_ROWS

    def with_shared(
        self, inputs: ExpertsInput, shared_x_NH: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What a call returns, and what a shared MLP with these weights makes of the other rows, [N, H]: bit for bit
        what an InOrderProduct with each of them gives."""
        from stridelm.kernels.shared_experts import expert_parts_and_shared

        own = inputs.x_NH, inputs.chosen_NK, inputs.gate_up_QH, inputs.down_RI
        return expert_parts_and_shared(*own, shared_x_NH, gate_up, down, inputs.activation)


class EveryExpert(ExpertsInTurn):
    through = staticmethod(of_every_expert)


def chosen_experts(
    gate_up_QH: torch.Tensor, down_RI: torch.Tensor, experts: int, *, deterministic: bool
) -> ExpertProducts:
    """The fastest for the weights' device and dtype; if equal bits are promised, among those that keep them."""
    plain = tiled_product if deterministic else F.linear
    if runs_in_order(gate_up_QH) and runs_in_order(down_RI):
        return GroupedExperts()
    if gate_up_QH.is_cuda:
        return EveryExpert(plain)
    gate_up, down = (_packed(weights.chunk(experts), deterministic) for weights in (gate_up_QH, down_RI))
    return PackedExperts(gate_up, down) if gate_up and down else ExpertsInTurn(plain)


def _packed(weights: Sequence[torch.Tensor], deterministic: bool) -> list[PackedProduct]:
    """Of each matrix; empty if other products are chosen for this shape."""
    products = (chosen(weight, False, deterministic=deterministic) for weight in weights)
    return [product for product in products if isinstance(product, PackedProduct)]
