"""What drafting heads do to rows before and behind their layer, on a GPU.

A joined norm has the bits of `norm`: its programs work on one row, in the same block and with as many warps.

Legend: M, N rows, C width, D tokens of a head's vocabulary, V of the target's; in kernels B columns of a block.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from stridelm.kernels.dependent import dependent, give_way, wait_for_inputs
from stridelm.kernels.triton_norms import rms_scale, starts_whole, warps, whole

TILE = 2048
"""Tokens that a program spreads."""


@triton.jit(do_not_specialize_on_alignment=["ids"])
def _join_norms_kernel(
    tokens,
    ids,
    token_weight,
    hidden,
    hidden_weight,
    out,
    eps,
    C: tl.constexpr,
    STRIDE: tl.constexpr,
    HIDDEN_FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (N, 2): a program normalises a row of one of the two. STRIDE: from one row of `hidden` to the next."""
    give_way(tl.num_programs(0), DEPENDENT)
    wait_for_inputs(DEPENDENT)
    row, second = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column_B = tl.arange(0, BLOCK)
    exists_B = column_B < C
    if (second == 1) == HIDDEN_FIRST:
        from_row = row if ids is None else tl.load(ids + row)
        x_B = tl.load(tokens + from_row * C + column_B, mask=exists_B, other=0.0)
        weight_B = tl.load(token_weight + column_B, mask=exists_B, other=0.0)
    else:
        x_B = tl.load(hidden + row * STRIDE + column_B, mask=exists_B, other=0.0)
        weight_B = tl.load(hidden_weight + column_B, mask=exists_B, other=0.0)
    x_B = x_B.to(tl.float32)
    scale = rms_scale(tl.sum(x_B * x_B, 0), C, eps)
    normed_B = x_B * scale * weight_B.to(tl.float32)
    tl.store(out + (2 * row + second) * C + column_B, normed_B.to(out.dtype.element_ty), mask=exists_B)


def join_norms(
    token_VC: torch.Tensor,
    ids_N: torch.Tensor | None,
    token_weight_C: torch.Tensor,
    hidden_NC: torch.Tensor,
    hidden_weight_C: torch.Tensor,
    eps: float,
    *,
    hidden_first: bool = False,
) -> torch.Tensor:
    """`Ops.join_norms`."""
    rows, width = hidden_NC.shape
    apart = starts_whole(hidden_NC)
    hidden_NC = hidden_NC if apart else whole(hidden_NC)
    out_N2 = hidden_NC.new_empty(rows, 2 * width)
    block = triton.next_power_of_2(width)
    _join_norms_kernel[(rows, 2)](
        whole(token_VC),
        None if ids_N is None else ids_N.contiguous(),
        whole(token_weight_C),
        hidden_NC,
        whole(hidden_weight_C),
        out_N2,
        eps,
        width,
        hidden_NC.stride(0) if apart else width,
        hidden_first,
        block,
        num_warps=warps(block),
        **dependent(hidden_NC.device),
    )
    return out_N2


@triton.jit(do_not_specialize=["own_vocab", "vocab"])
def _spread_kernel(own, places, out, own_vocab, vocab, TILE: tl.constexpr, DEPENDENT: tl.constexpr):
    """Grid (M, tiles of the vocabulary)."""
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    token_T = tl.program_id(1) * TILE + tl.arange(0, TILE)
    exists_T = token_T < vocab
    place_T = tl.load(places + token_T, mask=exists_T, other=0)
    logit_T = tl.load(own + row * own_vocab + place_T, mask=exists_T & (place_T < own_vocab), other=float("-inf"))
    tl.store(out + row * vocab + token_T, logit_T, mask=exists_T)


def spread_logits(own_MD: torch.Tensor, ids_D: torch.Tensor, places_V: torch.Tensor) -> torch.Tensor:
    """`Ops.spread_logits`."""
    own_MD = own_MD.contiguous()
    (rows, own_vocab), vocab = own_MD.shape, len(places_V)
    out_MV = own_MD.new_empty(rows, vocab)
    if rows:
        grid = (rows, triton.cdiv(vocab, TILE))
        _spread_kernel[grid](own_MD, places_V, out_MV, own_vocab, vocab, TILE, **dependent(own_MD.device))
    return out_MV
