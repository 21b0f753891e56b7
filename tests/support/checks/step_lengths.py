"""How many tokens each step emits for a request."""

from __future__ import annotations

from collections.abc import Sequence

from stridelm.engine.engine import Engine
from stridelm.types import Request


def step_lengths(engine: Engine, requests: Sequence[Request]) -> list[list[int]]:
    """Serve the engine's requests to their end. Returns, of each of these, the tokens of the steps that emitted any."""
    lengths: dict[str, list[int]] = {request.id: [] for request in requests}
    while engine.busy:
        for output in engine.step():
            lengths[output.request.id].append(len(output.new_token_ids))
    return list(lengths.values())
