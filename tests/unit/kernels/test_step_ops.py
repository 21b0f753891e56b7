"""Every set of step operations is complete, and each device gets its own."""

from __future__ import annotations

from inspect import signature

import pytest
import torch

from stridelm.kernels import STEP_OPS, step_ops_for
from stridelm.kernels.step_ops import StepOps

OPERATIONS = [name for name in vars(StepOps) if not name.startswith("_")]


@pytest.mark.parametrize("name", list(STEP_OPS))
@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_set_has_every_operation(operation: str, name: str) -> None:
    """Sets are registered by name, which no type checker follows. Additional parameters come last, with a default."""
    asked = list(signature(getattr(StepOps, operation)).parameters.values())[1:]
    taken = list(signature(getattr(STEP_OPS.get(name)(), operation)).parameters.values())
    assert [(each.name, each.default) for each in taken[: len(asked)]] == [(each.name, each.default) for each in asked]
    assert all(each.default is not each.empty for each in taken[len(asked) :])


def test_choice() -> None:
    """A device gets the set made for it, or torch's if there is none."""
    sets = {device: type(step_ops_for(torch.device(device))) for device in ("cpu", "cuda", "meta")}
    assert sets["cpu"] is STEP_OPS.get("host")
    assert sets["meta"] is STEP_OPS.get("plain")
    assert sets["cuda"] is STEP_OPS.get("triton" if "triton" in STEP_OPS else "plain")
