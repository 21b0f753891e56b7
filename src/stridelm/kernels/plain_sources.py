"""Choosing between two sources of drafts, and learning from what became of both: in plain torch, as the reference.

Source 0 guesses (a head, a small model), and source 1 looks up. The chance that a level of a draft is accepted, given
that the levels before it were, is

    mean[class, level] x luck        luck = (right + OWN) / (expected + OWN)

`mean` is what was accepted of all requests' drafts of a class: guesses are one class, and what was looked up has one
for each length of match. `right` counts the request's own levels of late that were accepted from a source, and
`expected` sums their means: a young request is taken to be like the others. A draft is worth the tokens of it that are
expected to be accepted.

Both are learnt from the tokens that were emitted, whichever source was chosen: the draft that was not verified would
have been accepted as far as it agrees with them. So lookup is known before it is ever used, and is found out when a
text stops repeating itself.

Legend: as in step_ops.py; C classes, D levels that are told apart (the last stands for all after it).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

GUESSED, LOOKED_UP = 0, 1
PRIOR = 8.0
"""Checks for which the means given at the start count."""
OWN = 3.0
"""Accepted levels for which a request's being like the others counts."""
MEMORY = 0.9
"""What a request's earlier drafts of a source count for after one more."""
HIGHEST = 0.99
"""Chance of a level."""
MOST_CHECKS = 4096
"""Of a class and level: from then on all of them count half, since texts change."""


@dataclass(frozen=True, slots=True)
class SourceTables:
    guesses_S2W: torch.Tensor
    """int64: what each source proposed last, wanted or not."""
    levels_S2: torch.Tensor
    """int64: how many levels that was; 0 once it is learnt from."""
    classes_S2: torch.Tensor
    """int64: whose means it is expected to have."""
    luck_S22: torch.Tensor
    """float32: of each source, `right` and `expected`."""
    shares_S: torch.Tensor
    """bool: requests that read and feed the means of others. The others have those given at the start."""
    counts_CD2: torch.Tensor
    """int64: levels that were accepted, and that were checked, of all requests."""
    given_CD: torch.Tensor
    """float32: means to start with."""

    def means(self) -> torch.Tensor:
        """[C, D] float32."""
        return (self.counts_CD2[:, :, 0] + PRIOR * self.given_CD) / (self.counts_CD2[:, :, 1] + PRIOR)

    def means_of(self, slots_R: torch.Tensor, levels: int) -> torch.Tensor:
        """[R, 2, levels] float32: of what each source proposed last."""
        classes_R2 = self.classes_S2[slots_R]
        shares_R11 = self.shares_S[slots_R][:, None, None]
        means_R2D = torch.where(shares_R11, self.means()[classes_R2], self.given_CD[classes_R2])
        level = torch.arange(levels, device=slots_R.device).clamp(max=means_R2D.shape[2] - 1)
        return means_R2D[:, :, level]


def choose_sources(
    tables: SourceTables,
    slots_R: torch.Tensor,
    bounds_R: torch.Tensor,
    guessed: int,
    looked_RW: torch.Tensor,
    exists_RW: torch.Tensor,
    matched_R: torch.Tensor,
    class_of_length: torch.Tensor,
) -> torch.Tensor:
    """Whether lookup is worth more than `guessed` guesses; see step_ops.py."""
    width = looked_RW.shape[1]
    tables.guesses_S2W[slots_R, LOOKED_UP, :width] = looked_RW
    found_R = torch.minimum(exists_RW.sum(1), bounds_R)
    nothing_R = torch.zeros_like(found_R)
    tables.levels_S2[slots_R] = torch.stack((nothing_R, found_R), 1)
    of_match_R = class_of_length[matched_R.clamp(max=len(class_of_length) - 1)]
    tables.classes_S2[slots_R] = torch.stack((nothing_R, of_match_R), 1)
    level, deepest = torch.arange(width, device=slots_R.device), torch.stack((bounds_R.clamp(max=guessed), found_R), 1)
    luck_R22 = tables.luck_S22[slots_R]
    luck_R2 = (luck_R22[:, :, 0] + OWN) / (luck_R22[:, :, 1] + OWN)
    chances_R2W = (tables.means_of(slots_R, width) * luck_R2[:, :, None]).clamp(max=HIGHEST)
    worth_R2 = (chances_R2W.cumprod(2) * (level < deepest[:, :, None])).sum(2)
    return worth_R2[:, LOOKED_UP] > worth_R2[:, GUESSED]


def learn_sources(
    tables: SourceTables, slots_R: torch.Tensor, emitted_RK: torch.Tensor, counts_R: torch.Tensor
) -> None:
    """See step_ops.py."""
    width = min(emitted_RK.shape[1], tables.guesses_S2W.shape[2])
    level = torch.arange(width, device=slots_R.device)
    levels_R2 = tables.levels_S2[slots_R]
    seen_R2W = (level < levels_R2[:, :, None]) & (level < counts_R[:, None, None])
    same_R2W = tables.guesses_S2W[slots_R][:, :, :width] == emitted_RK[:, None, :width]
    right_R2W = (seen_R2W & same_R2W).cumprod(2)
    before_R2W = torch.cat((torch.ones_like(right_R2W[:, :, :1]), right_R2W[:, :, :-1]), 2)
    checked_R2W = before_R2W * seen_R2W
    learns_R2 = checked_R2W.any(2)
    news_R22 = torch.stack((right_R2W.sum(2), (checked_R2W * tables.means_of(slots_R, width)).sum(2)), 2)
    luck_R22 = tables.luck_S22[slots_R]
    tables.luck_S22[slots_R] = torch.where(learns_R2[:, :, None], MEMORY * luck_R22 + news_R22, luck_R22)
    tables.levels_S2[slots_R] = 0
    shares_R = tables.shares_S[slots_R] & (slots_R >= 0)
    classes, depths = tables.given_CD.shape
    place_R2W = tables.classes_S2[slots_R][:, :, None] * depths + level.clamp(max=depths - 1)
    flat = tables.counts_CD2.view(classes * depths, 2)
    for column, count_R2W in enumerate((right_R2W, checked_R2W)):
        flat[:, column].index_add_(0, place_R2W.flatten(), (count_R2W * shares_R[:, None, None]).flatten())
    halve(tables)


def halve(tables: SourceTables) -> None:
    """Of classes and levels that were checked often enough."""
    often = (tables.counts_CD2[:, :, 1:] > MOST_CHECKS).to(torch.int64)
    tables.counts_CD2.bitwise_right_shift_(often)
