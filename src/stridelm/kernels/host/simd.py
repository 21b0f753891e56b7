"""How this CPU multiplies rows by a packed bfloat16 weight in compiled code: by AMX's tiles (amx.py), else by vectors
with AVX512-BF16 (avx512.py).

Which one follows from what the compiler takes the CPU to be, and so does the place of cached kernels on disk: none of
them is ever read by a CPU that needs the other.
"""

from __future__ import annotations

from types import ModuleType

from stridelm.kernels.host import amx, avx512
from stridelm.kernels.host.arithmetic import compiles_for

_UNIT: ModuleType = amx if compiles_for("amx-bf16") else avx512

ROWS: int = _UNIT.ROWS
"""Most rows of a product by itself."""
LAYER_ROWS: int = _UNIT.LAYER_ROWS
"""Most rows of layers that are one call."""
PAIRS: int = _UNIT.PAIRS
"""Pairs of inputs in a block."""
OUTPUTS: int = _UNIT.OUTPUTS
"""Outputs in a block."""

FEW: int = _UNIT.FEW
"""Outputs of all rows together, up to which a product by itself is faster than oneDNN's."""

is_available = _UNIT.is_available
configuration = _UNIT.configuration
configure = _UNIT.configure
"""Each thread configures before it multiplies so many rows, and releases afterwards."""
release = _UNIT.release
multiply = _UNIT.multiply
