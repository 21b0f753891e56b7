"""From raw logits to tokens: the one place where a token is chosen.

A row's token is a function of that row's logits and history, its request's parameters and seed, and the
position: `argmax(processed logits + noise)`, the lowest id among equals. Which other rows share the call
changes nothing.

Legend: M rows of the call, X rows among them that need more than a raw argmax, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stridelm.sample.groups import Groups, group
from stridelm.sample.mass import UNIT, depths, masses
from stridelm.sample.noise import gumbel
from stridelm.sample.processors import PIPELINE, Rows, TokenHistory
from stridelm.sample.table import Feature, SamplingTable


class Sampler:
    """Draws tokens for rows of requests whose parameters are in `table` and whose tokens are in `history`."""

    def __init__(self, table: SamplingTable, history: TokenHistory) -> None:
        self.table = table
        self.history = history
        self._remembered: tuple[list[int], int, Groups] | None = None

    def draw(self, logits_MV: torch.Tensor, rows: Rows, row_slots: Sequence[int], stream: int = 0) -> torch.Tensor:
        """The rows' tokens [M] int64; the logits stay untouched.

        row_slots: `rows.slots` as the host knows them. Rows that are plain greedy take the argmax of the raw
        logits in whatever precision they come.
        """
        groups = self._groups(row_slots)
        if not groups.count:
            return self._draw_unedited(logits_MV, rows, row_slots, stream)
        rows_X = rows.select(groups.special_X)
        logits_XV = self._process(logits_MV, rows_X, groups)
        self._add_noise(logits_XV, rows_X, groups, stream)
        tokens_X = likeliest(logits_XV)
        if groups.special_X is None:
            return tokens_X
        others_M = self._draw_unedited(logits_MV, rows, row_slots, stream)
        return others_M.index_copy_(0, groups.special_X, tokens_X)

    def _draw_unedited(
        self, logits_MV: torch.Tensor, rows: Rows, row_slots: Sequence[int], stream: int
    ) -> torch.Tensor:
        """Tokens of the rows that are in no group: on a CPU the greedy ones; on a GPU all whose logits are not edited,
        in a few launches that read no host tensor."""
        if not logits_MV.is_cuda:
            return likeliest(logits_MV)
        from stridelm.kernels.draw import draw
        from stridelm.kernels.truncate import truncate

        table = self.table
        wanted = Feature(0)
        for slot in set(row_slots):
            wanted |= table.features(slot)
        log_min_p = table.log_min_p if wanted & Feature.MIN_P else None
        cut = None
        if wanted & (Feature.TOP_K | Feature.TOP_P):
            top_k = table.top_k if wanted & Feature.TOP_K else None
            top_p = table.top_p if wanted & Feature.TOP_P else None
            cut = truncate(logits_MV, rows.slots, table.temperature, table.sampled, table.log_min_p, top_k, top_p)
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

    def processed(self, logits_MV: torch.Tensor, rows: Rows, row_slots: Sequence[int]) -> torch.Tensor:
        """float32 [M, V] whose softmax the sampled rows are drawn from.

        Greedy rows have all but temperature and truncation applied: their token is the argmax.
        """
        groups = group(row_slots, self.table)
        if not groups.count:
            return logits_MV.to(torch.float32, copy=True)
        logits_XV = self._process(logits_MV, rows.select(groups.special_X), groups)
        if groups.special_X is None:
            return logits_XV
        return logits_MV.to(torch.float32, copy=True).index_copy_(0, groups.special_X, logits_XV)

    def _groups(self, row_slots: Sequence[int]) -> Groups:
        """Decode steps ask for the same rows again and again; the last answer is kept."""
        slots, version = list(row_slots), self.table.version
        if self._remembered is None or self._remembered[:2] != (slots, version):
            # On a GPU a kernel draws whatever needs no edited logits.
            among = Feature.EDITED if self.table.device.type == "cuda" else Feature.ALL
            self._remembered = (slots, version, group(slots, self.table, among))
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

    def _add_noise(self, logits_XV: torch.Tensor, rows_X: Rows, groups: Groups, stream: int) -> None:
        part = groups.parts.get(Feature.SAMPLED)
        if part is None:
            return
        rows_G = rows_X.select(part.rows_G)
        seeds_G = self.table.seed.index_select(0, rows_G.slots)
        samples_G = self.table.sample_index.index_select(0, rows_G.slots)
        noise_GV = gumbel(seeds_G, rows_G.positions, samples_G, logits_XV.shape[1], stream)
        if part.rows_G is None:
            logits_XV.add_(noise_GV)
        else:
            logits_XV.index_add_(0, part.rows_G, noise_GV)


def likeliest(logits_MV: torch.Tensor) -> torch.Tensor:
    """The argmax of each row, the lowest id among equals: int64 [M].

    `max` finds the same index as `argmax`, and on the CPU does so three times faster in bfloat16.
    """
    return logits_MV.max(-1).indices


def raw_confidence(logits_MV: torch.Tensor) -> torch.Tensor:
    """The largest probability of the raw softmax: float32 [M], whatever rows share the call."""
    return (UNIT / masses(depths(logits_MV)).sum(-1).double()).float()
