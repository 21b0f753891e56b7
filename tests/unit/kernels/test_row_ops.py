"""Every kernel set against the definitions in float64, and against itself with other rows in the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stridelm.kernels import OPS, ops_for
from stridelm.kernels.host import rows
from stridelm.kernels.host.ops import HostOps
from stridelm.kernels.ops import ACTIVATIONS
from support.checks.experts import (
    ROUTINGS,
    check_combine,
    check_route,
    check_route_parts,
    check_route_scaled,
    check_route_shared,
    check_ties_and_nan,
)
from support.checks.part_logits import SIZES, check_part_logits
from support.checks.row_ops import (
    HEADS,
    check_gate,
    check_joined_norms,
    check_latent,
    check_nan,
    check_normed_sums,
    check_norms,
    check_soft_cap,
    check_spread_logits,
    check_turn,
    check_values,
    sets,
)

CASES = [(name, dtype) for name in sets("cpu") for dtype in sorted(OPS.get(name).dtypes, key=str)]
every_set = pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)


@every_set
@pytest.mark.parametrize("width", [1, 63, 384])
def test_norms(name: str, dtype: torch.dtype, width: int) -> None:
    check_norms(OPS.get(name)(), 17, width, dtype, "cpu")
    check_normed_sums(OPS.get(name)(), 17, width, dtype, "cpu")


@every_set
@pytest.mark.parametrize("width", [1, 63, 384])
def test_joined_norms(name: str, dtype: torch.dtype, width: int) -> None:
    check_joined_norms(OPS.get(name)(), 9, width, dtype, "cpu")


@every_set
def test_spread_logits(name: str, dtype: torch.dtype) -> None:
    check_spread_logits(OPS.get(name)(), 5, 2500, dtype, "cpu")


@every_set
def test_soft_cap(name: str, dtype: torch.dtype) -> None:
    check_soft_cap(OPS.get(name)(), 5, 1030, dtype, "cpu")


@every_set
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_part_logits(name: str, dtype: torch.dtype, sizes: tuple[int, int, int, int]) -> None:
    check_part_logits(OPS.get(name)(), 9, sizes, dtype, "cpu")


@every_set
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("width", [2, 50, 960])
def test_gate(name: str, dtype: torch.dtype, width: int, activation: str) -> None:
    check_gate(OPS.get(name)(), 17, width, dtype, "cpu", activation)


@every_set
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("sizes", HEADS, ids=str)
def test_turn(name: str, dtype: torch.dtype, sizes: tuple[int, int, int, int], norms: bool) -> None:
    check_turn(OPS.get(name)(), 17, sizes, norms, dtype, "cpu")


@every_set
@pytest.mark.parametrize("sizes", HEADS[::3], ids=str)
def test_values(name: str, dtype: torch.dtype, sizes: tuple[int, int, int, int]) -> None:
    """Values that are normalised or are the keys' projections, and layers that store none."""
    check_values(OPS.get(name)(), 17, sizes, dtype, "cpu")


@every_set
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("heads", "rank", "width"), [(4, 32, 8), (17, 40, 12), (3, 512, 64)])
def test_latent(name: str, dtype: torch.dtype, heads: int, rank: int, width: int, interleaved: bool) -> None:
    check_latent(OPS.get(name)(), 17, heads, rank, width, interleaved, dtype, "cpu")


@every_set
def test_nan(name: str, dtype: torch.dtype) -> None:
    check_nan(OPS.get(name)(), dtype, "cpu")


SETS = pytest.mark.parametrize("name", sets("cpu"))


@SETS
@pytest.mark.parametrize("routing", ROUTINGS)
def test_route(name: str, routing: str) -> None:
    check_route(OPS.get(name)(), ROUTINGS[routing], "cpu")


@SETS
def test_route_at_the_limits(name: str) -> None:
    check_route_shared(OPS.get(name)(), "cpu")
    check_route_scaled(OPS.get(name)(), "cpu")
    check_route_parts(OPS.get(name)(), "cpu")
    check_ties_and_nan(OPS.get(name)(), "cpu")


@every_set
@pytest.mark.parametrize("width", [1, 63, 384])
def test_combine(name: str, dtype: torch.dtype, width: int) -> None:
    check_combine(OPS.get(name)(), 17, width, dtype, "cpu")


def test_choice() -> None:
    """A device gets the set made for it, if that set supports the dtype."""
    cpu = torch.device("cpu")
    assert type(ops_for(cpu, torch.bfloat16)) is OPS.get("host")
    assert type(ops_for(cpu, torch.float64)) is OPS.get("plain")


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_host_prepares_what_is_needed(activation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the model's own gate is compiled ahead."""
    ran: list[str] = []

    def spied(name: str, gate: Any) -> Any:
        def spy(*arrays: Any) -> Any:
            ran.append(name)
            return gate(*arrays)

        return spy

    for name, gate in rows.GATES.items():
        monkeypatch.setitem(rows.GATES, name, spied(name, gate))
    HostOps().prepare(torch.float32, normed_heads=False, activation=activation)
    assert ran == [activation]
