"""The kinds of steps that ordinary traffic needs: they are captured before the engine is ready."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from stridelm.engine.kinds import CLASSES, REQUESTS, Kind, kind_of, padded_size, row_stairs
from stridelm.engine.ways import Ways, depths_of, ways_of
from stridelm.schedule.rows import most_decoded
from stridelm.types import Follow, Request, Span

MAX_ENDING = 4
"""Most requests whose shallower drafts are expected: those of requests that are about to end, rarely many at once."""


def expected_kinds(requests: tuple[Request, Request], most: int, generation: int) -> dict[Kind, Ways]:
    """Steps of up to `most` requests, for every class of parameters, the largest first.

    requests: one as the engine is configured, and one without speculation. A step with requests of both is of the first
    one's kind. generation: of the sampling table.
    """
    drafting, plain = requests
    likes = (drafting, plain) if drafting.rows_by_depth[-1] else (plain,)
    sizes = REQUESTS[: REQUESTS.index(padded_size(min(most, REQUESTS[-1]))) + 1]
    found: dict[Kind, Ways] = {}
    for size in reversed(sizes):
        for like in likes:
            for depth in depths_of(like)[: None if size <= MAX_ENDING or like.adaptive else 1]:
                span = Span(like, 0, most_decoded(like), depth, like.rows_by_depth[depth])
                found |= _of_spans((span,) * size, generation)
            if like.adaptive and like.draft_kv and like.draft_kv.may_wait:
                for span in (Span(like, 0, 1, follow=Follow.LATER), Span(like, 0, 1, behind=1)):
                    found |= _of_spans((span,) * size, generation)
    return found


def _of_spans(spans: tuple[Span, ...], generation: int) -> Iterator[tuple[Kind, Ways]]:
    """The kinds of steps with so many spans like these."""
    ways = ways_of(spans[:1])
    assert ways is not None
    # A draft made on the host may be a chain, a tree, or missing.
    hosted = (True, False, None) if ways.host_rows else (None,)
    for features, is_chain in itertools.product(CLASSES[: 1 if ways.shallow and spans[0].depth else None], hosted):
        kind = kind_of(spans, ways, features, is_chain, generation)
        for rows in row_stairs(kind.requests, kind.real, kind.draft, chosen=ways.chosen):
            yield replace(kind, rows=rows), ways
