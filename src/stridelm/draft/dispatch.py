"""All drafters of an engine as one: each span goes to its request's drafter, and the drafts are merged into one."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import numpy as np
import torch

from stridelm.batch import Draft, ForwardBatch, Verdict
from stridelm.draft import DRAFTERS
from stridelm.draft.base import Drafter, Group, TargetInfo, empty_draft, numbers, point_masses
from stridelm.faults import on_behalf_of
from stridelm.params import Speculation
from stridelm.run.eager import Logits
from stridelm.run.heads import TargetRuntime
from stridelm.run.state import TokenTable
from stridelm.sample.sampler import Sampler
from stridelm.types import Follow, Found, Request, Span
from stridelm.upload import upload

KINDS = 1024
"""Kinds of spans that are remembered."""
TREE_FIELDS = ("tokens", "parents", "roles", "depths", "ancestors", "valid")


class Drafters:
    """Drafters are created when a request first uses them, and live as long as the engine."""

    def __init__(
        self, target: TargetInfo, sampler: Sampler, table: TokenTable, runtime: TargetRuntime | None = None
    ) -> None:
        self._target = target
        self._sampler = sampler
        self._table = table
        self._serving = runtime
        self._made: dict[str, Drafter] = {}
        self._kinds: dict[tuple[int, int], tuple[Speculation, Hashable]] = {}
        """By the number of a speculation, which it keeps alive, and a depth."""

    def get(self, name: str) -> Drafter:
        """The drafter called `name`. Raises ValueError if it is unknown or cannot serve this model."""
        if name not in self._made:
            kind = DRAFTERS.get(name)
            reason = kind.why_not(self._target)
            if reason:
                raise ValueError(f"drafter {name!r} cannot run on this model: {reason}")
            made = kind(self._target, self._sampler, self._serving)
            made.join(self.get)
            self._made[name] = made
        return self._made[name]

    def admit(self, request: Request) -> None:
        self._of(request).admit(request)

    def leave(self, request: Request) -> None:
        self._of(request).leave(request)

    def forget(self) -> None:
        """Drop what every drafter has learned from earlier requests."""
        for drafter in self._made.values():
            drafter.forget()

    def look_ahead(self, requests: Sequence[Request]) -> None:
        """Note what drafters have found for the next drafts of running requests, of which nothing is in flight. Raises
        RequestFault if that fails for one of them."""
        looking: dict[str, list[Request]] = {}
        for request in requests:
            if request.looks_ahead:
                looking.setdefault(self._of(request).name, []).append(request)
        for name, mine in looking.items():
            for request, found in zip(mine, self._found(self._made[name], mine), strict=True):
                request.found = found

    def _found(self, drafter: Drafter, requests: Sequence[Request]) -> Sequence[Found]:
        try:
            return drafter.found(requests, self._table)
        except Exception:
            for request in requests:  # whose fault it is shows when each is looked for by itself
                with on_behalf_of(request):
                    drafter.found([request], self._table)
            raise

    def reads_every_row(self, span: Span) -> bool:
        return self._of(span.request).reads_every_row

    def on_host(self, spans: tuple[Span, ...]) -> bool:
        """Whether any of the drafts is made on the host."""
        drafters = {span.request.speculation.drafter or "" for span in spans if span.draft}
        return any(self.get(name).host_bound for name in drafters)

    def propose_on_host(self, spans: tuple[Span, ...], slots: torch.Tensor) -> Draft | None:
        """What drafters of the host propose, empty for all other spans; None if they propose nothing. slots: [R] rows
        of the request table."""
        drafting = [i for i, span in enumerate(spans) if span.draft and self._of(span.request).host_bound]
        return self._proposed(spans, slots, drafting, None, None) if drafting else None

    def propose(
        self,
        spans: tuple[Span, ...],
        slots: torch.Tensor,
        ask: Callable[[Drafter, Group], Draft] | None = None,
        hosted: Draft | None = None,
        bounds: torch.Tensor | None = None,
    ) -> Draft:
        """One Draft for all spans of the step. ask: replaces the call of a drafter's `propose`, if there is a quicker
        way. hosted: what `propose_on_host` has returned for these spans. bounds: as in Group."""
        drafting = [i for i, span in enumerate(spans) if span.draft and not self._of(span.request).host_bound]
        if drafting:
            # Where one drafter has looked for all of them, it need not be told apart for whom it found nothing.
            if spans[0].request.looks_ahead and len({span.request.speculation.drafter for span in spans}) == 1:
                drafting = list(range(len(spans)))
            return self._proposed(spans, slots, drafting, ask, hosted, bounds)
        return empty_draft(len(spans), self._table.arena) if hosted is None else hosted

    def _proposed(
        self,
        spans: tuple[Span, ...],
        slots: torch.Tensor,
        drafting: list[int],
        ask: Callable[[Drafter, Group], Draft] | None,
        hosted: Draft | None,
        bounds: torch.Tensor | None = None,
    ) -> Draft:
        groups = self._groups(spans, slots, drafting, bounds=bounds)
        proposed = [(group, ask(drafter, group) if ask else drafter.propose(group)) for drafter, group in groups]
        if len(groups) == 1 and len(drafting) == len(spans):
            return proposed[0][1]
        if hosted is not None:  # first, so that the others' rows are written over its empty ones
            indices = self._table.arena.keep(numbers, len(spans))
            proposed.insert(0, (Group(spans, list(range(len(spans))), indices, slots, self._table), hosted))
        return _merge(len(spans), proposed)

    def observe(
        self,
        spans: tuple[Span, ...],
        slots: torch.Tensor,
        batch: ForwardBatch,
        logits: Logits,
        verdict: Verdict,
    ) -> None:
        """Let every drafter observe the verdict on its spans."""
        looked_at = [i for i, span in enumerate(spans) if span.decides or self._of(span.request).keeps_kv]
        for drafter, group in self._groups(spans, slots, looked_at, observing=True):
            drafter.observe(group, batch, logits, verdict)

    def _of(self, request: Request) -> Drafter:
        assert request.speculation.drafter is not None
        return self.get(request.speculation.drafter)

    def _kind(self, drafter: Drafter, span: Span) -> Hashable:
        """`drafter.kind(span)`, found out once: requests that ask for the same share what it was settled to."""
        asked = span.request.speculation
        known = self._kinds.get((id(asked), span.depth))
        if known is None or known[0] is not asked:
            if len(self._kinds) >= KINDS:
                self._kinds.clear()
            known = self._kinds[id(asked), span.depth] = asked, drafter.kind(span)
        return known[1]

    def _groups(
        self,
        spans: tuple[Span, ...],
        slots: torch.Tensor,
        chosen: list[int],
        *,
        observing: bool = False,
        bounds: torch.Tensor | None = None,
    ) -> list[tuple[Drafter, Group]]:
        """The chosen spans by drafter and kind. A drafter with KV of its own observes all spans at once that it follows
        alike."""
        members: dict[tuple[str, Hashable], list[int]] = {}
        seen: dict[tuple[int, int, Follow], list[int]] = {}
        for i in chosen:
            span = spans[i]
            alike = id(span.request.speculation), span.depth, span.follow
            if alike not in seen:
                drafter = self._of(span.request)
                follows = observing and drafter.keeps_kv
                kind = span.follow if follows else self._kind(drafter, span)
                seen[alike] = members.setdefault((drafter.name, kind), [])
            seen[alike].append(i)
        out = []
        for (name, _), indices in members.items():
            where = self._table.arena.keep(numbers, len(spans)) if len(indices) == len(spans) else None
            if where is None:
                where = upload(indices, slots.device)
            everybody = len(indices) == len(spans)
            mine = slots if everybody else slots[where]
            room = bounds if bounds is None or everybody else bounds[where]
            group = Group(tuple(spans[i] for i in indices), indices, where, mine, self._table, room)
            out.append((self._made[name], group))
        return out


def _merge(rows: int, parts: list[tuple[Group, Draft]]) -> Draft:
    """Drafts of several groups as one of the widest's width; rows that no group has are not valid."""
    width = max(draft.width for _, draft in parts)
    device = parts[0][1].tokens.device
    merged = {
        name: torch.zeros(rows, width, dtype=getattr(parts[0][1], name).dtype, device=device) for name in TREE_FIELDS
    }
    candidates = np.zeros((rows, width), dtype=bool)
    for group, draft in parts:
        candidates[group.places, : draft.width] = draft.candidates
        for name, target in merged.items():
            target[group.indices, : draft.width] = getattr(draft, name)
    return Draft(
        **merged,
        candidates=candidates,
        is_chain=all(draft.is_chain for _, draft in parts),
        max_depth=max(draft.max_depth for _, draft in parts),
        probs=_merged_probs(rows, width, parts),
        source=_merged_source(rows, parts),
    )


def _merged_source(rows: int, parts: list[tuple[Group, Draft]]) -> torch.Tensor | None:
    """[rows]; None if all drafts come from the first sources."""
    if all(draft.source is None for _, draft in parts):
        return None
    merged = torch.zeros(rows, dtype=torch.int64, device=parts[0][1].tokens.device)
    for group, draft in parts:
        if draft.source is not None:
            merged[group.indices] = draft.source
    return merged


def _merged_probs(rows: int, width: int, parts: list[tuple[Group, Draft]]) -> torch.Tensor | None:
    """[rows, width, V]; rows of drafts without probabilities become point masses. None if no draft has any."""
    drawn = next((draft.probs for _, draft in parts if draft.probs is not None), None)
    if drawn is None:
        return None
    merged = drawn.new_zeros(rows, width, drawn.shape[2])
    for group, draft in parts:
        probs = point_masses(draft.tokens, drawn.shape[2]) if draft.probs is None else draft.probs
        merged[group.indices, : draft.width] = probs
    return merged
