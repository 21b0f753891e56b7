"""Where top-k and top-p cut a row of logits, on a GPU: `draw` then keeps exactly what plain_logits.py keeps.

Three searches, one after another, each for the smallest key up to which a row's weights reach a limit:

    search   key of a token                           weight   limit                            finds
    LOGITS   order of the logits, largest first       1        top_k                            the k-th largest logit
    DEPTHS   bits of depth = largest - own logit      mass     top_p of the mass                the nucleus's edge
    IDS      token id, of those at the edge           1        how many of them are needed      the last of them

Masses are mass.py's integers, so sums do not depend on their order. search.py says how a key is found.

Legend: M rows, V vocabulary, S slots of the request table.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from stridelm.kernels.index_kernel import index_kernel
from stridelm.kernels.logit_rows import KEY_BITS, LAST, LOWEST, WARPS, check_logits, find_peaks, row_peak, splits_of
from stridelm.kernels.search import BITS, DIGITS, MAX_REGISTERS, MAX_TURNS, programs_of, search
from stridelm.kernels.search import WARPS as SEARCH_WARPS
from stridelm.kernels.step_ops import Cut

SUMS = tl.constexpr(triton.next_power_of_2(MAX_TURNS.value * DIGITS.value))
"""Lanes for all sums of a row's searches."""

# Device code


@index_kernel
def begin(
    split_peaks,
    slots,
    temperature,
    sampled,
    log_min_p,
    top_k,
    top_p,
    heats,
    top_ks,
    top_ps,
    peaks,
    lows,
    edges,
    lasts,
    sums,
    arrivals,
    stride_temperature,
    stride_sampled,
    stride_min_p,
    stride_top_k,
    stride_top_p,
    splits,
    vocab,
):
    """Read each row's parameters from its slot and apply min-p. Grid (M). A top-k of 0 and a top-p of 1 mean none."""
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    asks = slot >= 0
    asks &= tl.load(sampled + slot * stride_sampled, mask=asks, other=0) != 0
    heat = tl.load(temperature + slot * stride_temperature, mask=asks, other=1.0)
    peak = tl.div_rn(row_peak(split_peaks, splits), heat)
    tl.store(heats + row, heat)
    # The depths of a row of nothing but -inf would be NaN. Plus zero, because -0.0 - 0.0 would have a sign.
    tl.store(peaks + row, tl.maximum(peak, LOWEST) + 0.0)
    relative = tl.load(log_min_p + slot * stride_min_p, mask=asks, other=float("-inf"))
    tl.store(lows + row, tl.where(relative == float("-inf"), float("-inf"), peak + relative))
    tl.store(edges + row, float("inf"))
    tl.store(lasts + row, tl.full([], LAST, tl.int64))
    tl.store(arrivals + row, 0)
    sum_N = tl.arange(0, SUMS)
    tl.store(sums + row * MAX_TURNS * DIGITS + sum_N, tl.zeros([SUMS], tl.int64), mask=sum_N < MAX_TURNS * DIGITS)
    if top_k is not None:
        count = tl.load(top_k + slot * stride_top_k, mask=asks, other=0)
        tl.store(top_ks + row, tl.where((count > 0) & (count < vocab), count, 0))
    if top_p is not None:
        tl.store(top_ps + row, tl.load(top_p + slot * stride_top_p, mask=asks, other=1.0))


# Host code


def truncate(
    logits_MV: torch.Tensor,
    slots_M: torch.Tensor,
    temperature_S: torch.Tensor,
    sampled_S: torch.Tensor,
    log_min_p_S: torch.Tensor,
    top_k_S: torch.Tensor | None = None,
    top_p_S: torch.Tensor | None = None,
) -> Cut:
    rows, vocab = check_logits(logits_MV)
    assert slots_M.shape == (rows,) and slots_M.is_contiguous()
    heats, top_ps, peaks, lows, edges = torch.empty(5, rows, dtype=torch.float32, device=logits_MV.device)
    top_ks, lasts = torch.empty(2, rows, dtype=torch.int64, device=logits_MV.device)
    sums = torch.empty(rows, MAX_TURNS.value, DIGITS.value, dtype=torch.int64, device=logits_MV.device)
    arrivals = torch.empty(rows, dtype=torch.int32, device=logits_MV.device)
    cut = Cut(peaks, lows, edges, lasts)
    if rows == 0:
        return cut
    splits = splits_of(rows, vocab, logits_MV.device)
    stride = logits_MV.stride(0)
    split_peaks = torch.empty(rows, splits, dtype=torch.float32, device=logits_MV.device)
    find_peaks[(rows, splits)](logits_MV, split_peaks, None, None, stride, 0, vocab, num_warps=WARPS)
    columns = (temperature_S, sampled_S.view(torch.uint8), log_min_p_S, top_k_S, top_p_S)
    strides = (0 if each is None else each.stride(0) for each in columns)
    results = (heats, top_ks, top_ps, peaks, lows, edges, lasts)
    begin[(rows,)](split_peaks, slots_M, *columns, *results, sums, arrivals, *strides, splits, vocab, num_warps=1)
    programs = programs_of(rows, vocab, logits_MV.device)
    search[(rows, programs)](
        logits_MV,
        sums,
        arrivals,
        *results,
        stride,
        vocab,
        KEY_BITS[logits_MV.dtype],
        max(1, -(-(vocab - 1).bit_length() // BITS.value)),
        top_k_S is not None,
        top_p_S is not None,
        num_warps=SEARCH_WARPS,
        **({"maxnreg": MAX_REGISTERS} if logits_MV.is_cuda else {}),
    )
    return cut
