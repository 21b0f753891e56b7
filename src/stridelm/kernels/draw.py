"""From logits to tokens on a GPU, without the host: each row's parameters are read from device tensors, by slot.

The logits have already been edited (edit.py) if they need to be. The noise is noise.py's: the same integer bits, and
floats from the same formula and the same library functions.

The logits are read once, in their own precision, and are float32 from there on, so a float32 copy of them draws the
same tokens. They are read a second time for rows with min-p and for `confidence`, which need the largest logit first.
Ties go to the lowest id. A row's token and confidence do not depend on the rows beside it.

Graphs. The host decides from shapes alone: a captured launch stays correct when slots, positions and parameters change.

Legend: M rows, V vocabulary, S slots of the request table, P splits, T tokens of a tile, B Philox blocks of a tile.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from stridelm.kernels.index_kernel import index_kernel, row_kernel
from stridelm.kernels.logit_rows import (
    LAST,
    LOWEST,
    TILE,
    UNIT,
    WARPS,
    check_logits,
    find_peaks,
    load_tile,
    log1p,
    mass_of,
    my_entry,
    my_tiles,
    row_entries,
    row_peak,
    splits_of,
)
from stridelm.kernels.step_ops import Cut

PADDING = 0
"""The token of a row without a slot: a valid id, since guesses are embedded before anybody asks whose they are."""


# Device code


@triton.jit
def noise_words(seed, block_B, position, sample, stream):
    """[4 B] uint32: the noise's integers for the tokens of these Philox blocks. Layout as in noise.py."""
    w0_B, w1_B, w2_B, w3_B = tl.philox(
        seed, block_B.to(tl.uint32), position.to(tl.uint32), sample.to(tl.uint32), stream.to(tl.uint32)
    )
    # `join` adds a last dimension: (0, 2) and (1, 3) make (0, 1), (2, 3).
    return tl.join(tl.join(w0_B, w2_B), tl.join(w1_B, w3_B)).reshape(4 * block_B.shape[0])


@triton.jit
def gumbel_of(word_T):
    """float32 noise from uint32 words: `to_gumbel_` in noise.py, step by step."""
    minus_v_T = word_T.to(tl.float32) * -(2.0**-32) - 2.0**-33  # the product is exact: fused or not makes no difference
    minus_v_T = tl.maximum(minus_v_T, -(1.0 - 2.0**-24))
    return -tl.log(-log1p(minus_v_T))


@triton.jit
def _lowest_of_best(score_T, token_T):
    """(the best score, the lowest token that has it)"""
    best = tl.max(score_T)
    return best, tl.min(tl.where(score_T == best, token_T, LAST))


@row_kernel("logits", "stride_m", "vocab")
def find_best(
    logits,
    scores,
    tokens,
    peaks,
    slots,
    positions,
    temperature,
    seed,
    sample_index,
    sampled,
    log_min_p,
    cut_peaks,
    cut_lows,
    cut_edges,
    cut_lasts,
    streams,
    stream,
    stride_m,
    stride_temperature,
    stride_seed,
    stride_sample,
    stride_sampled,
    stride_min_p,
    vocab,
):
    """Find each split's best score and its token. Grid (M, P). peaks and log_min_p are None if no row has min-p, and
    the cut's four tensors if none has top-k or top-p. streams: None if all rows share `stream`."""
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    logits += row.to(tl.int64) * stride_m
    first, last = my_tiles(vocab)
    # Each lane keeps the first of the best tokens that it has seen; a row of nothing but -inf is left with token 0.
    best_T = tl.full([TILE], float("-inf"), tl.float32)
    winner_T = tl.zeros([TILE], tl.int32)
    if tl.load(sampled + slot * stride_sampled) != 0:
        key = tl.load(seed + slot * stride_seed)
        sample = tl.load(sample_index + slot * stride_sample)
        position = tl.load(positions + row)
        noise_stream = stream if streams is None else tl.load(streams + row)
        heat = tl.load(temperature + slot * stride_temperature)
        least = float("-inf")
        if cut_lows is not None:
            least = tl.load(cut_lows + row)
            peak, edge, last_at_edge = tl.load(cut_peaks + row), tl.load(cut_edges + row), tl.load(cut_lasts + row)
        elif log_min_p is not None:
            relative = tl.load(log_min_p + slot * stride_min_p)
            if relative != float("-inf"):
                least = tl.div_rn(row_peak(peaks, tl.num_programs(1)), heat) + relative
        for tile in range(first, last):
            token_T, logit_T = load_tile(logits, tile, vocab)
            logit_T = tl.div_rn(logit_T, heat)
            block_B = tile * (TILE // 4) + tl.arange(0, TILE // 4)
            noise_T = gumbel_of(noise_words(key, block_B, position, sample, noise_stream))
            dropped_T = logit_T < least
            if cut_lows is not None:
                depth_T = peak - logit_T
                dropped_T |= (depth_T > edge) | ((depth_T == edge) & (token_T > last_at_edge))
            score_T = tl.where(dropped_T, float("-inf"), logit_T + noise_T)
            better_T = score_T > best_T
            best_T, winner_T = tl.where(better_T, score_T, best_T), tl.where(better_T, token_T, winner_T)
    else:
        for tile in range(first, last):
            token_T, logit_T = load_tile(logits, tile, vocab)
            better_T = logit_T > best_T
            best_T, winner_T = tl.where(better_T, logit_T, best_T), tl.where(better_T, token_T, winner_T)
    best, winner = _lowest_of_best(best_T, winner_T)
    tl.store(scores + my_entry(), best)
    tl.store(tokens + my_entry(), winner)


@index_kernel
def choose(scores, tokens, slots, out, splits, NOBODY: tl.constexpr):
    """Store the best of a row's splits in the output. Grid (M)."""
    row = tl.program_id(0)
    padding = tl.load(slots + row) < 0
    entry_P, exists_P = row_entries(splits)
    exists_P &= not padding
    score_P = tl.load(scores + entry_P, mask=exists_P, other=float("-inf"))
    token_P = tl.load(tokens + entry_P, mask=exists_P, other=LAST)
    _, token = _lowest_of_best(score_P, token_P)
    tl.store(out + row, tl.where(padding, NOBODY, token).to(tl.int64))


@row_kernel("logits", "stride_m", "vocab")
def add_masses(logits, peaks, totals, stride_m, vocab):
    """Compute each split's sum of exp(logit - peak) in integer units: int64, so that the order of adding does not
    matter."""
    row = tl.program_id(0)
    # A row of nothing but -inf would give NaN.
    peak = tl.maximum(row_peak(peaks, tl.num_programs(1)), LOWEST)
    first, last = my_tiles(vocab)
    total_T = tl.zeros([TILE], tl.int64)
    for tile in range(first, last):
        _, logit_T = load_tile(logits + row.to(tl.int64) * stride_m, tile, vocab)
        total_T += mass_of(peak - logit_T)
    tl.store(totals + my_entry(), tl.sum(total_T))


@index_kernel
def confide(totals, out, splits):
    """Compute the most probable token's share of the mass. Grid (M)."""
    entry_P, exists_P = row_entries(splits)
    total = tl.sum(tl.load(totals + entry_P, mask=exists_P, other=0))
    share = tl.full([], UNIT, tl.float64) / total.to(tl.float64)
    tl.store(out + tl.program_id(0), share.to(tl.float32))


# Host code


def draw(
    logits_MV: torch.Tensor,
    slots_M: torch.Tensor,
    positions_M: torch.Tensor,
    temperature_S: torch.Tensor,
    seed_S: torch.Tensor,
    sample_index_S: torch.Tensor,
    sampled_S: torch.Tensor,
    log_min_p_S: torch.Tensor | None = None,
    stream: int | torch.Tensor = 0,
    cut: Cut | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rows with a negative slot get PADDING, and nothing of them is read. A logit of NaN is never chosen."""
    rows, vocab = check_logits(logits_MV)
    assert slots_M.shape == positions_M.shape == (rows,)
    assert slots_M.is_contiguous() and positions_M.is_contiguous()
    streams_M = stream if isinstance(stream, torch.Tensor) else None
    assert streams_M is None or (streams_M.shape == (rows,) and streams_M.is_contiguous())
    one_stream = 0 if isinstance(stream, torch.Tensor) else stream
    assert 0 <= one_stream < 2**32
    if out is None:
        out = torch.empty(rows, dtype=torch.int64, device=logits_MV.device)
    assert out.shape == (rows,) and out.is_contiguous()
    if rows == 0:
        return out
    splits = splits_of(rows, vocab, logits_MV.device)
    scores_MP = torch.empty(rows, splits, dtype=torch.float32, device=logits_MV.device)
    tokens_MP = torch.empty(rows, splits, dtype=torch.int32, device=logits_MV.device)
    peaks_MP, min_p_stride = None, 0
    if cut is not None:
        log_min_p_S = None
    if log_min_p_S is not None:
        peaks_MP, min_p_stride = torch.empty_like(scores_MP), log_min_p_S.stride(0)
        find_peaks[(rows, splits)](
            logits_MV, peaks_MP, slots_M, log_min_p_S, logits_MV.stride(0), min_p_stride, vocab, num_warps=WARPS
        )
    find_best[(rows, splits)](
        logits_MV,
        scores_MP,
        tokens_MP,
        peaks_MP,
        slots_M,
        positions_M,
        temperature_S,
        seed_S,
        sample_index_S,
        sampled_S.view(torch.uint8),
        log_min_p_S,
        *((None,) * 4 if cut is None else (cut.peak_M, cut.low_M, cut.edge_M, cut.last_M)),
        streams_M,
        one_stream,
        logits_MV.stride(0),
        temperature_S.stride(0),
        seed_S.stride(0),
        sample_index_S.stride(0),
        sampled_S.stride(0),
        min_p_stride,
        vocab,
        num_warps=WARPS,
    )
    choose[(rows,)](scores_MP, tokens_MP, slots_M, out, splits, NOBODY=PADDING, num_warps=1)
    return out


def draw_weighted(
    logs_MV: torch.Tensor,
    slots_M: torch.Tensor,
    positions_M: torch.Tensor,
    seed_S: torch.Tensor,
    sample_index_S: torch.Tensor,
    stream: int | torch.Tensor,
) -> torch.Tensor:
    # Every slot has temperature 1 and is drawn with noise: one number each, at stride 0.
    ones_S = torch.ones(1, device=logs_MV.device).expand(len(seed_S))
    always_S = torch.ones(1, dtype=torch.bool, device=logs_MV.device).expand(len(seed_S))
    return draw(logs_MV, slots_M, positions_M, ones_S, seed_S, sample_index_S, always_S, stream=stream)


def confidence(logits_MV: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    rows, vocab = check_logits(logits_MV)
    if out is None:
        out = torch.empty(rows, dtype=torch.float32, device=logits_MV.device)
    assert out.shape == (rows,) and out.is_contiguous()
    if rows == 0:
        return out
    splits = splits_of(rows, vocab, logits_MV.device)
    grid, stride = (rows, splits), logits_MV.stride(0)
    peaks_MP = torch.empty(grid, dtype=torch.float32, device=logits_MV.device)
    totals_MP = torch.empty(grid, dtype=torch.int64, device=logits_MV.device)
    find_peaks[grid](logits_MV, peaks_MP, None, None, stride, 0, vocab, num_warps=WARPS)
    add_masses[grid](logits_MV, peaks_MP, totals_MP, stride, vocab, num_warps=WARPS)
    confide[(rows,)](totals_MP, out, splits, num_warps=1)
    return out
