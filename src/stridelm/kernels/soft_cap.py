"""The soft cap of logits on a GPU: cap * tanh(logit / cap) (Gemma Team 2024, arXiv 2408.00118, section 2).

Legend: M rows, V tokens; in kernels B numbers of a block.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from stridelm.kernels.dependent import dependent, wait_for_inputs

BLOCK = 4096
"""Numbers that a program caps."""


@triton.jit
def _tanh_by_exp(x_B):
    return 1.0 - 2.0 / (1.0 + tl.exp(2.0 * x_B))


# The interpreter has no libdevice.
tanh = _tanh_by_exp if triton.knobs.runtime.interpret else libdevice.tanh


@triton.jit(do_not_specialize=["count"])
def _soft_cap_kernel(logits, count, cap, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    """Grid (blocks of all numbers,). In place."""
    wait_for_inputs(DEPENDENT)
    at_B = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    logit_B = tl.load(logits + at_B, mask=at_B < count, other=0.0).to(tl.float32)
    tl.store(logits + at_B, tanh(logit_B / cap) * cap, mask=at_B < count)


def soft_cap(logits_MV: torch.Tensor, cap: float) -> torch.Tensor:
    """`Ops.soft_cap`."""
    logits_MV = logits_MV.contiguous()
    count = logits_MV.numel()
    if count:
        grid = (triton.cdiv(count, BLOCK),)
        _soft_cap_kernel[grid](logits_MV, count, cap, BLOCK, num_warps=8, **dependent(logits_MV.device))
    return logits_MV
