"""The sets of step operations, for laws that all of them are held to."""

from __future__ import annotations

import pytest

from stridelm.kernels import STEP_OPS
from support.doubles.interpreter import INTERPRETED

every_set = pytest.mark.parametrize(
    "ops", [pytest.param(STEP_OPS.get(name)(), id=name, marks=[INTERPRETED] * (name == "triton")) for name in STEP_OPS]
)
