"""The sets of step operations, for tests that each of them must pass."""

from __future__ import annotations

import pytest

from stridelm.kernels import STEP_OPS
from support.doubles.interpreter import INTERPRETED

every_set = pytest.mark.parametrize(
    "ops", [pytest.param(STEP_OPS.get(name)(), id=name, marks=[INTERPRETED] * (name == "triton")) for name in STEP_OPS]
)
