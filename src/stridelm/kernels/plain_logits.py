"""What a step does to rows of logits, in plain torch: edits, truncation and draws.

A row that edits leave with nothing but -inf stays so, and draws token 0, the lowest id.

Legend: as in step_ops.py; G rows that ask for an edit, X sampled rows, U distinct slots, D places of a history or
entries of a list.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from stridelm.kernels.mass import UNIT, depths, masses, nucleus
from stridelm.kernels.noise import gumbel, gumbel_at
from stridelm.kernels.step_ops import Asked, Cut, Past

FindNucleus = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""What computes mass.py's `nucleus`."""
Keep = Callable[[torch.Tensor, Cut], tuple[torch.Tensor, torch.Tensor]]
"""What computes `keep`."""
FEW = 8
"""Few tokens of a row survive truncation if they are at most one in this many."""
_PROMPT = 1 << 32
"""What a prompt token adds to a count, so that one pass counts prompt and output separately."""
_NOTHING = -1
"""Returned where a row's output has no token."""


# Edits


@contextmanager
def _asking(logits_MV: torch.Tensor, past: Past, asked: Asked) -> Iterator[tuple[torch.Tensor, Past]]:
    """The logits of the rows that ask for the edit, to be edited in place, and the history before these rows."""
    index_G = _where((past.slots_M >= 0) & ((asked.features_S[past.slots_M] & asked.bit) != 0))
    if len(index_G) == len(logits_MV):
        yield logits_MV, past
        return
    logits_GV = logits_MV.index_select(0, index_G)
    yield logits_GV, past.select(index_G)
    logits_MV.index_copy_(0, index_G, logits_GV)


def forbid_words(
    logits_MV: torch.Tensor, past: Past, asked: Asked, words_ST: torch.Tensor, ends_SW: torch.Tensor
) -> None:
    with _asking(logits_MV, past, asked) as (logits_GV, past):
        token_GT, end_GW = words_ST.index_select(0, past.slots_M), ends_SW.index_select(0, past.slots_M)
        last_GW, hit_GW = (end_GW - 1).clamp(min=0), end_GW > 0
        # How far each entry is before its word's last token. Entries after the last word belong to no word.
        entry_T = torch.arange(token_GT.shape[1], device=token_GT.device)
        rising_GW = torch.where(hit_GW, end_GW, token_GT.shape[1])
        word_GT = torch.searchsorted(rising_GW, entry_T.expand_as(token_GT).contiguous(), right=True)
        back_GT = last_GW.gather(1, word_GT.clamp(max=end_GW.shape[1] - 1)) - entry_T
        # A word matches if none of its entries differs, that is if the count of differences up to its end equals that
        # up to its beginning.
        differs_GT = (back_GT > 0) & (_output_token(past, past.positions_M[:, None] - back_GT) != token_GT)
        upto_GT = torch.nn.functional.pad(differs_GT.cumsum(1), (1, 0))
        start_GW = torch.nn.functional.pad(end_GW[:, :-1], (1, 0))
        hit_GW = hit_GW & (upto_GT.gather(1, end_GW) == upto_GT.gather(1, start_GW))
        _forbid(logits_GV, token_GT.gather(1, last_GW), hit_GW)


def add_bias(logits_MV: torch.Tensor, past: Past, asked: Asked, ids_SC: torch.Tensor, bias_SC: torch.Tensor) -> None:
    with _asking(logits_MV, past, asked) as (logits_GV, past):
        logits_GV.scatter_add_(1, ids_SC.index_select(0, past.slots_M), bias_SC.index_select(0, past.slots_M))


def forbid_stops(
    logits_MV: torch.Tensor, past: Past, asked: Asked, min_tokens_S: torch.Tensor, ids_SP: torch.Tensor
) -> None:
    with _asking(logits_MV, past, asked) as (logits_GV, past):
        stop_GP = ids_SP.index_select(0, past.slots_M)
        written_G1 = past.positions_M[:, None] - _column(past.prompt_len_S, past)
        _forbid(logits_GV, stop_GP, (stop_GP >= 0) & (written_G1 < _column(min_tokens_S, past)))


def penalise(
    logits_MV: torch.Tensor,
    past: Past,
    asked: Asked,
    repetition_S: torch.Tensor,
    presence_S: torch.Tensor,
    frequency_S: torch.Tensor,
) -> None:
    with _asking(logits_MV, past, asked) as (logits_GV, past):
        counts_GV = _counts(logits_GV.shape[1], past)
        repetition_G1 = _column(repetition_S, past)
        output_GV = (counts_GV & (_PROMPT - 1)).float()
        repeated_GV = torch.where(logits_GV > 0, logits_GV / repetition_G1, logits_GV * repetition_G1)
        torch.where(counts_GV > 0, repeated_GV, logits_GV, out=logits_GV)
        logits_GV.sub_(output_GV * _column(frequency_S, past))
        logits_GV.sub_(output_GV.clamp_(max=1.0).mul_(_column(presence_S, past)))


def _column(values_S: torch.Tensor, past: Past) -> torch.Tensor:
    """[G, 1]: each row's own value."""
    return values_S.index_select(0, past.slots_M)[:, None]


def _forbid(logits_GV: torch.Tensor, ids_GD: torch.Tensor, hit_GD: torch.Tensor) -> None:
    """Set the ids that are hit to -inf, by adding rather than storing: a row may list an id both hit and not hit."""
    penalty_GD = torch.zeros(ids_GD.shape, dtype=logits_GV.dtype, device=logits_GV.device)
    logits_GV.scatter_add_(1, ids_GD.clamp(min=0), penalty_GD.masked_fill_(hit_GD, -math.inf))


def _output_token(past: Past, place_GD: torch.Tensor) -> torch.Tensor:
    """[G, D] the output token at these places of each row's history; _NOTHING before the output."""
    token_GD = past.tokens_SL[past.slots_M[:, None], place_GD.clamp(0, past.tokens_SL.shape[1] - 1)]
    if past.extra_ME is not None and past.extra_ME.shape[1]:
        beyond_GD = place_GD - _column(past.known_S, past)
        drafted_GD = past.extra_ME.gather(1, beyond_GD.clamp(0, past.extra_ME.shape[1] - 1))
        token_GD = torch.where(beyond_GD >= 0, drafted_GD, token_GD)
    return token_GD.masked_fill_(place_GD < _column(past.prompt_len_S, past), _NOTHING)


def _counts(vocab_size: int, past: Past) -> torch.Tensor:
    """[G, V] how often each token occurs in the row's output, plus _PROMPT per occurrence in its prompt."""
    slots_U, entry_G = past.slots_M.unique(return_inverse=True)  # a history that rows share is counted once
    is_shared = len(slots_U) < len(entry_G)
    slots_U = slots_U if is_shared else past.slots_M
    tokens_UL = past.tokens_SL[:, : past.longest].index_select(0, slots_U)
    index_L = torch.arange(tokens_UL.shape[1], device=tokens_UL.device)
    real_UL = index_L < past.known_S.index_select(0, slots_U)[:, None]
    in_prompt_UL = index_L < past.prompt_len_S.index_select(0, slots_U)[:, None]
    weights_UL = torch.where(in_prompt_UL, _PROMPT, 1) * real_UL
    counts = weights_UL.new_zeros(tokens_UL.shape[0], vocab_size)
    # Entries after the known tokens are arbitrary: they are counted at token 0 with weight 0, which does no harm.
    counts.scatter_add_(1, tokens_UL * real_UL, weights_UL)
    if is_shared:
        counts = counts.index_select(0, entry_G)
    if past.extra_ME is not None and past.extra_ME.shape[1]:
        counts.scatter_add_(1, past.extra_ME.clamp(min=0), (past.extra_ME >= 0).long())
    return counts


# Truncation


def truncate(
    logits_MV: torch.Tensor,
    slots_M: torch.Tensor,
    temperature_S: torch.Tensor,
    sampled_S: torch.Tensor,
    log_min_p_S: torch.Tensor,
    top_k_S: torch.Tensor | None = None,
    top_p_S: torch.Tensor | None = None,
    find_nucleus: FindNucleus = nucleus,
) -> Cut:
    rows, vocab = logits_MV.shape
    asks_M = log_min_p_S[slots_M] > -math.inf
    if top_k_S is not None:
        asks_M |= (top_k_S[slots_M] > 0) & (top_k_S[slots_M] < vocab)
    if top_p_S is not None:
        asks_M |= top_p_S[slots_M] < 1
    index_X = _where(asks_M & sampled_S[slots_M])
    slots_X = slots_M[index_X]
    scaled_XV = _scaled(logits_MV, index_X, temperature_S[slots_X])
    peak_X = scaled_XV.amax(-1)
    low_X = peak_X + log_min_p_S[slots_X]
    edge_X, last_X = torch.full_like(low_X, math.inf), torch.full_like(slots_X, vocab - 1)
    if top_k_S is not None:
        top_k_X = top_k_S[slots_X]
        index_G = _where((top_k_X > 0) & (top_k_X < vocab))
        if len(index_G):
            top_k_G = top_k_X[index_G]
            best_GK = _pick(scaled_XV, index_G).topk(int(top_k_G.max()), dim=-1).values
            low_X[index_G] = torch.maximum(low_X[index_G], best_GK.gather(1, top_k_G[:, None] - 1)[:, 0])
    if top_p_S is not None:
        top_p_X = top_p_S[slots_X]
        index_G = _where(top_p_X < 1)
        if len(index_G):
            scaled_GV, low_G1 = _pick(scaled_XV, index_G), low_X[index_G, None]
            if (low_G1 > -math.inf).any():
                scaled_GV.masked_fill_(scaled_GV < low_G1, -math.inf)
            edge_X[index_G], last_X[index_G] = find_nucleus(depths(scaled_GV), top_p_X[index_G])
    found = ((peak_X, 0.0), (low_X, -math.inf), (edge_X, math.inf), (last_X, vocab - 1))
    return Cut(*(each.new_full((rows,), nothing).index_copy_(0, index_X, each) for each, nothing in found))


def keep(scaled_XV: torch.Tensor, cut_X: Cut) -> tuple[torch.Tensor, torch.Tensor]:
    """Set what the cut drops to -inf, in place: (how many tokens of each row are left [X], their ids [X, V / FEW]).

    ids: int64, ascending, then zeros; nothing but zeros in a row with more tokens left than that.
    """
    scaled_XV.masked_fill_(cut_X.drops(scaled_XV), -math.inf)
    left_XV = scaled_XV != -math.inf
    count_X = left_XV.sum(1)
    ids_XK = empty_ids(scaled_XV)
    listed_X = torch.where(count_X <= ids_XK.shape[1], count_X, 0)
    row, id = (left_XV & (listed_X > 0)[:, None]).nonzero().unbind(1)
    ids_XK[row, torch.arange(len(row), device=row.device) - (listed_X.cumsum(0) - listed_X)[row]] = id
    return count_X, ids_XK


def empty_ids(scaled_XV: torch.Tensor) -> torch.Tensor:
    """Zeros in the shape of `keep`'s ids."""
    rows, vocab = scaled_XV.shape
    return torch.zeros(rows, max(1, vocab // FEW), dtype=torch.int64, device=scaled_XV.device)


# Draws


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
    keep: Keep = keep,
) -> torch.Tensor:
    index_X = _where(sampled_S[slots_M])
    if not len(index_X):
        return argmax(logits_MV)
    slots_X = slots_M[index_X]
    scaled_XV = _scaled(logits_MV, index_X, temperature_S[slots_X])
    streams_X = stream[index_X] if isinstance(stream, torch.Tensor) else torch.full_like(index_X, stream)
    keys_4X = torch.stack((seed_S[slots_X], positions_M[index_X], sample_index_S[slots_X], streams_X))
    if cut is not None:
        tokens_X = _noisy_survivors(scaled_XV, *keep(scaled_XV, cut.select(index_X)), keys_4X)
    elif log_min_p_S is not None:
        cut_X = _min_p_cut(scaled_XV, log_min_p_S[slots_X])
        tokens_X = _noisy_survivors(scaled_XV, *keep(scaled_XV, cut_X), keys_4X)
    else:
        tokens_X = _noisy(scaled_XV, keys_4X)
    return tokens_X if len(index_X) == len(slots_M) else argmax(logits_MV).index_copy_(0, index_X, tokens_X)


def _noisy(scaled_XV: torch.Tensor, keys_4X: torch.Tensor) -> torch.Tensor:
    """int64 [X] argmax of scores and noise. keys: seed, position, sample and stream. scaled is overwritten."""
    seed_X, position_X, sample_X, stream_X = keys_4X
    return argmax(scaled_XV.add_(gumbel(seed_X, position_X, sample_X, scaled_XV.shape[1], stream_X)))


def _noisy_survivors(
    scaled_XV: torch.Tensor, count_X: torch.Tensor, ids_XK: torch.Tensor, keys_4X: torch.Tensor
) -> torch.Tensor:
    """The same, after `keep`. Where few tokens are left, only these get noise, which is most of the work."""
    is_few_X = count_X <= ids_XK.shape[1]
    few_G, many_H = _where(is_few_X), _where(~is_few_X)
    tokens_X = torch.empty_like(count_X)
    if len(few_G):
        count_G = count_X[few_G]
        ids_GK = ids_XK[few_G, : int(count_G.max().clamp(min=1))]  # ascending, so the lowest of equals comes first
        seed_G, position_G, sample_G, stream_G = keys_4X[:, few_G]
        scores_GK = gumbel_at(seed_G, position_G, sample_G, ids_GK, stream_G).add_(scaled_XV[few_G[:, None], ids_GK])
        is_padding_GK = torch.arange(ids_GK.shape[1], device=ids_GK.device) >= count_G[:, None]
        chosen_G = argmax(scores_GK.masked_fill_(is_padding_GK, -math.inf))
        tokens_X[few_G] = ids_GK.gather(1, chosen_G[:, None])[:, 0]
    if len(many_H):
        tokens_X[many_H] = _noisy(_pick(scaled_XV, many_H), keys_4X[:, many_H])
    return tokens_X


def draw_weighted(
    logs_MV: torch.Tensor,
    slots_M: torch.Tensor,
    positions_M: torch.Tensor,
    seed_S: torch.Tensor,
    sample_index_S: torch.Tensor,
    stream: int | torch.Tensor,
) -> torch.Tensor:
    return argmax(logs_MV + gumbel(seed_S[slots_M], positions_M, sample_index_S[slots_M], logs_MV.shape[1], stream))


def confidence(logits_MV: torch.Tensor) -> torch.Tensor:
    return (UNIT / masses(depths(logits_MV)).sum(-1).double()).float()


def argmax(logits_MV: torch.Tensor) -> torch.Tensor:
    """The argmax of each row, the lowest id among equals: int64 [M].

    `max` returns the same index as `argmax` and is three times faster on the CPU in bfloat16.
    """
    return logits_MV.max(-1).indices


def _where(flags_M: torch.Tensor) -> torch.Tensor:
    return flags_M.nonzero()[:, 0]


def _pick(rows_MV: torch.Tensor, index_G: torch.Tensor) -> torch.Tensor:
    """These rows; not a copy if they are all of them."""
    return rows_MV if len(index_G) == len(rows_MV) else rows_MV.index_select(0, index_G)


def _min_p_cut(scaled_XV: torch.Tensor, log_min_p_X: torch.Tensor) -> Cut:
    peak_X = scaled_XV.amax(-1)
    last_X = peak_X.new_full(peak_X.shape, scaled_XV.shape[1] - 1, dtype=torch.int64)
    return Cut(peak_X, peak_X + log_min_p_X, torch.full_like(peak_X, math.inf), last_X)


def _scaled(logits_MV: torch.Tensor, index_X: torch.Tensor, temperature_X: torch.Tensor) -> torch.Tensor:
    """[X, V] float32 logits divided by their row's temperature, always a copy."""
    scaled_XV = _pick(logits_MV, index_X)
    return scaled_XV.to(torch.float32, copy=scaled_XV is logits_MV).div_(temperature_X[:, None])
