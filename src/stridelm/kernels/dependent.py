"""Kernels that may be launched before the previous one has ended (CUDA's programmatic dependent launch).

The launch itself then costs nothing: a kernel's programs are put on the processors as those of the previous kernel
leave them, and wait there for it to end. So a kernel launched with these options calls `wait_for_inputs` on every path
before it reads or writes anything. The kernel it waits for has itself waited, so all earlier kernels have ended too.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def wait_for_inputs(DEPENDENT: tl.constexpr):
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()


@cache
def dependent(device: torch.device) -> dict[str, Any]:
    """Launch options, including `DEPENDENT` for the kernel."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
        return {"DEPENDENT": False}
    return {"DEPENDENT": True, "launch_pdl": True}
