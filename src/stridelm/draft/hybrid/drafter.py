"""Drafts each request, at every step, by what has been better for it of late: a head (or a small model), or prompt
lookup (draft/lookup.py).

Of both, the tokens that are expected to be accepted are known before anything is drafted: from what was accepted of all
requests' guesses, and of what was looked up after matches of each length, moved by how the request itself has fared.
What is learnt, and how, says kernels/plain_sources.py. A long match of a text that repeats itself beats a head's guess;
a short one of a text that does not loses to it.

The head is the one that serves requests which name it. It follows the text at every step, whoever drafted, so it drafts
as well after lookup as if it had always drafted, and prefix pages are shared with the requests that name it. Where the
host may read what was chosen, on a CPU, its layers run for those requests alone that it drafts for.

Requests with a `cache_salt`, or under a rule whose output depends on the draft, neither read nor feed what others'
drafts got: they start from fixed means, and learn from their own text alone.

Legend: R requests of a group, W width of its draft, S slots.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F

from stridelm.batch import CANDIDATE, Draft, ForwardBatch, Verdict
from stridelm.draft import DRAFTERS
from stridelm.draft.base import Drafter, Group, MemoryNeed, TargetInfo, chain, point_masses
from stridelm.draft.guess import Guessing
from stridelm.draft.lookup import lookup
from stridelm.draft.whose import in_order
from stridelm.kernels.plain_sources import GUESSED, SourceTables
from stridelm.models.layers.decoder import Decoder
from stridelm.params import Speculation
from stridelm.run.eager import Logits
from stridelm.run.heads import TargetRuntime
from stridelm.sample.sampler import Sampler
from stridelm.types import MAX_DRAFT_ROWS, DraftKV, Request, Span
from stridelm.upload import upload
from stridelm.verify import RULES

LOOKUP = "lookup"
"""The second source, where drafts are counted by source."""
SHORTEST, LONGEST = 2, 16
"""Tokens of a match."""
CLASSES = ((2,), (3,), (4,), (5, 6, 7), (8, 9, 10, 11, 12, 13, 14, 15), (LONGEST,))
"""Lengths of matches that have the same means."""
START = (
    (0.65, 0.60, 0.60, 0.60),
    (0.40, 0.55, 0.65, 0.70),
    (0.50, 0.65, 0.70, 0.75),
    (0.60, 0.65, 0.75, 0.75),
    (0.70, 0.80, 0.80, 0.85),
    (0.80, 0.85, 0.85, 0.85),
    (0.95, 0.90, 0.90, 0.95),
)
"""What is taken to be accepted of the first, second, third and later levels, of guesses and of each of CLASSES, before
anything is known: about what the built-in model's MTP module and its text had at temperature 0.8."""


class HybridDrafter(Drafter):
    name = "hybrid"
    default_depth = 3
    keeps_kv = True
    needs_states = True  # but for what is looked up, which is seldom all that is drafted

    def __init__(self, target: TargetInfo, sampler: Sampler, runtime: TargetRuntime | None = None) -> None:
        super().__init__(target, sampler, runtime)
        assert runtime is not None
        self._on_host = not runtime.attention.reads_device
        self._levels = self.usual_depth(target)
        """Most that are guessed. What is looked up may have more: it costs no layers."""
        slots, device = target.max_num_seqs + 1, target.device
        given_CD = torch.tensor(START, dtype=torch.float32, device=device)
        self.tables = SourceTables(
            guesses_S2W=torch.zeros(slots, 2, MAX_DRAFT_ROWS, dtype=torch.int64, device=device),
            levels_S2=torch.zeros(slots, 2, dtype=torch.int64, device=device),
            classes_S2=torch.zeros(slots, 2, dtype=torch.int64, device=device),
            luck_S22=torch.zeros(slots, 2, 2, device=device),
            shares_S=torch.zeros(slots, dtype=torch.bool, device=device),
            counts_CD2=torch.zeros(*given_CD.shape, 2, dtype=torch.int64, device=device),
            given_CD=given_CD,
        )
        of_lengths = {length: 1 + number for number, lengths in enumerate(CLASSES) for length in lengths}
        classes = [of_lengths.get(length, 1) for length in range(LONGEST + 1)]
        self._class_of_length = torch.tensor(classes, dtype=torch.int64, device=device)

    def join(self, get: Callable[[str], Drafter]) -> None:
        partner = self.weights_of(self.target)
        assert partner is not None
        self.partner = get(partner)

    @classmethod
    def why_not(cls, target: TargetInfo) -> str | None:
        for name in in_order(target):
            kind = DRAFTERS.get(name)
            if kind is not cls and kind.why_not(target) is None:
                if kind.follows:
                    return None
                return f"it chooses between lookup and a head or small model, and the best drafter here is {name}"
        return "no other drafter can run"

    @classmethod
    def weights_of(cls, target: TargetInfo) -> str | None:
        able = (name for name in in_order(target) if DRAFTERS.get(name) is not cls)
        return next((name for name in able if DRAFTERS.get(name).why_not(target) is None), None)

    @classmethod
    def _partner(cls, target: TargetInfo) -> type[Drafter]:
        name = cls.weights_of(target)
        assert name is not None
        return DRAFTERS.get(name)

    @classmethod
    def check_weights(cls, target: TargetInfo, model: Decoder) -> None:
        cls._partner(target).check_weights(target, model)

    @classmethod
    def memory_need(cls, target: TargetInfo, model: Decoder) -> MemoryNeed:
        return cls._partner(target).memory_need(target, model)

    @classmethod
    def usual_depth(cls, target: TargetInfo) -> int:
        return cls._partner(target).usual_depth(target)

    @property
    def reads_every_row(self) -> bool:
        return self.partner.reads_every_row

    @property
    def draft_kv(self) -> DraftKV | None:
        return self.partner.draft_kv

    @property
    def sources(self) -> tuple[str, ...]:
        return self.partner.name, LOOKUP

    def rows_by_depth(self, speculation: Speculation) -> tuple[int, ...]:
        return tuple(range(self.depth_of(speculation) + 1))

    def kind(self, span: Span) -> Guessing:
        return Guessing.of(span.request.speculation)

    def admit(self, request: Request) -> None:
        self.partner.admit(request)
        coupled = RULES.get(request.speculation.acceptance or "exact").coupled
        self.tables.shares_S[request.slot].fill_(coupled and request.params.cache_salt is None)
        self.tables.luck_S22[request.slot].fill_(0)
        self.tables.levels_S2[request.slot].fill_(0)

    def leave(self, request: Request) -> None:
        self.partner.leave(request)

    def forget(self) -> None:
        self.tables.counts_CD2.zero_()

    # Drafting

    def propose(self, group: Group) -> Draft:
        width = max(span.draft for span in group.spans)
        bounds = group.room()
        looked, exists, matched = lookup(group, [(SHORTEST, LONGEST)] * len(group.spans), width)
        chosen = group.table.ops.choose_sources(
            self.tables,
            group.slots,
            bounds,
            min(width, self._levels),
            looked,
            exists,
            matched,
            self._class_of_length,
        )
        asked = group
        if self._on_host and not self.partner.must_propose:
            rest = [i for i, each in enumerate(chosen.tolist()) if not each]
            asked = group if len(rest) == len(group.spans) else _some(group, rest)
        if not asked.spans:
            return self._looked_up(group, looked, exists)
        guessed = self.partner.propose(_shallow(asked, self._levels))
        self._note(asked, guessed)
        if asked is not group:
            guessed = _spread(guessed, upload(rest, group.slots.device), len(group.spans))
        return self._either(group, chosen, guessed, looked, exists)

    def _note(self, group: Group, guessed: Draft) -> None:
        self.tables.guesses_S2W[group.slots, GUESSED, : guessed.width] = guessed.tokens
        self.tables.levels_S2[group.slots, GUESSED] = torch.minimum(guessed.valid.sum(1), group.room())

    def _looked_up(self, group: Group, looked: torch.Tensor, exists: torch.Tensor) -> Draft:
        draft = group.arena.keep(chain, looked.shape[1], CANDIDATE).draft(looked, exists)
        draft.source = torch.ones_like(group.slots)
        return draft

    def _either(
        self, group: Group, chosen: torch.Tensor, guessed: Draft, looked: torch.Tensor, exists: torch.Tensor
    ) -> Draft:
        """What was chosen for each request; what was looked up, if nothing could be guessed."""
        width = looked.shape[1]
        missing = width - guessed.width
        tokens, valid = F.pad(guessed.tokens, (0, missing)), F.pad(guessed.valid, (0, missing))
        takes_R1 = (chosen | ~valid[:, 0])[:, None] & exists[:, :1]
        tokens, valid = torch.where(takes_R1, looked, tokens), torch.where(takes_R1, exists, valid)
        probs = None
        if guessed.probs is not None:
            own = F.pad(guessed.probs, (0, 0, 0, missing))
            probs = torch.where(takes_R1[:, :, None], point_masses(tokens, own.shape[2]), own)
        draft = group.arena.keep(chain, width, CANDIDATE).draft(tokens, valid, probs)
        draft.source = takes_R1[:, 0].to(torch.int64)
        return draft

    # Following

    def observe(self, group: Group, batch: ForwardBatch, logits: Logits, verdict: Verdict) -> None:
        self.partner.observe(group, batch, logits, verdict)
        emitted, counts = verdict.tokens[group.indices], verdict.counts[group.indices]
        group.table.ops.learn_sources(self.tables, group.slots, emitted, counts)


def _shallow(group: Group, levels: int) -> Group:
    """The group, drafted to at most so many levels."""
    if max(span.draft for span in group.spans) <= levels:
        return group
    spans = (
        replace(span, depth=min(span.depth, levels), draft=min(span.draft, levels)) if span.draft > levels else span
        for span in group.spans
    )
    return replace(group, spans=tuple(spans))


def _some(group: Group, members: list[int]) -> Group:
    """These of the group's spans."""
    index = upload(members, group.slots.device)
    return Group(
        tuple(group.spans[i] for i in members),
        [group.places[i] for i in members],
        group.indices[index],
        group.slots[index],
        group.table,
        None if group.bounds is None else group.bounds[index],
    )


def _spread(draft: Draft, members: torch.Tensor, requests: int) -> Draft:
    """The draft of some of a group's spans as one of all of them: the others have no rows."""
    tokens = draft.tokens.new_zeros(requests, draft.width).index_copy_(0, members, draft.tokens)
    valid = draft.valid.new_zeros(requests, draft.width).index_copy_(0, members, draft.valid)
    probs = draft.probs
    if probs is not None:
        probs = probs.new_zeros(requests, *probs.shape[1:]).index_copy_(0, members, probs)
    return replace(draft, tokens=tokens, valid=valid, probs=probs)
