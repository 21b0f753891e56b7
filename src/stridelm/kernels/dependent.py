"""Kernels that may be launched before the previous one has ended (CUDA's programmatic dependent launch).

The launch itself then costs nothing: a kernel's programs are put on the processors as those of the previous kernel
leave them, and wait there for it to end. So a kernel launched with these options calls `wait_for_inputs` on every path
before it writes anything, or reads what other kernels write. The kernel it waits for has itself waited, so all earlier
kernels have ended too.

A kernel of few small programs may give way: the next one's programs are put beside its own as soon as these have
begun, and what they do before they wait costs nothing. Then they may read weights, and what describes the step (tables,
positions, lengths), which is written before its rows are embedded, or before a product that comes after a head's
embeddings. Other results of earlier kernels need not exist yet: several kernels in a row may give way. Products do not,
whose programs fill processors unequally; so whatever comes after a product begins only when all that came before it has
ended.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

FEW_PROGRAMS = tl.constexpr(16)
"""Rows, or tiles of rows, up to which a kernel gives way. With 256, twelve layers of Qwen3-30B-A3B take 9% longer if it
does, with 16 and 64 as long as if not (one H200)."""


@triton.jit
def give_way(rows, DEPENDENT: tl.constexpr):
    """Called before `wait_for_inputs`. rows: of the launch, or tiles, where programs are as many."""
    if DEPENDENT:
        if rows <= FEW_PROGRAMS:
            tl.extra.cuda.gdc_launch_dependents()


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
