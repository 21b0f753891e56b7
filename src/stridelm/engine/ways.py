"""The ways in which the requests of one step are drafted.

A captured step provides for all of them: every drafter of the device proposes for every request, and a number on the
device selects whose proposal a request gets. To the others' drafters it is padding. So a batch whose requests differ
in drafter or depth is one replay, as is one in which all are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
import torch

from stridelm.batch import Draft, ForwardBatch, Verdict
from stridelm.draft import DRAFTERS
from stridelm.draft.dispatch import TREE_FIELDS
from stridelm.options import is_of_rules
from stridelm.params import Speculation
from stridelm.run.eager import Logits
from stridelm.schedule.rows import catches_up
from stridelm.types import Follow, Request, Span

OTHERS = 0
"""Number of requests that no drafter of the device serves: plain ones, and those that the host drafts for."""
LEVELS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
"""Depths that steps are captured for, beside the deepest, if chains may be shallower."""


@dataclass(frozen=True)
class Way:
    """One drafter of the device, with its options."""

    speculation: Speculation
    """Without the depth if its drafts are chains: a shallower chain is the first rows of a deeper one, and the bounds
    on rows cut the others off."""
    depth: int
    rows: int
    """Rows of a draft of this depth."""


@dataclass(frozen=True)
class Ways:
    """What the requests of one step want."""

    like: Request
    """One of the step's requests."""
    rule: Speculation
    """The acceptance rule of all of them, with its options and nothing else. The length of a simulated one is read on
    the device."""
    device: tuple[Way, ...] = ()
    """Numbered from 1."""
    likes: tuple[Request, ...] = ()
    """A request of each."""
    host_rows: int = 0
    host_depth: int = 0
    """Rows and depth of the largest draft that the host can make."""
    numbers: dict[int, int] = field(default_factory=dict)
    """id(speculation) -> its number."""
    shallow: bool = False
    """Whether a drafter could draft deeper than this step does, for requests whose depths are chosen."""
    chosen: bool = False
    """Whether depths of any are."""


def ways_of(spans: Sequence[Span], *, whole: bool = False) -> Ways | None:
    """The ways of a step's spans; None if they cannot be captured as one step: their rules differ, or the windows of
    `all_or_nothing` requests would be mixed with other rows. whole: if the step drafts, draft as deep as the requests
    may, whatever was chosen; the bounds on rows cut off what is too deep."""
    first = spans[0].request
    idle = spans[0].follow is Follow.LATER or any(map(catches_up, spans))
    likes: dict[int, Request] = {}
    depths: dict[int, int] = {}
    for span in spans:
        request = span.request
        key = id(request.speculation)
        if key not in likes:
            likes[key], depths[key] = request, span.depth
        elif span.depth > depths[key]:
            depths[key] = span.depth
    rules = {_rule(like.speculation) for like in likes.values()}
    if len(rules) > 1 or (first.all_or_nothing and len({like.speculation for like in likes.values()}) > 1):
        return None
    found: dict[Speculation, tuple[Way, Request]] = {}
    keys: dict[int, Speculation] = {}
    host_rows = host_depth = 0
    shallow = chosen = False
    for key, like in likes.items():
        kind, deepest = DRAFTERS.get(like.speculation.drafter or ""), len(like.rows_by_depth) - 1
        if idle:
            depth = 0
        elif whole and like.adaptive:
            depth = deepest
        else:
            depth = min(each for each in depths_of(like) if each >= depths[key])
        shallow |= like.adaptive and depth < deepest
        chosen |= like.adaptive
        if kind.host_bound:
            host_rows, host_depth = max(host_rows, like.rows_by_depth[depth]), max(host_depth, depth)
        elif deepest or kind.keeps_kv:
            way = _way(like, depth)
            keys[key] = way.speculation
            if way.speculation not in found or found[way.speculation][0].rows < way.rows:
                found[way.speculation] = way, like
    # In one order, so that steps with the same ways are of one kind.
    ordered = sorted(found, key=repr) if len(found) > 1 else list(found)
    numbers = {key: ordered.index(keys[key]) + 1 if key in keys else OTHERS for key in likes}
    device, served = zip(*(found[each] for each in ordered), strict=True) if ordered else ((), ())
    return Ways(first, rules.pop(), device, served, host_rows, host_depth, numbers, shallow, chosen)


def depths_of(like: Request) -> tuple[int, ...]:
    """Depths that the drafts of such requests have in graphs, the deepest first. A draft of another depth has that of
    the next one, and bounds on its rows."""
    deepest = len(like.rows_by_depth) - 1
    chain, host_bound = _is_chain(like), DRAFTERS.get(like.speculation.drafter or "").host_bound
    if like.all_or_nothing or (not like.adaptive and (chain or host_bound)):
        return (deepest,)
    least = 1 if like.adaptive and like.draft_kv and like.draft_kv.may_wait else 0  # at depth 0 such steps wait
    return tuple(depth for depth in range(deepest, least - 1, -1) if depth == deepest or depth in LEVELS or not chain)


def combined(parts: Sequence[tuple[torch.Tensor, Draft]]) -> Draft:
    """One draft for all requests. parts: [R] bool, and the draft that these requests get; None of the drafts has
    probabilities, unless there is only one."""
    if len(parts) == 1:
        return parts[0][1]
    drafts = [draft for _, draft in parts]
    rows, width = len(drafts[0].tokens), max(draft.width for draft in drafts)
    merged = {}
    for name in TREE_FIELDS:
        merged[name] = _widened(torch.zeros_like(getattr(drafts[0], name)), width)
        for mine_R, draft in parts:
            merged[name] = torch.where(mine_R[:, None], _widened(getattr(draft, name), width), merged[name])
    candidates = np.zeros((rows, width), dtype=bool)
    for draft in drafts:
        candidates[:, : draft.width] |= draft.candidates
    return Draft(
        **merged,
        candidates=candidates,
        is_chain=all(draft.is_chain for draft in drafts),
        max_depth=max(draft.max_depth for draft in drafts),
        source=_combined_source(parts),
    )


def _combined_source(parts: Sequence[tuple[torch.Tensor, Draft]]) -> torch.Tensor | None:
    """[R]; None if all drafts come from the first sources."""
    source = None
    for mine_R, draft in parts:
        if draft.source is not None:
            source = draft.source.where(mine_R, 0 if source is None else source)
    return source


def share_of(
    mine_R: torch.Tensor, none_R: torch.Tensor, batch: ForwardBatch, logits: Logits, verdict: Verdict
) -> tuple[ForwardBatch, Logits, Verdict]:
    """The step as one way's drafter observes it: requests that are not its own have no rows, and nothing that was
    accepted beyond what its drafts have room for. none: [R] -1."""
    kept_R, leaf_R = verdict.kept * mine_R, torch.where(mine_R, verdict.leaf, none_R)
    return replace(batch, reals=batch.reals * mine_R), logits, replace(verdict, kept=kept_R, leaf=leaf_R)


def _widened(rows_RW: torch.Tensor, width: int) -> torch.Tensor:
    return torch.nn.functional.pad(rows_RW, (0, width - rows_RW.shape[1]))


def _way(like: Request, depth: int) -> Way:
    speculation = _drafting(like.speculation)
    if _is_chain(like) and not like.all_or_nothing:
        speculation = _without_depth(speculation)
    return Way(speculation, depth, like.rows_by_depth[depth])


def _is_chain(like: Request) -> bool:
    return all(rows == depth for depth, rows in enumerate(like.rows_by_depth))


@lru_cache(maxsize=256)
def _without_depth(speculation: Speculation) -> Speculation:
    return replace(speculation, depth=None)


@lru_cache(maxsize=256)
def _drafting(speculation: Speculation) -> Speculation:
    """What of it says how to draft: not the length that is read on the device, nor who chooses the depth."""
    return replace(speculation, acceptance_length=None, adaptive=False)


@lru_cache(maxsize=256)
def _rule(speculation: Speculation) -> Speculation:
    options = {name: value for name, value in speculation.options if is_of_rules(name)}
    return Speculation(acceptance=speculation.acceptance, **options)
