"""What a request's parameters do to the logits of a row, exactly, with that row's own history.

Order and meaning are vLLM's: grammar, bad words, logit bias, minimum tokens, penalties, temperature, min-p, top-k,
top-p. Nothing is remembered between steps: a history is read afresh from the token table, so a rejected
draft, a preemption or another order of steps cannot leave anything behind.

Each processor changes float32 logits in place, and must be given only rows whose request asked for it. A row
left with nothing but -inf stays so, and draws token 0, the lowest id. Known tokens must be in the vocabulary.

Legend: G rows given, V vocabulary, S slots, U distinct slots, L columns of the token table, E extra tokens a
row, P stop ids, C biases, B bad words, T tokens of a bad word's prefix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from stridelm.faults import on_behalf_of
from stridelm.kernels.mass import depths, nucleus
from stridelm.sample.grammar import Guide, allowed
from stridelm.sample.grammar_watch import WATCH
from stridelm.sample.groups import Part
from stridelm.sample.table import Feature, SamplingTable
from stridelm.upload import upload

_PROMPT = 1 << 32
"""What a prompt token adds to a count, so that one pass counts prompt and output apart."""
_NOTHING = -1
"""Stands where a row's output has no token."""


class TokenHistory(Protocol):
    """The tokens of the running requests, on the device."""

    tokens: torch.Tensor
    """[S, L] int64: prompt, then output."""
    known: torch.Tensor
    """[S] int64: how many of them are real."""


@dataclass(slots=True)
class Rows:
    """From whose logits a token is to be drawn, and after which history.

    The history of row m is `tokens[slots[m], :known]`, then the entries of `extra[m]` that are not -1.
    """

    slots: torch.Tensor
    """[M] int64: the row's request in the tables."""
    positions: torch.Tensor
    """[M] int64: absolute position of the token to be drawn, which is the length of the row's history."""
    extra: torch.Tensor | None = None
    """[M, E] int64: tokens behind the known ones that lead to this row (candidate ancestors, or tokens drawn
    earlier in a trusted window), in order, padded at the end with -1."""
    longest: int | None = None
    """What the host knows `known` not to exceed in these slots: spares reading the token table beyond it."""

    def select(self, index: torch.Tensor | None) -> Rows:
        """These rows only; None: all."""
        if index is None:
            return self
        extra = None if self.extra is None else self.extra.index_select(0, index)
        return Rows(self.slots.index_select(0, index), self.positions.index_select(0, index), extra, self.longest)


def check_rows(rows: Rows, history: TokenHistory) -> None:
    """Assert that positions, known lengths and extras agree. Reads the device: for strict mode and tests."""
    known_M = history.known[rows.slots]
    real_M = torch.zeros_like(known_M)
    if rows.extra is not None:
        live_ME = rows.extra >= 0
        real_M = live_ME.sum(1)
        assert bool((live_ME.long().diff(dim=1) <= 0).all()), "extra tokens are not padded at the end"
    assert torch.equal(rows.positions - known_M, real_M), "a row's position is not the length of its history"
    assert rows.longest is None or bool((known_M <= rows.longest).all()), "a history is longer than `longest`"


def grammar(logits_GV: torch.Tensor, rows: Rows, part: Part, table: SamplingTable, history: TokenHistory) -> None:
    """Forbid what the requests' grammars do not let stand behind the rows' outputs."""
    mask_by_grammar(logits_GV, rows, part.guides, history)


def mask_by_grammar(logits_GV: torch.Tensor, rows: Rows, guides: Sequence[Guide | None], history: TokenHistory) -> None:
    """The same for rows some of which may have no grammar. Matchers run on the host, so it waits for the device."""
    known, positions = history.known[rows.slots].tolist(), rows.positions.tolist()
    extra = [[]] * len(known) if rows.extra is None else rows.extra.tolist()
    asked: dict[int, tuple[Guide, list[int]]] = {}
    for row, guide in enumerate(guides):
        path = [token for token in extra[row] if token >= 0]
        # A drafter may look further than it has tokens to show: what may stand there nobody can say.
        if guide is None or known[row] + len(path) != positions[row]:
            continue
        with on_behalf_of(guide.request):
            guide.catch_up()
            if guide.read < known[row]:  # drawn, and not emitted yet
                path = history.tokens[rows.slots[row], guide.read : known[row]].tolist() + path
        asked[row] = guide, path
    masks = {row: mask for row, mask in zip(asked, WATCH.masks(list(asked.values()))) if mask is not None}
    if not masks:
        return
    masks_GW = torch.stack(list(masks.values())).to(logits_GV.device)
    forbidden_GV = ~allowed(masks_GW, logits_GV.shape[1])
    index = upload(list(masks), logits_GV.device)
    logits_GV.index_copy_(0, index, logits_GV.index_select(0, index).masked_fill_(forbidden_GV, -math.inf))


def bad_words(logits_GV: torch.Tensor, rows: Rows, part: Part, table: SamplingTable, history: TokenHistory) -> None:
    """Forbid the last token of a bad word where the tokens before it end the row's output so far.

    As in vLLM a match lies within the output: a prompt ending in a bad word's start forbids nothing.
    """
    token_GL = table.bad_tokens.index_select(0, rows.slots)
    end_GB = table.bad_ends.index_select(0, rows.slots)
    last_GB = (end_GB - 1).clamp(min=0)
    hit_GB = end_GB > 0
    if table.longest_bad_word > 1:
        # Of each entry, how far before its word's last token it stands. Those behind the last word belong to none.
        entry_L = torch.arange(token_GL.shape[1], device=token_GL.device)
        rising_GB = torch.where(hit_GB, end_GB, token_GL.shape[1])
        word_GL = torch.searchsorted(rising_GB, entry_L.expand_as(token_GL).contiguous(), right=True)
        back_GL = last_GB.gather(1, word_GL.clamp(max=end_GB.shape[1] - 1)) - entry_L
        tail_GT = _output_tail(rows, table.longest_bad_word - 1, table, history)
        near_GL = (back_GL - 1).clamp(0, tail_GT.shape[1] - 1)
        # A word is there if none of its entries differs: as many differ up to its end as up to its beginning.
        differs_GL = (back_GL > 0) & (tail_GT.gather(1, near_GL) != token_GL)
        upto_GL = torch.nn.functional.pad(differs_GL.cumsum(1), (1, 0))
        start_GB = torch.nn.functional.pad(end_GB[:, :-1], (1, 0))
        hit_GB = hit_GB & (upto_GL.gather(1, end_GB) == upto_GL.gather(1, start_GB))
    _forbid(logits_GV, token_GL.gather(1, last_GB), hit_GB)


def logit_bias(logits_GV: torch.Tensor, rows: Rows, part: Part, table: SamplingTable, history: TokenHistory) -> None:
    """Add each request's biases to its tokens."""
    logits_GV.scatter_add_(1, table.bias_ids.index_select(0, rows.slots), table.bias.index_select(0, rows.slots))


def min_tokens(logits_GV: torch.Tensor, rows: Rows, part: Part, table: SamplingTable, history: TokenHistory) -> None:
    """Forbid every stop id while the output is shorter than min_tokens."""
    stop_GP = table.stop_ids.index_select(0, rows.slots)
    written_G1 = rows.positions[:, None] - _column(table.prompt_len, rows)
    _forbid(logits_GV, stop_GP, (stop_GP >= 0) & (written_G1 < _column(table.min_tokens, rows)))


def penalties(logits_GV: torch.Tensor, rows: Rows, part: Part, table: SamplingTable, history: TokenHistory) -> None:
    """Repetition over prompt and output (arXiv 1909.05858); presence and frequency over the output only."""
    counts_GV = _counts(logits_GV.shape[1], rows, part, table, history)
    repetition_G1 = _column(table.repetition, rows)
    frequency_G1 = _column(table.frequency, rows)
    presence_G1 = _column(table.presence, rows)
    output_GV = (counts_GV & (_PROMPT - 1)).float()
    repeated_GV = torch.where(logits_GV > 0, logits_GV / repetition_G1, logits_GV * repetition_G1)
    torch.where(counts_GV > 0, repeated_GV, logits_GV, out=logits_GV)
    logits_GV.sub_(output_GV * frequency_G1).sub_(output_GV.clamp_(max=1.0).mul_(presence_G1))


def temperature(logits_GV: torch.Tensor, rows: Rows, part: Part, table: SamplingTable, history: TokenHistory) -> None:
    """Divide by the temperature."""
    logits_GV.div_(_column(table.temperature, rows))


def min_p(logits_GV: torch.Tensor, rows: Rows, part: Part, table: SamplingTable, history: TokenHistory) -> None:
    """Drop tokens less likely than min_p times the likeliest."""
    least_G1 = logits_GV.amax(-1, keepdim=True).add_(_column(table.log_min_p, rows))
    logits_GV.masked_fill_(logits_GV < least_G1, -math.inf)


def top_k(logits_GV: torch.Tensor, rows: Rows, part: Part, table: SamplingTable, history: TokenHistory) -> None:
    """Keep the k likeliest tokens and all that tie with the last of them."""
    best_GK = logits_GV.topk(part.max_top_k, dim=-1).values
    least_G1 = best_GK.gather(1, _column(table.top_k, rows) - 1)
    logits_GV.masked_fill_(logits_GV < least_G1, -math.inf)


def top_p(logits_GV: torch.Tensor, rows: Rows, part: Part, table: SamplingTable, history: TokenHistory) -> None:
    """Keep the likeliest tokens, lowest id first among equals, until those kept hold top_p of the mass."""
    kept_GV = nucleus(depths(logits_GV), _column(table.top_p, rows))
    logits_GV.masked_fill_(~kept_GV, -math.inf)


Processor = Callable[[torch.Tensor, Rows, Part, SamplingTable, TokenHistory], None]

PIPELINE: dict[Feature, Processor] = {
    Feature.GRAMMAR: grammar,
    Feature.BAD_WORDS: bad_words,
    Feature.BIAS: logit_bias,
    Feature.MIN_TOKENS: min_tokens,
    Feature.PENALTIES: penalties,
    Feature.SAMPLED: temperature,
    Feature.MIN_P: min_p,
    Feature.TOP_K: top_k,
    Feature.TOP_P: top_p,
}
"""Each feature's processor, in order of application."""


def _column(values_S: torch.Tensor, rows: Rows) -> torch.Tensor:
    """[G, 1]: each row's own value."""
    return values_S.index_select(0, rows.slots)[:, None]


def _forbid(logits_GV: torch.Tensor, ids_GN: torch.Tensor, hit_GN: torch.Tensor) -> None:
    """Set the ids that are hit to -inf. Adding, not storing: an id may stand in a row both hit and not."""
    penalty_GN = torch.zeros(ids_GN.shape, dtype=logits_GV.dtype, device=logits_GV.device)
    logits_GV.scatter_add_(1, ids_GN.clamp(min=0), penalty_GN.masked_fill_(hit_GN, -math.inf))


def _output_tail(rows: Rows, length: int, table: SamplingTable, history: TokenHistory) -> torch.Tensor:
    """[G, T] int64: the last `length` output tokens, the last first; _NOTHING where there are fewer."""
    index_GT = rows.positions[:, None] - 1 - torch.arange(length, device=rows.slots.device)
    tail_GT = history.tokens[rows.slots[:, None], index_GT.clamp(0, history.tokens.shape[1] - 1)]
    if rows.extra is not None and rows.extra.shape[1]:
        beyond_GT = index_GT - _column(history.known, rows)
        drafted_GT = rows.extra.gather(1, beyond_GT.clamp(0, rows.extra.shape[1] - 1))
        tail_GT = torch.where(beyond_GT >= 0, drafted_GT, tail_GT)
    return tail_GT.masked_fill_(index_GT < _column(table.prompt_len, rows), _NOTHING)


def _counts(vocab_size: int, rows: Rows, part: Part, table: SamplingTable, history: TokenHistory) -> torch.Tensor:
    """[G, V] int64: how often each token stands in the row's output, plus _PROMPT for each in its prompt."""
    assert part.slots_U is not None
    tokens_UL = history.tokens[:, : rows.longest].index_select(0, part.slots_U)
    index_L = torch.arange(tokens_UL.shape[1], device=tokens_UL.device)
    known_U1 = history.known.index_select(0, part.slots_U)[:, None]
    prompt_U1 = table.prompt_len.index_select(0, part.slots_U)[:, None]
    real_UL = index_L < known_U1
    weights_UL = torch.where(index_L < prompt_U1, _PROMPT, 1) * real_UL
    counts = weights_UL.new_zeros(tokens_UL.shape[0], vocab_size)
    # What stands behind the known tokens may be anything; at token 0 with weight 0 it does no harm.
    counts.scatter_add_(1, tokens_UL * real_UL, weights_UL)
    if part.slot_of_G is not None:
        counts = counts.index_select(0, part.slot_of_G)
    if rows.extra is not None and rows.extra.shape[1]:
        counts.scatter_add_(1, rows.extra.clamp(min=0), (rows.extra >= 0).long())
    return counts
