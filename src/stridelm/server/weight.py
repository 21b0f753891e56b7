"""About what a delta takes in memory, so that what nobody reads can be bounded."""

from __future__ import annotations

from stridelm.server.messages import Delta

DELTA, TOKEN, SCORE = 400, 100, 160
"""Bytes of the objects themselves. A score's text is mostly short and its own."""


def weight(delta: Delta) -> int:
    """Bytes, roughly."""
    text = sum(map(len, delta.pieces))
    scores = sum(map(len, delta.logprobs or ()))
    packed = sum(map(len, delta.prompt_logprobs or ())) + len(delta.hidden_states or b"")
    return DELTA + TOKEN * len(delta.token_ids) + text + SCORE * scores + packed
