"""What a graph is captured for, the stand-ins for its requests during capture, and the inputs that select requests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from stridelm.engine.ways import Way, Ways
from stridelm.params import Speculation
from stridelm.sample.table import Feature
from stridelm.schedule.rows import most_decoded
from stridelm.types import Draft, Request, Span
from stridelm.upload import staging

REQUESTS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512)
"""Sizes that a step's requests are padded to."""
DRAFTING = (4, 16, 64, 256, 512)
"""The same if only the proposals are captured. Few, because each is captured while a request waits, and serves fewer
steps."""
PACKED, FEWEST_PACKED = 0.7, 32
"""A step of at least so many requests whose drafts have at most this share of the rows that they could have, because
some of its requests are plain or draft less than others, runs in that many rows."""
BUFFERS = 4
"""Host copies of the inputs that may be in transfer at once; more than there are steps in flight."""


CLASSES = (Feature.SAMPLED | Feature.TRUNCATED, Feature.ALL & ~Feature.GRAMMAR)
"""What a graph provides for: the first that has all that a step's requests need. A request that needs less costs an
empty launch per feature. Grammars are matched on the host, so their steps are not captured. Steps that draft less deep
than they could (`Ways.shallow`) are captured for the first alone: there are many of them."""


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
    """Of the whole step: enough for every request to have its most, or fewer (PACKED)."""
    features: Feature
    """One of CLASSES. Whose rows need which of them, a graph reads on the device."""
    lists: int = 0
    """Generation of the sampling table, if the step reads lists of it: a graph of an older generation reads tensors
    that no longer exist, and is never replayed again."""
    is_chain: bool | None = None
    """Whether the host's proposals are chains; None: the host proposes nothing."""

    def stand_ins(self, like: Request, reach: int, way: Way | None = None) -> tuple[Span, ...]:
        """Placeholder spans, for host code that inspects spans during capture. reach: a bound on every span's end.
        way: as its drafter sees them."""
        params = like.params
        if self.features & Feature.PENALTIES:  # rows of any request in such a step may look back
            params = replace(params, presence_penalty=1.0)
        depth, rows = (self.depth, self.draft) if way is None else (way.depth, way.rows)
        span = Span(replace(like, slot=-1, params=params), reach - self.real, self.real, depth, rows)
        return (span,) * self.requests


def kind_of(spans: Sequence[Span], ways: Ways, needed: Feature, is_chain: bool | None, generation: int) -> Kind:
    """The kind of a step of these spans, of which there are at most REQUESTS[-1]. needed: features of their requests,
    grammars apart. is_chain: as in Kind. generation: of the sampling table."""
    features = next(each for each in CLASSES if needed in each)
    requests = padded_size(len(spans))
    real = most_decoded(ways.like)
    draft = max([way.rows for way in ways.device] + [0 if is_chain is None else ways.host_rows])
    used = requests * real + sum(min(span.draft, draft) for span in spans)
    return Kind(
        requests=requests,
        real=real,
        draft=draft,
        depth=max([way.depth for way in ways.device] + [0 if is_chain is None else ways.host_depth]),
        rule=ways.rule,
        ways=ways.device,
        rows=next(rows for rows in row_stairs(requests, real, draft, packs=not ways.shallow) if rows >= used),
        features=features,
        lists=generation if features & Feature.LISTED else 0,
        is_chain=is_chain,
    )


def row_stairs(requests: int, real: int, draft: int, *, packs: bool) -> tuple[int, ...]:
    """Numbers of rows that steps of so many requests are padded to, the smallest first. packs: whether rows may be
    fewer than all requests could have."""
    whole = requests * (real + draft)
    if not packs or requests < FEWEST_PACKED or real > 1 or not draft:
        return (whole,)
    return (requests + math.ceil(PACKED * requests * draft), whole)


def padded_size(requests: int, sizes: Sequence[int] = REQUESTS) -> int:
    return next(size for size in sizes if size >= requests)


class Inputs:
    """Slot, maximum real rows, maximum draft rows and way of drafting of each request, where a graph reads them."""

    def __init__(self, requests: int, device: torch.device) -> None:
        self._rows = torch.zeros(4, requests, dtype=torch.int64, device=device)
        self._rows[0] = -1  # the padding slot, until it is filled
        self._rows[1] = 1
        self._staging = [staging(4, requests, device=device) for _ in range(BUFFERS)]
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
        row = torch.arange(draft.width, device=self._rows.device)
        return draft.valid & (row < self.drafts[:, None])
