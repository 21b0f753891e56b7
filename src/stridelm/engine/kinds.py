"""What a graph is captured for, the stand-ins for its requests during capture, and the inputs that select requests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch

from stridelm.batch import Draft
from stridelm.engine.ways import Way, Ways
from stridelm.params import Speculation
from stridelm.sample.table import Feature
from stridelm.schedule.limits import PATIENCE
from stridelm.schedule.rows import catches_up, most_decoded
from stridelm.types import MAX_DRAFT_ROWS, Follow, Request, Span
from stridelm.upload import staging

REQUESTS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512)
"""Sizes that a step's requests are padded to."""
PACKING = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""The same if they draft: their rows are padded too, and in that a request that is missing counts as one."""
FEW_KINDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""The same for the rarer parameters (CLASSES)."""
DRAFTING = (4, 16, 64, 256, 512)
"""The same for the rarest steps: those that bring drafters' KV up to date. And if only the proposals are captured: each
may be captured while a request waits."""
TILE, FEWEST_PACKED = 128, 32
"""A step of at least so many requests whose drafts have fewer rows than they could have, because some of its requests
are plain or end, runs in a multiple of TILE rows: products work on tiles of so many."""
READS_WEIGHTS, ONE_SHARE = 512, 0.7
"""Steps of fewer rows than this take hardly less time with fewer, since they read the weights: there is one size beside
the whole, with this share of the rows that drafts could have."""
BUFFERS = 4
"""Host copies of the inputs that may be in transfer at once; more than there are steps in flight."""


CLASSES = (Feature.SAMPLED | Feature.TRUNCATED, Feature.ALL & ~Feature.GRAMMAR)
"""What a graph provides for: the first that has all that a step's requests need. A request that needs less costs an
empty launch per feature. Grammars are matched on the host, so their steps are not captured. Steps that draft less deep
than they could (`Ways.shallow`), but do draft, are captured for the first alone: there are many of them."""


@dataclass(frozen=True)
class Kind:
    """What all steps that replay one graph have in common."""

    requests: int
    real: int
    draft: int
    depth: int
    rule: Speculation
    """The acceptance rule and its options, and nothing else."""
    ways: tuple[Way, ...]
    """How the device drafts for those requests that it drafts for; which way is whose, a graph reads on the device."""
    rows: int
    """Of the whole step: enough for every request to have its most, or fewer (row_stairs)."""
    features: Feature
    """One of CLASSES. Whose rows need which of them, a graph reads on the device."""
    lists: int = 0
    """Generation of the sampling table, if the step reads lists of it: a graph of an older generation reads tensors
    that no longer exist, and is never replayed again."""
    is_chain: bool | None = None
    """Whether the host's proposals are chains; None: the host proposes nothing."""
    behind: int = 0
    """Rows of earlier steps for which drafters' KV may be missing, and is brought up to date."""
    waits: bool = False
    """Drafters' KV is left to a later step."""

    def stand_ins(self, like: Request, reach: int, way: Way | None = None) -> tuple[Span, ...]:
        """Placeholder spans, for host code that inspects spans during capture. reach: a bound on every span's end.
        way: as its drafter sees them."""
        params = like.params
        if self.features & Feature.PENALTIES:  # rows of any request in such a step may look back
            params = replace(params, presence_penalty=1.0)
        depth, rows = (self.depth, self.draft) if way is None else (way.depth, way.rows)
        like = replace(like, slot=-1, params=params)
        follow = Follow.LATER if self.waits else Follow.NOW
        span = Span(like, reach - self.real, self.real, depth, rows, behind=self.behind, follow=follow)
        return (span,) * self.requests


def kind_of(spans: Sequence[Span], ways: Ways, needed: Feature, is_chain: bool | None, generation: int) -> Kind:
    """The kind of a step of these spans, of which there are at most REQUESTS[-1]. needed: features of their requests,
    grammars apart. is_chain: as in Kind. generation: of the sampling table."""
    features = next(each for each in CLASSES if needed in each)
    real = most_decoded(ways.like)
    draft = max([way.rows for way in ways.device] + [0 if is_chain is None else ways.host_rows])
    behind = PATIENCE if ways.device and any(map(catches_up, spans)) else 0
    requests = padded_size(len(spans), sizes_for(features, draft, behind))
    used = requests * real + sum(min(span.draft, draft) for span in spans)
    return Kind(
        requests=requests,
        real=real,
        draft=draft,
        depth=max([way.depth for way in ways.device] + [0 if is_chain is None else ways.host_depth]),
        rule=ways.rule,
        ways=ways.device,
        rows=next(rows for rows in row_stairs(requests, real, draft, chosen=ways.chosen) if rows >= used),
        features=features,
        lists=generation if features & Feature.LISTED else 0,
        is_chain=is_chain,
        behind=behind,
        waits=spans[0].follow is Follow.LATER and bool(ways.device),
    )


def sizes_for(features: Feature, draft: int, behind: int) -> tuple[int, ...]:
    """What the requests of such steps are padded to. draft: most draft rows of a request."""
    if behind:
        return DRAFTING
    return FEW_KINDS if features != CLASSES[0] else PACKING if draft else REQUESTS


def row_stairs(requests: int, real: int, draft: int, *, chosen: bool) -> tuple[int, ...]:
    """Numbers of rows that steps of so many requests are padded to, the smallest first. chosen: whether depths are, so
    that any number of rows may occur."""
    whole = requests * (real + draft)
    if requests < FEWEST_PACKED or real > 1 or not draft:
        return (whole,)
    if chosen:
        return (*(rows for rows in _stairs_to(whole) if rows > requests), whole)
    if whole < READS_WEIGHTS:
        return (requests + math.ceil(ONE_SHARE * requests * draft), whole)
    return (*range(requests + TILE - requests % TILE, whole, TILE), whole)


@cache
def _stairs_to(whole: int) -> tuple[int, ...]:
    """Few where a step is as long with any number of rows, since it has to read the weights."""
    powers = [1 << exponent for exponent in range(4, whole.bit_length())]
    stairs = (rows for power in powers for rows in (power, power * 5 // 4 if power >= 256 else 0, power * 3 // 2))
    return tuple(rows for rows in stairs if 0 < rows < whole)


def padded_size(requests: int, sizes: Sequence[int] = REQUESTS) -> int:
    return next(size for size in sizes if size >= requests)


class Inputs:
    """Slot, maximum real rows, maximum draft rows and way of drafting of each request, where a graph reads them."""

    def __init__(self, requests: int, device: torch.device) -> None:
        self._rows = torch.zeros(4, requests, dtype=torch.int64, device=device)
        self._rows[0] = -1  # the padding slot, until it is filled
        self._rows[1] = 1
        self._staging = [staging(4, requests, device=device) for _ in range(BUFFERS)]
        self._columns = torch.arange(MAX_DRAFT_ROWS, device=device)
        self._turn = 0
        self._last: list[tuple[int, int, int, int]] | None = None
        self.slots, self.reals, self.drafts, self.ways = self._rows.unbind(0)

    def fill(self, spans: tuple[Span, ...], numbers: dict[int, int]) -> None:
        """Write the spans' inputs, padded to the captured size. numbers: as in Ways."""
        rows = [(span.request.slot, span.real, span.draft, numbers[id(span.request.speculation)]) for span in spans]
        if rows == self._last:
            return
        staged = self._staging[self._turn]
        self._turn = (self._turn + 1) % BUFFERS
        staged[:, : len(rows)] = torch.tensor(rows, dtype=torch.int64).t()
        staged[0, len(rows) :] = -1
        staged[1, len(rows) :] = 1
        staged[2:, len(rows) :] = 0
        self._rows.copy_(staged, non_blocking=True)
        self._last = rows

    def within(self, draft: Draft) -> torch.Tensor:
        """[R, W] bool: the draft's valid rows that their spans have room for."""
        return draft.valid & (self._columns[: draft.width] < self.drafts[:, None])
