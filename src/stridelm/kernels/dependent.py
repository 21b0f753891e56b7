"""Kernels that may be launched before the previous one has ended (CUDA's programmatic dependent launch).

The launch itself then costs nothing: a kernel's programs are put on the processors as those of the previous kernel
leave them, and wait there for it to end. So a kernel launched with these options calls `wait_for_inputs` on every path
before it writes anything, or reads what the previous kernel writes. The kernel it waits for has itself waited, so all
earlier kernels have ended too.

A kernel of few small programs may give way: the next one's programs are put beside its own as soon as these have
begun, and what they do before they wait costs nothing. Then they may read weights, and what describes the step (tables,
positions, lengths), which is written before its rows are embedded, or before a product that comes after a head's
embeddings. Other results of earlier kernels need not exist yet: several kernels in a row may give way.

Products, whose programs fill processors unequally, give way only when they have summed all (`nearly_done`), but for a
router's scores. They have waited then; so what comes after a product begins only when all that came before that product
has ended, and experts' second product reads the table of tiles and their pairs, as the first has, before it waits.

Products ask for their first weights before they wait (`once_written`), so that memory is not idle while the few
programs of a norm or of merging run. Experts' first does not, whose table says which weights.
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
ALIGNMENT = tl.constexpr(16)
"""Columns: no load of any dtype is wider."""


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


@triton.jit
def once_written(at, DEPENDENT: tl.constexpr):
    """Returns `at`, an offset into what the previous kernel writes, once that kernel has ended. In a loop that is
    pipelined this is the wait: what such a loop loads ahead without this offset, it asks for before. Those are weights,
    which the previous kernel must not write. After the loop the program still waits (`nearly_done`), since the compiler
    does not know that the loop runs at least once."""
    if DEPENDENT:
        # "Pure", so that loads may be taken out of the loop. It stays where it is, for it reads `at` and returns a 0,
        # here multiplied so that the compiler knows the sum to be as aligned as `at`.
        at += ALIGNMENT * tl.inline_asm_elementwise(
            "griddepcontrol.wait; mov.u32 $0, 0; // $1", "=r,r", [at], dtype=tl.int32, is_pure=True, pack=1
        )
    return at


@triton.jit
def nearly_done(DEPENDENT: tl.constexpr):
    """Called by a program that has only its tile to finish. It waits, if it has not yet. When all programs have called
    this, those of the next kernel may come beside them."""
    wait_for_inputs(DEPENDENT)
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()


@cache
def dependent(device: torch.device) -> dict[str, Any]:
    """Launch options, including `DEPENDENT` for the kernel."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
        return {"DEPENDENT": False}
    return {"DEPENDENT": True, "launch_pdl": True}
