"""Bad words, logit bias, minimum tokens and penalties on a GPU, without the host: bit-identical to plain_logits.py.

Each edit changes float32 logits in place, only in rows whose slot asks for it, and there only the logits concerned: the
ids of a list in the sampling table, or the tokens of the row's own history. Which rows ask, and how long each history
is, is read on the device. The caller chooses the order: a launch sees what the one before it has written.

Counts. Penalties need to know how often a token occurs in the output, and whether it occurs in the prompt. Programs
share a row's history and count into an integer scratch tensor, where the order of additions does not matter. Then the
first lane that reaches a token takes its count, leaves 0 for the others, and applies it.

Bits. Products and differences are rounded one by one, as in torch: the kernel is compiled without fusing them.

Graphs. The host decides only from shapes and from a bound on the histories: a captured launch stays correct when slots,
positions, parameters and histories change. A list that has grown is another tensor: see `SamplingTable`.

Legend: M rows, V vocabulary, S slots of the tables, L columns of the token table, E extra tokens of a row, P stop ids,
C biases, W bad words, T tokens of all bad words of a slot, B entries or places that a program looks at.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from stridelm.kernels.index_kernel import index_kernel
from stridelm.kernels.step_ops import Asked, Past

BLOCK = tl.constexpr(512)
"""B."""
PROMPT = tl.constexpr(1 << 30)
"""The bit in a token's count that says that it occurs in the prompt; the bits below count its occurrences in the
output."""
NOTHING = tl.constexpr(-1)
"""Returned where a row's output has no token."""


# Device code


@triton.jit
def _asking(slots, features, stride_features, BIT: tl.constexpr):
    """The slot of this program's row; negative if the row does not ask for the feature."""
    slot = tl.load(slots + tl.program_id(0))
    asked = tl.load(features + slot * stride_features, mask=slot >= 0, other=0)
    return tl.where((asked & BIT) != 0, slot, -1)


@triton.jit
def _my_logits(logits, stride_m):
    return logits + tl.program_id(0).to(tl.int64) * stride_m


@triton.jit
def _my_places():
    """[B] the places in a history, or entries of a list, that this program handles. Grids are (M, runs of B)."""
    return tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def _output_token(place, slot, tokens, known, extra, prompt, stride_s, stride_e, columns, width):
    """The output token at this place of the row's history; NOTHING before the output."""
    token = tl.load(tokens + slot * stride_s + tl.minimum(tl.maximum(place, 0), columns - 1))
    if extra is not None:
        beyond = place - tl.load(known + slot)
        own = extra + tl.program_id(0).to(tl.int64) * stride_e
        token = tl.where(beyond >= 0, tl.load(own + tl.minimum(tl.maximum(beyond, 0), width - 1)), token)
    return tl.where(place < prompt, NOTHING, token)


@index_kernel
def forbid_last_tokens(
    logits,
    slots,
    positions,
    features,
    words,
    ends,
    tokens,
    known,
    prompt_len,
    extra,
    stride_m,
    stride_features,
    stride_prompt,
    stride_s,
    stride_e,
    stride_words,
    count,
    columns,
    width,
    BIT: tl.constexpr,
):
    """Set the last token of each word to -inf if the row's output ends with the word's other tokens."""
    slot = _asking(slots, features, stride_features, BIT)
    if slot < 0:
        return
    position = tl.load(positions + tl.program_id(0))
    prompt = tl.load(prompt_len + slot * stride_prompt)
    word_B = _my_places()
    my_ends = ends + slot * count + word_B
    end_B = tl.load(my_ends, mask=word_B < count, other=0)
    start_B = tl.load(my_ends - 1, mask=(word_B > 0) & (word_B < count), other=0)
    hit_B = end_B > 0
    last = words + slot * stride_words + end_B - 1
    length_B = tl.where(hit_B, end_B - start_B, 0)
    for back in range(1, tl.max(length_B)):
        token = _output_token(position - back, slot, tokens, known, extra, prompt, stride_s, stride_e, columns, width)
        inside_B = hit_B & (back < length_B)
        hit_B &= (tl.load(last - back, mask=inside_B, other=0) == token) | (back >= length_B)
    token_B = tl.load(last, mask=hit_B, other=0)
    tl.store(_my_logits(logits, stride_m) + token_B, float("-inf"), mask=hit_B)


@index_kernel
def add_biases(logits, slots, features, ids, bias, stride_m, stride_features, count, BIT: tl.constexpr):
    slot = _asking(slots, features, stride_features, BIT)
    if slot < 0:
        return
    entry_B = _my_places()
    amount_B = tl.load(bias + slot * count + entry_B, mask=entry_B < count, other=0.0)
    # Padding adds 0 to token 0, which may have a bias of its own: two lanes must not write the same logit.
    real_B = amount_B != 0
    token_B = tl.load(ids + slot * count + entry_B, mask=real_B, other=0)
    logit_B = _my_logits(logits, stride_m) + token_B
    tl.store(logit_B, tl.load(logit_B, mask=real_B, other=0.0) + amount_B, mask=real_B)


@index_kernel
def forbid_early_stops(
    logits,
    slots,
    positions,
    features,
    prompt_len,
    min_tokens,
    ids,
    stride_m,
    stride_features,
    stride_prompt,
    stride_min_tokens,
    count,
    BIT: tl.constexpr,
):
    """Set every stop id to -inf while the output is too short."""
    slot = _asking(slots, features, stride_features, BIT)
    if slot < 0:
        return
    written = tl.load(positions + tl.program_id(0)) - tl.load(prompt_len + slot * stride_prompt)
    if written >= tl.load(min_tokens + slot * stride_min_tokens):
        return
    entry_B = _my_places()
    token_B = tl.load(ids + slot * count + entry_B, mask=entry_B < count, other=-1)
    tl.store(_my_logits(logits, stride_m) + token_B, float("-inf"), mask=token_B >= 0)


@triton.jit
def _history(slot, tokens, known, extra, prompt, repetition, stride_s, stride_e, width, vocab):
    """([B] tokens of the row's history at this program's places, which count for a penalty, which are prompt)"""
    place_B = _my_places()
    length = tl.load(known + slot)
    token_B = tl.load(tokens + slot * stride_s + place_B, mask=place_B < length, other=-1)
    if extra is not None:
        beyond_B = place_B - length
        drafted_B = (beyond_B >= 0) & (beyond_B < width)
        own = extra + tl.program_id(0).to(tl.int64) * stride_e
        token_B = tl.where(drafted_B, tl.load(own + beyond_B, mask=drafted_B, other=-1), token_B)
    # A repetition penalty of 1 changes nothing, and the others only look at the output.
    counts_B = place_B >= tl.where(repetition == 1.0, prompt, 0)
    # The path of a draft row that is not live may hold arbitrary ids.
    return token_B, counts_B & (token_B >= 0) & (token_B < vocab), place_B < prompt


@index_kernel
def count_tokens(
    counts,
    slots,
    features,
    tokens,
    known,
    prompt_len,
    extra,
    repetition,
    stride_features,
    stride_prompt,
    stride_s,
    stride_e,
    stride_repetition,
    width,
    vocab,
    BIT: tl.constexpr,
):
    """Count each row's tokens into counts [M, V] int32, initially zero."""
    slot = _asking(slots, features, stride_features, BIT)
    if slot < 0:
        return
    prompt = tl.load(prompt_len + slot * stride_prompt)
    strength = tl.load(repetition + slot * stride_repetition)
    token_B, counts_B, prompt_B = _history(
        slot, tokens, known, extra, prompt, strength, stride_s, stride_e, width, vocab
    )
    count_B = _my_logits(counts, vocab) + token_B
    tl.atomic_or(count_B, PROMPT, mask=counts_B & prompt_B, sem="relaxed")
    tl.atomic_add(count_B, 1, mask=counts_B & ~prompt_B, sem="relaxed")


@index_kernel
def apply_counts(
    logits,
    counts,
    slots,
    features,
    tokens,
    known,
    prompt_len,
    extra,
    repetition,
    presence,
    frequency,
    stride_m,
    stride_features,
    stride_prompt,
    stride_s,
    stride_e,
    stride_penalties,
    width,
    vocab,
    BIT: tl.constexpr,
):
    """Apply the penalties of every token that was counted. Leaves the counts 0."""
    slot = _asking(slots, features, stride_features, BIT)
    if slot < 0:
        return
    prompt = tl.load(prompt_len + slot * stride_prompt)
    strength = tl.load(repetition + slot * stride_penalties)
    token_B, counts_B, _ = _history(slot, tokens, known, extra, prompt, strength, stride_s, stride_e, width, vocab)
    count_B = tl.atomic_xchg(_my_logits(counts, vocab) + token_B, 0, mask=counts_B, sem="relaxed")
    mine_B = counts_B & (count_B != 0)
    output_B = (count_B & (PROMPT - 1)).to(tl.float32)
    at_B = _my_logits(logits, stride_m) + token_B
    logit_B = tl.load(at_B, mask=mine_B, other=0.0)
    logit_B = tl.where(logit_B > 0, tl.div_rn(logit_B, strength), logit_B * strength)
    logit_B -= output_B * tl.load(frequency + slot * stride_penalties)
    logit_B -= tl.minimum(output_B, 1.0) * tl.load(presence + slot * stride_penalties)
    tl.store(at_B, logit_B, mask=mine_B)


# Host code


def forbid_words(
    logits_MV: torch.Tensor, past: Past, asked: Asked, words_ST: torch.Tensor, ends_SW: torch.Tensor
) -> None:
    assert words_ST.is_contiguous() and ends_SW.is_contiguous()
    extra, stride_e, width = _extra_of(past)
    forbid_last_tokens[_grid(logits_MV, past, ends_SW.shape[1])](
        logits_MV,
        past.slots_M,
        past.positions_M,
        asked.features_S,
        words_ST,
        ends_SW,
        past.tokens_SL,
        past.known_S,
        past.prompt_len_S,
        extra,
        logits_MV.stride(0),
        asked.features_S.stride(0),
        past.prompt_len_S.stride(0),
        past.tokens_SL.stride(0),
        stride_e,
        words_ST.shape[1],
        ends_SW.shape[1],
        past.tokens_SL.shape[1],
        width,
        BIT=asked.bit,
    )


def add_bias(logits_MV: torch.Tensor, past: Past, asked: Asked, ids_SC: torch.Tensor, bias_SC: torch.Tensor) -> None:
    assert ids_SC.shape == bias_SC.shape and ids_SC.is_contiguous() and bias_SC.is_contiguous()
    count = ids_SC.shape[1]
    add_biases[_grid(logits_MV, past, count)](
        logits_MV,
        past.slots_M,
        asked.features_S,
        ids_SC,
        bias_SC,
        logits_MV.stride(0),
        asked.features_S.stride(0),
        count,
        BIT=asked.bit,
    )


def forbid_stops(
    logits_MV: torch.Tensor, past: Past, asked: Asked, min_tokens_S: torch.Tensor, ids_SP: torch.Tensor
) -> None:
    assert ids_SP.is_contiguous()
    count = ids_SP.shape[1]
    forbid_early_stops[_grid(logits_MV, past, count)](
        logits_MV,
        past.slots_M,
        past.positions_M,
        asked.features_S,
        past.prompt_len_S,
        min_tokens_S,
        ids_SP,
        logits_MV.stride(0),
        asked.features_S.stride(0),
        past.prompt_len_S.stride(0),
        min_tokens_S.stride(0),
        count,
        BIT=asked.bit,
    )


def penalise(
    logits_MV: torch.Tensor,
    past: Past,
    asked: Asked,
    repetition_S: torch.Tensor,
    presence_S: torch.Tensor,
    frequency_S: torch.Tensor,
) -> None:
    strides = {column.stride(0) for column in (repetition_S, presence_S, frequency_S)}
    assert len(strides) == 1
    rows, vocab = logits_MV.shape
    extra, stride_e, width = _extra_of(past)
    grid = _grid(logits_MV, past, past.longest + width)
    counts_MV = torch.zeros(rows, vocab, dtype=torch.int32, device=logits_MV.device)
    history = (past.slots_M, asked.features_S, past.tokens_SL, past.known_S, past.prompt_len_S, extra, repetition_S)
    strides_of = (asked.features_S.stride(0), past.prompt_len_S.stride(0), past.tokens_SL.stride(0), stride_e, *strides)
    count_tokens[grid](counts_MV, *history, *strides_of, width, vocab, BIT=asked.bit)
    apply_counts[grid](
        logits_MV,
        counts_MV,
        *history,
        presence_S,
        frequency_S,
        logits_MV.stride(0),
        *strides_of,
        width,
        vocab,
        BIT=asked.bit,
        enable_fp_fusion=False,
    )


def _grid(logits_MV: torch.Tensor, past: Past, places: int) -> tuple[int, int]:
    assert logits_MV.dtype == torch.float32 and logits_MV.stride(1) == 1
    assert past.slots_M.is_contiguous() and past.positions_M.is_contiguous() and past.known_S.is_contiguous()
    assert past.tokens_SL.stride(1) == 1 and (past.extra_ME is None or past.extra_ME.stride(1) == 1)
    return logits_MV.shape[0], triton.cdiv(places, BLOCK.value)


def _extra_of(past: Past) -> tuple[torch.Tensor | None, int, int]:
    """(extra tokens or None, stride of a row, E)"""
    if past.extra_ME is None or not past.extra_ME.shape[1]:
        return None, 0, 0
    return past.extra_ME, past.extra_ME.stride(0), past.extra_ME.shape[1]
