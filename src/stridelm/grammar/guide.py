"""A request's grammar, and what may follow each of its rows.

Like every history, a matcher's state belongs to the row: for a draft row it reads on along the row's path, fills the
mask, and is rolled back by as many tokens. So a rejected draft leaves nothing behind, and rows of a tree, of a window
and of plain decoding are masked alike.

The work behind a mask is counted and limited by llguidance (`LIMITS` of compiler.py), not timed: whether a grammar can
be followed is the same on every machine.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stridelm.grammar.share import MaskShare
from stridelm.types import Request

NOTHING_LEFT = "the grammar and the other parameters left no token"
TOO_SLOW = "the grammar takes too long to follow; make it simpler"
WORD = 32
"""Tokens per word of a mask."""


@dataclass(eq=False, slots=True)
class Compiled:
    """A grammar, shared by all requests that have it."""

    matcher: Any
    """One that has read nothing; requests have copies."""
    words: int
    """Of a mask."""
    eos_ids: frozenset[int]
    size: int
    """Bytes that it is counted with in caches."""
    mask_s: float = 0.0
    """Seconds that a mask takes, a running mean."""
    broken: str | None = None
    """Why it could not be followed any further by some request: others are refused from then on."""


class Guide:
    """A matcher that follows a request's output."""

    def __init__(self, grammar: Compiled, request: Request, share: MaskShare) -> None:
        self.grammar = grammar
        self._share = share
        self._matcher = grammar.matcher.deep_copy()
        self._request = request
        self._read = 0
        """Output tokens that the matcher has read."""
        self.broken: str | None = None
        """Why the output can no longer follow the grammar."""

    @property
    def request(self) -> Request:
        """The request that the grammar belongs to."""
        return self._request

    def catch_up(self) -> None:
        """Read the output tokens that are new since the last call."""
        output = self._request.output_ids
        new = output[self._read :]
        if new and self.broken is None and not self.ended:
            taken = self._matcher.try_consume_tokens(new)
            self._read += taken
            if self._matcher.is_error():
                self.broken = self.grammar.broken = TOO_SLOW
            elif taken < len(new) and not self.ended:
                self.broken = NOTHING_LEFT

    @property
    def ended(self) -> bool:
        """Whether no further token is allowed: after one that ends the text, or, in a model that has none, where
        nothing can follow."""
        if self.broken is not None:
            return False
        if self.grammar.eos_ids:
            return self._read > 0 and self._request.output_ids[self._read - 1] in self.grammar.eos_ids
        return bool(self._matcher.is_stopped())

    @property
    def read(self) -> int:
        """Tokens of the request, prompt and output, that the matcher is past."""
        return len(self._request.prompt_ids) + self._read

    def mask(self, path: Sequence[int]) -> torch.Tensor | None:
        """[ceil(V / 32)] int32 on the host, one bit per token, lowest first: the tokens allowed after the output and
        `path`. None if the grammar does not allow such a path, or nothing may follow it."""
        if self.broken is not None or self.ended:
            return None
        began = time.thread_time()
        taken = self._matcher.try_consume_tokens(list(path)) if path else 0
        mask = None
        if taken == len(path) and not self._ends(path):
            data = bytearray(self._matcher.compute_bitmask())
            mask = torch.frombuffer(data, dtype=torch.int32)[: self.grammar.words]
        seconds = time.thread_time() - began
        self.grammar.mask_s += 0.1 * (seconds - self.grammar.mask_s)
        held_up = self._share.charge(self._request.tenant, seconds)
        if held_up or self._matcher.is_error():
            self.broken = self.grammar.broken = TOO_SLOW
            return None
        if taken:
            self._matcher.rollback(taken)
        return mask

    def _ends(self, path: Sequence[int]) -> bool:
        if self.grammar.eos_ids:
            return bool(path) and path[-1] in self.grammar.eos_ids
        return bool(self._matcher.is_stopped())


def allowed(masks_GW: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """[G, V] bool of masks [G, ceil(V / 32)] int32, on the device of the masks."""
    bits = torch.arange(WORD, dtype=torch.int32, device=masks_GW.device)
    return ((masks_GW[:, :, None] >> bits) & 1).view(len(masks_GW), -1)[:, :vocab_size].bool()
