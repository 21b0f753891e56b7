"""Where top-k and top-p cut a row of logits, on a GPU: `draw` then keeps exactly what plain_logits.py keeps.

Three searches, one after another, each for the smallest key up to which a row's weights reach a limit:

    search   key of a token                           weight   limit                            finds
    LOGITS   order of the logits, largest first       1        top_k                            the k-th largest logit
    DEPTHS   bits of depth = largest - own logit      mass     top_p of the mass                the nucleus's edge
    IDS      token id, of those at the edge           1        how many of them are needed      the last of them

Masses are mass.py's integers, so sums do not depend on their order. A key is found digit by digit (digits.py): `weigh`
adds up the weights of the tokens that share the digits found so far, by their next digit; `settle` adds the splits
together and takes the digit at which the limit is reached. Few rows are searched in one launch (search.py).

Legend: M rows, V vocabulary, S slots of the request table, P splits, T tokens of a tile, D values of a digit.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from stridelm.kernels.digits import (
    BITS,
    DEPTHS,
    DIGITS,
    IDS,
    LOGITS,
    depth_of_prefix,
    logit_of_prefix,
    needed_at_edge,
    next_digit,
    nucleus_of,
    weights_by_digit,
)
from stridelm.kernels.index_kernel import index_kernel, row_kernel
from stridelm.kernels.logit_rows import (
    KEY_BITS,
    LAST,
    LOWEST,
    WARPS,
    check_logits,
    find_peaks,
    my_entry,
    my_tiles,
    row_entries,
    row_peak,
    splits_of,
)
from stridelm.kernels.search import FEW_ROWS, MAX_REGISTERS, programs_of, search
from stridelm.kernels.step_ops import Cut

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
    if arrivals is not None:
        tl.store(arrivals + row, 0)
    if top_k is not None:
        count = tl.load(top_k + slot * stride_top_k, mask=asks, other=0)
        tl.store(top_ks + row, tl.where((count > 0) & (count < vocab), count, 0))
    if top_p is not None:
        tl.store(top_ps + row, tl.load(top_p + slot * stride_top_p, mask=asks, other=1.0))


@triton.jit
def _searches(row, top_ks, top_ps, KEY: tl.constexpr):
    """Whether the row takes part in this search."""
    if KEY == LOGITS:
        return tl.load(top_ks + row) > 0
    else:
        return tl.load(top_ps + row) < 1.0


@row_kernel("logits", "sums", "stride_m", "vocab")
def weigh(
    logits,
    sums,
    prefixes,
    heats,
    top_ks,
    top_ps,
    peaks,
    lows,
    edges,
    stride_m,
    vocab,
    shift,
    KEY: tl.constexpr,
    FIRST: tl.constexpr,
):
    """Sum each split's weights by the digit at `shift`, over the tokens whose higher digits equal the row's prefix. The
    first digit has no prefix. Grid (M, P)."""
    row = tl.program_id(0)
    if not _searches(row, top_ks, top_ps, KEY):
        return
    heat = tl.load(heats + row)
    peak = tl.load(peaks + row)
    low = tl.load(lows + row)
    edge = tl.load(edges + row)
    prefix = tl.zeros([], tl.int64)
    if not FIRST:
        prefix = tl.load(prefixes + row)
    first, last = my_tiles(vocab)
    logits += row.to(tl.int64) * stride_m
    sum_D = weights_by_digit(logits, first, last, vocab, heat, peak, low, edge, prefix, shift, KEY)
    tl.store(sums + my_entry() * DIGITS + tl.arange(0, DIGITS), sum_D)


@row_kernel("sums")
def settle(
    sums,
    prefixes,
    rests,
    heats,
    top_ks,
    top_ps,
    lows,
    edges,
    lasts,
    splits,
    shift,
    KEY: tl.constexpr,
    FIRST: tl.constexpr,
    LAST_DIGIT: tl.constexpr,
):
    """Find one more digit of each row's key and, after the last one, store the result of the search. Grid (M).

    rests: the limit minus the weights of all tokens before the prefix.
    """
    row = tl.program_id(0)
    if not _searches(row, top_ks, top_ps, KEY):
        return
    digit_D = tl.arange(0, DIGITS)
    entry_P, exists_P = row_entries(splits)
    sum_PD = tl.load(sums + entry_P[:, None] * DIGITS + digit_D[None, :], mask=exists_P[:, None], other=0)
    sum_D = tl.sum(sum_PD, 0)
    if FIRST:
        prefix = tl.zeros([], tl.int64)
        if KEY == LOGITS:
            rest = tl.load(top_ks + row)
        elif KEY == DEPTHS:
            rest = nucleus_of(sum_D, tl.load(top_ps + row))
        else:
            rest = needed_at_edge(tl.load(rests + row), tl.load(edges + row))
    else:
        prefix = tl.load(prefixes + row)
        rest = tl.load(rests + row)
    prefix, rest = next_digit(sum_D, prefix, rest)
    tl.store(prefixes + row, prefix)
    tl.store(rests + row, rest)
    if LAST_DIGIT:
        if KEY == LOGITS:
            low = tl.div_rn(logit_of_prefix(prefix, shift), tl.load(heats + row))
            tl.store(lows + row, tl.maximum(low, tl.load(lows + row)))
        elif KEY == DEPTHS:
            tl.store(edges + row, depth_of_prefix(prefix))
        else:
            tl.store(lasts + row, prefix)


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
    top_ks, lasts, prefixes, rests = torch.empty(4, rows, dtype=torch.int64, device=logits_MV.device)
    cut = Cut(peaks, lows, edges, lasts)
    if rows == 0:
        return cut
    few = rows <= FEW_ROWS
    splits = programs_of(rows, vocab, logits_MV.device) if few else splits_of(rows, vocab, logits_MV.device)
    stride = logits_MV.stride(0)
    split_peaks = torch.empty(rows, splits, dtype=torch.float32, device=logits_MV.device)
    sums = torch.empty(1 + few, rows, splits, DIGITS.value, dtype=torch.int64, device=logits_MV.device)
    arrivals = torch.empty(rows, dtype=torch.int32, device=logits_MV.device) if few else None
    find_peaks[(rows, splits)](logits_MV, split_peaks, None, None, stride, 0, vocab, num_warps=WARPS)
    columns = (temperature_S, sampled_S.view(torch.uint8), log_min_p_S, top_k_S, top_p_S)
    strides = (0 if each is None else each.stride(0) for each in columns)
    results = (heats, top_ks, top_ps, peaks, lows, edges, lasts)
    begin[(rows,)](split_peaks, slots_M, *columns, *results, arrivals, *strides, splits, vocab, num_warps=1)
    if few:
        search[(rows, splits)](
            logits_MV,
            sums,
            arrivals,
            *results,
            stride,
            vocab,
            KEY_BITS[logits_MV.dtype],
            _id_digits(vocab),
            top_k_S is not None,
            top_p_S is not None,
            splits > 1,
            num_warps=WARPS,
            **({"maxnreg": MAX_REGISTERS} if logits_MV.is_cuda else {}),
        )
        return cut
    limits, bounds = (heats, top_ks, top_ps), (lows, edges, lasts)
    for key, shifts in _searches_of(logits_MV.dtype, vocab, top_k_S is not None, top_p_S is not None):
        for shift in shifts:
            digit = {"KEY": key, "FIRST": shift == shifts[0]}
            weigh[(rows, splits)](
                logits_MV, sums, prefixes, *limits, peaks, lows, edges, stride, vocab, shift, num_warps=WARPS, **digit
            )
            digit["LAST_DIGIT"] = shift == shifts[-1]
            settle[(rows,)](sums, prefixes, rests, *limits, *bounds, splits, shift, num_warps=WARPS, **digit)
    return cut


def _id_digits(vocab: int) -> int:
    return max(1, -(-(vocab - 1).bit_length() // BITS.value))


def _searches_of(dtype: torch.dtype, vocab: int, top_k: bool, top_p: bool) -> list[tuple[int, range]]:
    """(key, shifts of its digits from the highest) of each search, in order."""
    step = BITS.value
    searches = []
    if top_k:
        searches.append((LOGITS.value, range(32 - step, 32 - KEY_BITS[dtype] - 1, -step)))
    if top_p:
        searches.append((DEPTHS.value, range(32 - step, -1, -step)))
        searches.append((IDS.value, range((_id_digits(vocab) - 1) * step, -1, -step)))
    return searches
