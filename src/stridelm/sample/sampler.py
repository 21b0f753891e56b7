"""From raw logits to tokens: the one place where a token is chosen.

A row's token is a function of that row's logits and history, its request's parameters and seed, and the
position: `argmax(processed logits + noise)`, the lowest id among equals. Which other rows share the call
changes nothing.

Legend: M rows of the call, X rows among them that need more than a raw argmax, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from stridelm.kernels.mass import UNIT, depths, masses
from stridelm.kernels.noise import gumbel
from stridelm.sample.groups import Groups, group
from stridelm.sample.processors import PIPELINE, Rows, TokenHistory, mask_by_grammar
from stridelm.sample.table import Feature, SamplingTable

if TYPE_CHECKING:
    from stridelm.kernels.truncate import Cut


class Sampler:
    """Draws tokens for rows of requests whose parameters are in `table` and whose tokens are in `history`."""

    def __init__(self, table: SamplingTable, history: TokenHistory) -> None:
        self.table = table
        self.history = history
        self._remembered: tuple[list[int], int, Groups] | None = None

    def draw(
        self, logits_MV: torch.Tensor, rows: Rows, row_slots: Sequence[int], stream: int | torch.Tensor = 0
    ) -> torch.Tensor:
        """The rows' tokens [M] int64; the logits stay untouched.

        row_slots: `rows.slots` as the host knows them. Rows that are plain greedy take the argmax of the raw
        logits in whatever precision they come. stream: one number, or int64 [M]; see kernels/noise.py.
        """
        if logits_MV.is_cuda:
            return self._draw_by_kernels(logits_MV, rows, row_slots, stream)
        return self.sample_reference(logits_MV, rows, row_slots, stream)

    def sample_reference(
        self, logits_MV: torch.Tensor, rows: Rows, row_slots: Sequence[int], stream: int | torch.Tensor = 0
    ) -> torch.Tensor:
        """`draw` on a CPU, and its meaning anywhere: rows are grouped on the host by what they need."""
        groups = self._groups(row_slots)
        if not groups.count:
            return likeliest(logits_MV)
        rows_X = rows.select(groups.special_X)
        logits_XV = self._process(logits_MV, rows_X, groups)
        self._add_noise(logits_XV, rows_X, groups, _pick(stream, groups.special_X))
        tokens_X = likeliest(logits_XV)
        if groups.special_X is None:
            return tokens_X
        return likeliest(logits_MV).index_copy_(0, groups.special_X, tokens_X)

    def _draw_by_kernels(
        self, logits_MV: torch.Tensor, rows: Rows, row_slots: Sequence[int], stream: int | torch.Tensor = 0
    ) -> torch.Tensor:
        """`draw` on a GPU: a few launches that read no host tensor. The host says only which features occur at all."""
        from stridelm.kernels.draw import draw

        table = self.table
        wanted = self._wanted(row_slots)
        if wanted & Feature.EDITED:
            # The others are drawn from the copy too, and draw the same: the kernels compute in float32 whatever they
            # read, and a 16-bit logit is the same number there.
            logits_MV = self._edited(logits_MV, rows, row_slots, wanted)
        log_min_p = table.log_min_p if wanted & Feature.MIN_P else None
        cut = self._cut(logits_MV, rows, wanted) if wanted & (Feature.TOP_K | Feature.TOP_P) else None
        return draw(
            logits_MV,
            rows.slots,
            rows.positions,
            table.temperature,
            table.seed,
            table.sample_index,
            table.sampled,
            log_min_p,
            stream,
            cut,
        )

    def _wanted(self, row_slots: Sequence[int]) -> Feature:
        """What any of the rows needs."""
        wanted = Feature(0)
        for slot in set(row_slots):
            wanted |= self.table.features(slot)
        return wanted

    def _cut(self, logits_MV: torch.Tensor, rows: Rows, wanted: Feature) -> Cut:
        """Where min-p, top-k and top-p cut each row, by kernels."""
        from stridelm.kernels.truncate import truncate

        table = self.table
        top_k = table.top_k if wanted & Feature.TOP_K else None
        top_p = table.top_p if wanted & Feature.TOP_P else None
        return truncate(logits_MV, rows.slots, table.temperature, table.sampled, table.log_min_p, top_k, top_p)

    def _edited(self, logits_MV: torch.Tensor, rows: Rows, row_slots: Sequence[int], wanted: Feature) -> torch.Tensor:
        """float32 [M, V]: a copy of the logits, and in it, by kernels in PIPELINE's order, what is wanted of EDITED."""
        from stridelm.kernels import edit

        table, history = self.table, self.history
        tokens, longest = history.tokens, history.tokens.shape[1]
        if rows.longest is not None:
            longest = min(rows.longest, longest)
        past = edit.Past(rows.slots, rows.positions, rows.extra, tokens, history.known, table.prompt_len, longest)
        edited_MV = logits_MV.to(torch.float32, copy=True, memory_format=torch.contiguous_format)

        def asked(feature: Feature) -> edit.Asked:
            return edit.Asked(table.needs, feature.value)

        if Feature.GRAMMAR in wanted:
            mask_by_grammar(edited_MV, rows, [table.guide(slot) for slot in row_slots], history)
        if Feature.BAD_WORDS in wanted:
            edit.forbid_words(edited_MV, past, asked(Feature.BAD_WORDS), table.bad_tokens, table.bad_ends)
        if Feature.BIAS in wanted:
            edit.add_bias(edited_MV, past, asked(Feature.BIAS), table.bias_ids, table.bias)
        if Feature.MIN_TOKENS in wanted:
            edit.forbid_stops(edited_MV, past, asked(Feature.MIN_TOKENS), table.min_tokens, table.stop_ids)
        if Feature.PENALTIES in wanted:
            penalties = (table.repetition, table.presence, table.frequency)
            edit.penalise(edited_MV, past, asked(Feature.PENALTIES), *penalties)
        return edited_MV

    def processed(self, logits_MV: torch.Tensor, rows: Rows, row_slots: Sequence[int]) -> torch.Tensor:
        """float32 [M, V] whose softmax the sampled rows are drawn from.

        Greedy rows have all but temperature and truncation applied: their token is the argmax.
        """
        groups = self._groups(row_slots)
        if not groups.count:
            return logits_MV.to(torch.float32, copy=True)
        logits_XV = self._process(logits_MV, rows.select(groups.special_X), groups)
        if groups.special_X is None:
            return logits_XV
        return logits_MV.to(torch.float32, copy=True).index_copy_(0, groups.special_X, logits_XV)

    def likeliest(self, logits_MV: torch.Tensor, rows: Rows, row_slots: Sequence[int]) -> torch.Tensor:
        """int64 [M] what each row draws if there is no noise: a valid id, for padding too."""
        if not logits_MV.is_cuda:
            return likeliest(self.processed(logits_MV, rows, row_slots))
        # The likeliest is so at any temperature, and is never cut off.
        wanted = self._wanted(row_slots)
        return likeliest(self._edited(logits_MV, rows, row_slots, wanted) if wanted & Feature.EDITED else logits_MV)

    def probabilities(self, logits_MV: torch.Tensor, rows: Rows, row_slots: Sequence[int]) -> torch.Tensor:
        """float32 [M, V] with which each row's token is drawn. A greedy row is certain of its argmax; a row left with
        nothing but -inf has nan."""
        by_kernels = logits_MV.is_cuda
        scores_MV = (self._processed_by_kernels if by_kernels else self.processed)(logits_MV, rows, row_slots)
        certain_MV = torch.zeros_like(scores_MV).scatter_(1, likeliest(scores_MV)[:, None], 1.0)
        if not self._wanted(row_slots) & Feature.SAMPLED:
            return certain_MV
        return torch.where(self.table.sampled[rows.slots][:, None], scores_MV.softmax(-1), certain_MV)

    def log_probs(
        self, logits_MV: torch.Tensor, rows: Rows, row_slots: Sequence[int], *, noisy: bool = True
    ) -> torch.Tensor:
        """float32 [M, V] log-probabilities of what each row draws; if noisy, to one who knows the noise that it will be
        drawn with but has the logits from hearsay."""
        scores_MV = (self._processed_by_kernels if logits_MV.is_cuda else self.processed)(logits_MV, rows, row_slots)
        if noisy and self._wanted(row_slots) & Feature.SAMPLED:
            table, slots = self.table, rows.slots
            noise_MV = gumbel(table.seed[slots], rows.positions, table.sample_index[slots], scores_MV.shape[1])
            scores_MV = scores_MV + torch.where(table.sampled[slots][:, None], noise_MV, 0.0)
        return scores_MV.log_softmax(-1)

    def _processed_by_kernels(self, logits_MV: torch.Tensor, rows: Rows, row_slots: Sequence[int]) -> torch.Tensor:
        """`processed` on a GPU, from the device's tables as `_draw_by_kernels` is."""
        wanted = self._wanted(row_slots)
        if wanted & Feature.EDITED:
            logits_MV = self._edited(logits_MV, rows, row_slots, wanted)
        # A greedy slot's temperature is 1.
        scaled_MV = logits_MV.float() / self.table.temperature[rows.slots][:, None]
        if wanted & (Feature.MIN_P | Feature.TOP_K | Feature.TOP_P):
            scaled_MV.masked_fill_(self._cut(logits_MV, rows, wanted).drops(scaled_MV), -math.inf)
        return scaled_MV

    def _groups(self, row_slots: Sequence[int]) -> Groups:
        """Decode steps ask for the same rows again and again; the last answer is kept."""
        slots, version = list(row_slots), self.table.version
        if self._remembered is None or self._remembered[:2] != (slots, version):
            self._remembered = (slots, version, group(slots, self.table))
        return self._remembered[2]

    def _process(self, logits_MV: torch.Tensor, rows_X: Rows, groups: Groups) -> torch.Tensor:
        """The processed logits [X, V] float32 of the rows that need more than a raw argmax."""
        if groups.special_X is None:
            logits_XV = logits_MV.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        else:
            logits_XV = logits_MV.index_select(0, groups.special_X).float()
        for feature, part in groups.parts.items():
            mine = part.rows_G
            logits_GV = logits_XV if mine is None else logits_XV.index_select(0, mine)
            PIPELINE[feature](logits_GV, rows_X.select(mine), part, self.table, self.history)
            if mine is not None:
                logits_XV.index_copy_(0, mine, logits_GV)
        return logits_XV

    def _add_noise(self, logits_XV: torch.Tensor, rows_X: Rows, groups: Groups, stream: int | torch.Tensor) -> None:
        part = groups.parts.get(Feature.SAMPLED)
        if part is None:
            return
        rows_G = rows_X.select(part.rows_G)
        seeds_G = self.table.seed.index_select(0, rows_G.slots)
        samples_G = self.table.sample_index.index_select(0, rows_G.slots)
        noise_GV = gumbel(seeds_G, rows_G.positions, samples_G, logits_XV.shape[1], _pick(stream, part.rows_G))
        if part.rows_G is None:
            logits_XV.add_(noise_GV)
        else:
            logits_XV.index_add_(0, part.rows_G, noise_GV)


def _pick(stream: int | torch.Tensor, index: torch.Tensor | None) -> int | torch.Tensor:
    """These rows' streams; None: all."""
    return stream if index is None or isinstance(stream, int) else stream.index_select(0, index)


def likeliest(logits_MV: torch.Tensor) -> torch.Tensor:
    """The argmax of each row, the lowest id among equals: int64 [M].

    `max` finds the same index as `argmax`, and on the CPU does so three times faster in bfloat16.
    """
    return logits_MV.max(-1).indices


def raw_confidence(logits_MV: torch.Tensor) -> torch.Tensor:
    """The largest probability of the raw softmax: float32 [M], whatever rows share the call."""
    return (UNIT / masses(depths(logits_MV)).sum(-1).double()).float()
