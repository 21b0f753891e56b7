"""About what a delta takes in memory, so that what nobody reads can be bounded."""

from __future__ import annotations

from collections.abc import Sequence

from stridelm.server.messages import Delta, Scores

DELTA, TOKEN, SCORE = 400, 100, 160
"""Bytes of the objects themselves. A score's text is mostly short and its own."""


def weight(delta: Delta) -> int:
    """Bytes, roughly."""
    text = sum(map(len, delta.pieces))
    scores = _scores(delta.logprobs) + _scores(delta.prompt_logprobs)
    return DELTA + TOKEN * len(delta.token_ids) + text + SCORE * scores + len(delta.hidden_states or b"")


def _scores(entries: Sequence[Scores | None] | None) -> int:
    return 0 if entries is None else sum(len(entry) for entry in entries if entry is not None)
