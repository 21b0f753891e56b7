"""From raw logits to tokens: the one place where a token is chosen.

A row's token is a function of that row's logits and history, its request's parameters and seed, and the
position: `argmax(processed logits + noise)`, the lowest id among equals. Which other rows share the call
changes nothing.

Legend: M rows of the call, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from stridelm.grammar.masks import mask_by_grammar
from stridelm.kernels import step_ops_for
from stridelm.kernels.noise import gumbel
from stridelm.kernels.plain_logits import argmax
from stridelm.kernels.step_ops import Asked, Cut, Past, StepOps
from stridelm.sample.rows import Rows, TokenHistory
from stridelm.sample.table import Feature, SamplingTable

_NOTHING = Feature(0)


class Sampler:
    """Draws tokens for rows of requests whose parameters are in `table` and whose tokens are in `history`. The host
    knows only which features occur in a call; which rows need them is read from the tables on the device."""

    def __init__(
        self, table: SamplingTable, history: TokenHistory, ops: StepOps | None = None, *, grammars: bool = True
    ) -> None:
        """grammars: whether to obey them. Guesses need not, and must not where the host would wait for the device."""
        self.table = table
        self.history = history
        self.ops = ops or step_ops_for(table.device)
        self._features = Feature.ALL if grammars else Feature.ALL & ~Feature.GRAMMAR

    def draw(
        self, logits_MV: torch.Tensor, rows: Rows, row_slots: Sequence[int], stream: int | torch.Tensor = 0
    ) -> torch.Tensor:
        """The rows' tokens [M] int64; the logits are not changed.

        row_slots: `rows.slots` on the host. Plain greedy rows take the argmax of the raw logits, in the precision they
        come in. stream: one number, or int64 [M]; see kernels/noise.py.
        """
        table, wanted = self.table, self._wanted(row_slots)
        if not wanted and not logits_MV.is_cuda:  # a GPU's kernel looks that up itself
            return argmax(logits_MV)
        # Rows without edits draw the same token from the float32 copy: everything is computed in float32 anyway, and a
        # 16-bit logit is exact in it.
        logits_MV = self._edited(logits_MV, rows, row_slots, wanted)
        return self.ops.draw(
            logits_MV,
            rows.slots,
            rows.positions,
            table.temperature,
            table.seed,
            table.sample_index,
            table.sampled,
            table.log_min_p if wanted & Feature.MIN_P else None,
            stream,
            self._cut(logits_MV, rows) if wanted & (Feature.TOP_K | Feature.TOP_P) else None,
        )

    def processed(self, logits_MV: torch.Tensor, rows: Rows, row_slots: Sequence[int]) -> torch.Tensor:
        """float32 [M, V] logits, from whose softmax the sampled rows are drawn.

        For greedy rows, temperature and truncation are not applied: their token is the argmax.
        """
        wanted = self._wanted(row_slots)
        logits_MV = self._edited(logits_MV, rows, row_slots, wanted)
        # A greedy slot's temperature is 1.
        scaled_MV = logits_MV.float() / self.table.temperature[rows.slots][:, None]
        if wanted & Feature.TRUNCATED:
            scaled_MV.masked_fill_(self._cut(logits_MV, rows).drops(scaled_MV), -math.inf)
        return scaled_MV

    def argmax(self, logits_MV: torch.Tensor, rows: Rows, row_slots: Sequence[int]) -> torch.Tensor:
        """int64 [M] the token that each row draws without noise: a valid id, for padding too."""
        # The argmax is the same at any temperature, and truncation never removes it.
        return argmax(self._edited(logits_MV, rows, row_slots, self._wanted(row_slots)))

    def probabilities(self, logits_MV: torch.Tensor, rows: Rows, row_slots: Sequence[int]) -> torch.Tensor:
        """float32 [M, V] probabilities with which each row's token is drawn. A greedy row has 1 at its argmax; a row
        of nothing but -inf has nan."""
        scores_MV = self.processed(logits_MV, rows, row_slots)
        certain_MV = torch.zeros_like(scores_MV).scatter_(1, argmax(scores_MV)[:, None], 1.0)
        if not self._wanted(row_slots) & Feature.SAMPLED:
            return certain_MV
        return torch.where(self.table.sampled[rows.slots][:, None], scores_MV.softmax(-1), certain_MV)

    def log_probs(
        self, logits_MV: torch.Tensor, rows: Rows, row_slots: Sequence[int], *, noisy: bool = True
    ) -> torch.Tensor:
        """float32 [M, V] log-probabilities of the token each row draws. If noisy, the position's noise is added to the
        logits first: it is known when drafting, while the target's logits are only approximated."""
        scores_MV = self.processed(logits_MV, rows, row_slots)
        if noisy and self._wanted(row_slots) & Feature.SAMPLED:
            table, slots = self.table, rows.slots
            noise_MV = gumbel(table.seed[slots], rows.positions, table.sample_index[slots], scores_MV.shape[1])
            scores_MV = scores_MV + torch.where(table.sampled[slots][:, None], noise_MV, 0.0)
        return scores_MV.log_softmax(-1)

    def _wanted(self, row_slots: Sequence[int]) -> Feature:
        """All features that any of the rows needs."""
        wanted = _NOTHING
        for features in {self.table.features(slot) for slot in row_slots}:
            wanted |= features
        return wanted & self._features if wanted else wanted

    def _cut(self, logits_MV: torch.Tensor, rows: Rows) -> Cut:
        """Where min-p, top-k and top-p cut each row."""
        # All three, whatever the rows ask for: a kernel for each combination would be compiled while a request waits.
        table = self.table
        return self.ops.truncate(
            logits_MV, rows.slots, table.temperature, table.sampled, table.log_min_p, table.top_k, table.top_p
        )

    def _edited(self, logits_MV: torch.Tensor, rows: Rows, row_slots: Sequence[int], wanted: Feature) -> torch.Tensor:
        """float32 [M, V]: a copy of the logits with the wanted edits (Feature.EDITED); the logits themselves if there
        are none.

        Order and meaning are vLLM's: grammar, bad words, logit bias, minimum tokens, penalties; then temperature,
        min-p, top-k, top-p.
        """
        if not wanted & Feature.EDITED:
            return logits_MV
        table, history, ops = self.table, self.history, self.ops
        tokens, longest = history.tokens, history.tokens.shape[1]
        if rows.longest is not None:
            longest = min(rows.longest, longest)
        past = Past(rows.slots, rows.positions, rows.extra, tokens, history.known, table.prompt_len, longest)
        edited_MV = logits_MV.to(torch.float32, copy=True, memory_format=torch.contiguous_format)

        def asked(feature: Feature) -> Asked:
            return Asked(table.needs, feature.value)

        if Feature.GRAMMAR in wanted:
            mask_by_grammar(edited_MV, rows, [table.guide(slot) for slot in row_slots], history)
        if Feature.BAD_WORDS in wanted:
            ops.forbid_words(edited_MV, past, asked(Feature.BAD_WORDS), table.bad_tokens, table.bad_ends)
        if Feature.BIAS in wanted:
            ops.add_bias(edited_MV, past, asked(Feature.BIAS), table.bias_ids, table.bias)
        if Feature.MIN_TOKENS in wanted:
            ops.forbid_stops(edited_MV, past, asked(Feature.MIN_TOKENS), table.min_tokens, table.stop_ids)
        if Feature.PENALTIES in wanted:
            penalties = (table.repetition, table.presence, table.frequency)
            ops.penalise(edited_MV, past, asked(Feature.PENALTIES), *penalties)
        return edited_MV
