"""How many rows a request wants, needs at least, and can use. Arithmetic on one request; no queue, no pages.

A request *owes* the real rows from its first uncomputed token to its last known one. A span that runs all of
them decides. A *whole* request's deciding span has its full draft or is not run, so that span is due as one
piece once the debt is what a window leaves behind; a longer debt is a prompt, and may be worked off in
chunks.
"""

from __future__ import annotations

import math

from stridelm.types import Request


def first_row(request: Request) -> int:
    """Storage index of the next real row; with rows in flight, an upper bound on it."""
    return request.computed + request.rows_in_flight


def blocked(request: Request) -> bool:
    """Whether to leave a running request out until what is in flight of it has landed: the host must see its tokens
    first, or they are sure to be its last."""
    if not request.rows_in_flight:
        return False
    return request.host_bound or len(request.output_ids) + request.tokens_in_flight >= most_output(request)


def uncomputed_rows(request: Request, start: int) -> int:
    """Real rows from storage index `start` until the request decides.

    When rows in flight reach past the known tokens, their span decides: what it leaves is bounded, not known.
    """
    if start < request.known:
        return request.known - start
    return window_leftover(request) if request.all_or_nothing else 1


def window_leftover(request: Request) -> int:
    """Most real rows that a deciding span of a whole request leaves for the next: it emits at most one token
    for the last real row and one for each draft row, and commits none of them."""
    return request.rows_by_depth[-1] + 1


def least_span(request: Request, uncomputed: int) -> tuple[int, int]:
    """(real rows, depth) of the smallest span worth running: one row, or a window that is due."""
    if request.all_or_nothing and uncomputed <= window_leftover(request):
        return uncomputed, len(request.rows_by_depth) - 1
    return 1, 0


def useful_depth(request: Request) -> int:
    """Deepest draft from which a token could still be emitted. A whole request's is not ours to choose."""
    deepest = len(request.rows_by_depth) - 1
    if request.all_or_nothing:
        return deepest
    return int(max(0, min(deepest, most_output(request) - len(request.output_ids) - request.tokens_in_flight - 1)))


def most_output(request: Request) -> float:
    """Most tokens of output that the request can come to have."""
    limits = (request.params.max_tokens, request.room)
    return min((limit for limit in limits if limit is not None), default=math.inf)


def smallest_budget(request: Request) -> int:
    """Rows that a step must be able to hold for this request to go on alone: checked when it is added."""
    return window_leftover(request) + request.rows_by_depth[-1] if request.all_or_nothing else 1
