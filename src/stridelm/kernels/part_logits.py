"""Logits of a part of the vocabulary on a GPU: those of the tokens whose centroids a row scores highest, in two
launches (`Ops.part_logits`).

The first chooses each row's centroids and fills its logits with -inf; the second reads the chosen tokens' rows of the
matrix, and those alone, and writes their logits where they belong.

A row's bits depend on that row alone. The choice counts integers; a logit is added up by one program in an order that
the width defines. Which of the programs that fill is last does not matter, since nothing else is written before the
second launch.

Legend: M rows, H hidden width, V tokens, C centroids, S tokens of a centroid, K chosen centroids; in kernels B
centroids or tokens of a block, I inputs of a block.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from stridelm.kernels.dependent import dependent, wait_for_inputs
from stridelm.kernels.logit_rows import KEY_BITS, order_key
from stridelm.kernels.triton_norms import warps, whole

FILLED = 4096
"""Logits that a program fills."""
TOKENS = 32
"""Tokens whose logits a program computes: a lone row of Gemma 4's assistants occupies 128 processors."""
MAX_INPUTS = 256
"""Inputs of a block: with TOKENS, what the registers of a program's four warps hold."""


@triton.jit
def _choose_kernel(
    scores,
    chosen,
    logits,
    C: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    FILL: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (M, 1 + blocks of FILL tokens). A row's first program finds the K-th key bit by bit, from the highest, as
    the smallest up to which there are K. BITS: of a key that distinguish scores."""
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) == 0:
        centroid_B = tl.arange(0, BLOCK)
        exists_B = centroid_B < C
        score_B = tl.load(scores + row * C + centroid_B, mask=exists_B, other=float("-inf")).to(tl.float32)
        key_B = (order_key(score_B) >> (32 - BITS)).to(tl.int64)
        edge = tl.full([], 0, tl.int64)
        for digit in range(BITS):
            bit = tl.full([], 1, tl.int64) << (BITS - 1 - digit)
            upto = tl.sum(((key_B < edge + bit) & exists_B).to(tl.int32), 0)
            edge = tl.where(upto < K, edge + bit, edge)
        better_B = (key_B < edge) & exists_B
        equal_B = (key_B == edge) & exists_B
        needed = K - tl.sum(better_B.to(tl.int32), 0)
        chosen_B = better_B | (equal_B & (tl.cumsum(equal_B.to(tl.int32), 0) <= needed))
        at_B = tl.cumsum(chosen_B.to(tl.int32), 0) - 1
        tl.store(chosen + row * K + at_B, centroid_B, mask=chosen_B)
    else:
        token_F = (tl.program_id(1) - 1) * FILL + tl.arange(0, FILL)
        nothing_F = tl.full([FILL], float("-inf"), logits.dtype.element_ty)
        tl.store(logits + row * V + token_F, nothing_F, mask=token_F < V)


@triton.jit
def _logits_kernel(
    x,
    weight,
    ids,
    chosen,
    logits,
    H: tl.constexpr,
    V: tl.constexpr,
    S: tl.constexpr,
    K: tl.constexpr,
    B: tl.constexpr,
    I: tl.constexpr,  # noqa: E741 (the legend's)
    DEPENDENT: tl.constexpr,
):
    """Grid (M, K, blocks of S)."""
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    centroid = tl.load(chosen + row * K + tl.program_id(1)).to(tl.int64)
    place_B = tl.program_id(2) * B + tl.arange(0, B)
    exists_B = place_B < S
    token_B = tl.load(ids + centroid * S + place_B, mask=exists_B, other=0)
    sum_BI = tl.zeros([B, I], tl.float32)
    for first in range(0, H, I):
        input_I = first + tl.arange(0, I)
        within_I = input_I < H
        at_BI = weight + token_B[:, None] * H + input_I[None, :]
        weight_BI = tl.load(at_BI, mask=exists_B[:, None] & within_I[None, :], other=0.0).to(tl.float32)
        x_I = tl.load(x + row * H + input_I, mask=within_I, other=0.0).to(tl.float32)
        sum_BI += weight_BI * x_I[None, :]
    tl.store(logits + row * V + token_B, tl.sum(sum_BI, 1), mask=exists_B)


def part_logits(
    x_MH: torch.Tensor, scores_MC: torch.Tensor, weight_VH: torch.Tensor, ids_CS: torch.Tensor, best: int
) -> torch.Tensor:
    """`Ops.part_logits`."""
    (rows, width), (count, each), vocab_size = x_MH.shape, ids_CS.shape, len(weight_VH)
    assert scores_MC.shape == (rows, count) and best <= count and ids_CS.is_contiguous()
    logits_MV = x_MH.new_empty(rows, vocab_size)
    if not rows:
        return logits_MV
    chosen_MK = x_MH.new_empty(rows, best, dtype=torch.int32)
    block, options = triton.next_power_of_2(count), dependent(x_MH.device)
    _choose_kernel[rows, 1 + triton.cdiv(vocab_size, FILLED)](
        whole(scores_MC),
        chosen_MK,
        logits_MV,
        count,
        best,
        vocab_size,
        KEY_BITS[scores_MC.dtype],
        block,
        FILLED,
        num_warps=warps(max(block, FILLED)),
        **options,
    )
    tokens = min(TOKENS, triton.next_power_of_2(each))
    _logits_kernel[rows, best, triton.cdiv(each, tokens)](
        whole(x_MH),
        whole(weight_VH),
        ids_CS,
        chosen_MK,
        logits_MV,
        width,
        vocab_size,
        each,
        best,
        tokens,
        min(MAX_INPUTS, triton.next_power_of_2(width)),
        num_warps=4,
        **options,
    )
    return logits_MV
