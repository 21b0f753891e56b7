"""Estimates a delta's memory, so that unread output can be bounded."""

from __future__ import annotations

from stridelm.server.messages import Delta

DELTA, TOKEN, SCORE = 400, 100, 160
"""Bytes of the objects themselves. A score's text is usually short and not shared."""


def weight(delta: Delta) -> int:
    """Approximate bytes."""
    text = sum(map(len, delta.pieces))
    scores = sum(map(len, delta.logprobs or ()))
    packed = sum(map(len, delta.prompt_logprobs or ())) + len(delta.hidden_states or b"")
    return DELTA + TOKEN * len(delta.token_ids) + text + SCORE * scores + packed
