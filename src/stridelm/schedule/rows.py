"""How many rows a request wants, needs at least, and can use. Arithmetic on one request; no queue, no pages.

A request's *uncomputed* rows are the real rows from its first uncomputed token to its last known one. A span that runs
all of them decides. The deciding span of an `all_or_nothing` request has its full draft or is not run, so it is
scheduled in one piece once no more rows are uncomputed than a window can leave; if there are more, it is a prompt,
which may be run in chunks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from stridelm.types import Follow, Request, Span


def first_row(request: Request) -> int:
    """Storage index of the next real row; with rows in flight, an upper bound on it."""
    return request.computed + request.rows_in_flight


def blocked(request: Request) -> bool:
    """Whether to leave a running request out: it rests, or its step in flight has to land first, because the host must
    see its tokens or because they are certain to be its last."""
    if request.resting or not request.rows_in_flight:
        return request.resting
    return request.host_bound or len(request.output_ids) + request.tokens_in_flight >= most_output(request)


def uncomputed_rows(request: Request, start: int) -> int:
    """Real rows from storage index `start` until the request decides.

    When rows in flight reach past the known tokens, their span decides, and only a bound on what it leaves is known.
    """
    if start < request.known:
        return request.known - start
    return most_decoded(request)


def most_decoded(request: Request) -> int:
    """Maximum real rows of a span that only decodes: more are a prompt, or its end."""
    return window_leftover(request) if request.all_or_nothing else 1


def has_prompt(span: Span) -> bool:
    """Whether the span has rows of a prompt."""
    return not span.decides or span.real > most_decoded(span.request)


def is_unseen(request: Request, real: int) -> bool:
    """Whether a span of so many real rows that decides has rows of a prompt, and its drafter guesses nothing before it
    has seen these."""
    return real > 1 and request.needs_states


def catches_up(span: Span) -> bool:
    """Whether the step computes what the drafter's KV lacks of earlier steps. One that has made only entries counts as
    a row behind, and lacks none."""
    return span.behind > (span.follow is Follow.ENTRIES) and span.follow is not Follow.LATER


def behind_after(span: Span) -> int:
    """How many rows the drafter is behind when the step has run."""
    return span.behind + span.real if span.follow is Follow.LATER else int(span.follow is Follow.ENTRIES)


def window_leftover(request: Request) -> int:
    """Maximum real rows that a deciding span of an `all_or_nothing` request leaves for the next: it emits at most one
    token for the last real row and one for each draft row, and commits none of them."""
    return request.rows_by_depth[-1] + 1


def least_span(request: Request, uncomputed: int) -> tuple[int, int]:
    """(real rows, depth) of the smallest span worth running: one row, or the whole window of an `all_or_nothing`
    request."""
    if request.all_or_nothing and uncomputed <= window_leftover(request):
        return uncomputed, len(request.rows_by_depth) - 1
    return 1, 0


def decoded_rows(requests: Sequence[Request], depths: Sequence[int]) -> int:
    """Rows of a step that only decodes these requests, drafted to these depths, before it is padded."""
    return len(requests) + sum([each.rows_by_depth[depth] for each, depth in zip(requests, depths, strict=True)])


def following_rows(request: Request, end: int, *, served: bool, decides: bool) -> int:
    """Rows of the smallest span worth running in the next step, planned before this one's verdict is read; 0 if the
    request will be blocked then.

    end: one past the last storage index that the request may have written by then. served, decides: whether it has a
    span in this step, and whether that span decides.
    """
    if served and request.host_bound:
        return 0
    if len(request.output_ids) + request.tokens_in_flight + decides >= most_output(request):
        return 0
    real, depth = least_span(request, uncomputed_rows(request, end))
    return real + request.rows_by_depth[depth]


def has_draft_in_flight(request: Request) -> bool:
    """Whether a step in flight has draft rows for the request that it could have gone without."""
    real = request.known - 1 + request.tokens_in_flight
    return request.tokens_in_flight > 0 and not request.all_or_nothing and first_row(request) > real


def useful_depth(request: Request) -> int:
    """Deepest draft from which a token could still be emitted, as far as its drafter has found any. That of an
    `all_or_nothing` request is fixed."""
    deepest = len(request.rows_by_depth) - 1
    if request.all_or_nothing:
        return deepest
    left = most_output(request) - len(request.output_ids) - request.tokens_in_flight - 1
    return int(max(0, min(deepest, left, deepest if request.found is None else request.found.levels)))


def most_output(request: Request) -> float:
    """Maximum number of output tokens that the request can reach."""
    asked, room = request.params.max_tokens, request.room
    if asked is None:
        return math.inf if room is None else room
    return asked if room is None else min(asked, room)


def longest(request: Request, max_length: int) -> int:
    """Maximum number of tokens that the request can reach, prompt included. max_length: those of a context."""
    if request.params.max_tokens is None:
        return max_length
    return min(max_length, len(request.prompt_ids) + request.params.max_tokens)


def smallest_budget(request: Request) -> int:
    """Rows that a step must be able to hold to run this request alone: checked when the request is added."""
    return window_leftover(request) + request.rows_by_depth[-1] if request.all_or_nothing else 1
