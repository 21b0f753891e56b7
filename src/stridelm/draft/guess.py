"""Drawing guesses from a drafter's own logits, in the way that the acceptance rule needs.

For the exact rule a guess is drawn with the same noise as the target's token, so that both are likely to be equal. For
rules that weigh a guess by the distribution it was drawn from, it is drawn with noise of its own, and the draft carries
the distribution (kernels/noise.py explains why the two noises must differ). A greedy guess has no noise under any rule,
and its draft has no probabilities, which means point masses (verify/rejection.py).

Legend: R requests of a group, E nodes of a tree's level, H hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

import torch

from stridelm.batch import CANDIDATE, Draft
from stridelm.draft.base import Group, chain, point_masses, within_bounds
from stridelm.draft.expand import Branching, Scores
from stridelm.draft.lookup import lookup, match_lengths
from stridelm.draft.options import GuessOptions, LookupOptions
from stridelm.kernels.noise import DRAFT, attempt_stream
from stridelm.params import Speculation
from stridelm.sample.rows import Rows
from stridelm.sample.sampler import Sampler
from stridelm.types import Span
from stridelm.verify import RULES

LONG_MATCH = 6
"""Default for prompt_lookup_min where only prompt_lookup_max is given."""
NEVER = 1 << 30
"""Longer than any match."""


class Guessing(Enum):
    """How guesses are drawn from a drafter's logits. Spans that differ in it do not share a group."""

    COUPLED = "with the noise that the target's token will be drawn with"
    DRAWN = "with noise of their own; the draft carries their distributions"
    ARGMAX = "without noise"

    @classmethod
    def of(cls, speculation: Speculation) -> Guessing:
        """What the request asks for and its rule needs."""
        if speculation.read(GuessOptions).takes_argmax:
            return cls.ARGMAX
        return cls.DRAWN if RULES.get(speculation.acceptance or "exact").reads_probs else cls.COUPLED


Shape = Guessing | tuple[Branching, int, Guessing]
"""What the drafts of a group have in common: of chains, how they are drawn; of trees, their shape and depth too."""


def shape_of(span: Span) -> Shape:
    speculation = span.request.speculation
    branching, guessing = Branching.of(speculation, speculation.depth or 0), Guessing.of(speculation)
    return guessing if branching == Branching() else (branching, span.depth, guessing)


def branching_rows(speculation: Speculation, depth: int) -> tuple[int, ...]:
    """`rows_by_depth` of a drafter of chains and trees that can look drafts up instead. Raises ValueError for options
    that conflict."""
    replacing_lengths(speculation)
    return Branching.of(speculation, depth).rows_by_depth(depth)


def scores_of(
    group: Group, sampler: Sampler, logits: Callable[[torch.Tensor], torch.Tensor], guessing: Guessing
) -> Scores:
    """How likely each token is at the nodes of a level. logits: of the head, [M, H] -> [M, V]."""
    slots, known = group.slots, group.table.known[group.slots]
    host_slots = [span.request.slot for span in group.spans]

    def scores(hidden_REH: torch.Tensor, level: int) -> torch.Tensor:
        each = hidden_REH.shape[1]
        rows = Rows(slots.repeat_interleave(each), (known + level - 1).repeat_interleave(each))
        repeated = [slot for slot in host_slots for _ in range(each)]
        # Coupled guesses take the token that wins with the target's noise; all others go by likelihood alone.
        noisy = guessing is Guessing.COUPLED
        log_probs = sampler.log_probs(logits(hidden_REH.flatten(0, 1)), rows, repeated, noisy=noisy)
        return log_probs.view(len(known), each, -1)

    return scores


def chain_depth(group: Group) -> int:
    """Levels of a group's chains."""
    return max(span.draft for span in group.spans)


@dataclass
class Chain:
    """A chain under construction, one guess for each request and level; all spans of the group have one Guessing."""

    group: Group
    sampler: Sampler
    positions_LR: torch.Tensor
    """int64: the position of the token that each level guesses."""
    tokens: list[torch.Tensor] = field(default_factory=list)
    _probs: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        spans = self.group.spans
        self._slots = [span.request.slot for span in spans]
        self._guessing = Guessing.of(spans[0].request.speculation)
        self._looks_back = any(span.request.params.uses_history for span in spans)

    def draw(self, logits_RV: torch.Tensor) -> None:
        """Guess the next level. Penalties see the earlier guesses."""
        extra = torch.stack(self.tokens, 1) if self.tokens and self._looks_back else None
        rows = Rows(self.group.slots, self.positions_LR[len(self.tokens)], extra)
        if self._guessing is Guessing.ARGMAX:
            self.tokens.append(self.sampler.argmax(logits_RV, rows, self._slots))
            return
        drawn = self._guessing is Guessing.DRAWN
        stream = attempt_stream(DRAFT, self.positions_LR[0]) if drawn else 0
        self.tokens.append(self.sampler.draw(logits_RV, rows, self._slots, stream))
        if drawn:
            self._probs.append(self.sampler.probabilities(logits_RV, rows, self._slots))

    def draft(self, ready_R: torch.Tensor) -> Draft:
        """The chain as a Draft. ready: requests that have a draft at all. Where prompt lookup finds a long enough
        match, what followed it replaces the guesses."""
        depth = len(self.tokens)
        tokens, valid = torch.stack(self.tokens, 1), ready_R[:, None].repeat(1, depth)
        if any(span.draft < depth for span in self.group.spans):  # a captured step cuts all drafts alike, later
            valid &= within_bounds(self.group, depth)
        probs = torch.stack(self._probs, 1) if self._probs else None
        if any(span.request.speculation.read(LookupOptions).looks_up for span in self.group.spans):
            looked_up, exists, _ = lookup(
                self.group, [replacing_lengths(span.request.speculation) for span in self.group.spans], depth
            )
            replaces = exists[:, :1]
            tokens, valid = torch.where(replaces, looked_up, tokens), torch.where(replaces, exists, valid)
            if probs is not None:  # tokens that were looked up are point masses
                probs = torch.where(replaces[:, :, None], point_masses(tokens, probs.shape[2]), probs)
        return self.group.arena.keep(chain, depth, CANDIDATE).draft(tokens, valid, probs)


def replacing_lengths(speculation: Speculation) -> tuple[int, int]:
    """Shortest and longest match that replaces a draft; lengths that never match if the request does not look up.

    Raises ValueError for lengths that no match can have.
    """
    asked = speculation.read(LookupOptions)
    return match_lengths(asked, LONG_MATCH, 2 * LONG_MATCH) if asked.looks_up else (NEVER, 1)
