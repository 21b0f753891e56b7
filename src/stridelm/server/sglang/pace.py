"""How often a stream sends its events.

Each event of SGLang's streams holds all of its sample so far, so a stream's bytes grow with the square of its length:
3.7 GB for a request of 5 kB. Only the last event is needed, so once a stream has sent much, the next event comes only
when the sample has grown enough to be worth repeating.
"""

from __future__ import annotations

from stridelm.server.sglang.response import SampleResponse

GROWTH = 8
"""Each such event adds at least an eighth, so together they have at most nine times the bytes of the last one."""


class Pace:
    """most_bytes: bytes that a stream may send before its events become less frequent."""

    def __init__(self, most_bytes: int, samples: int) -> None:
        self._left = most_bytes
        self._tokens = [0] * samples
        """Each sample's tokens in its last event."""

    def due(self, index: int, sample: SampleResponse) -> bool:
        """Whether the sample's next event should be sent now."""
        if self._left > 0 or sample.ended:
            return True
        sent = self._tokens[index]
        return sample.tokens - sent >= max(1, sent // GROWTH)

    def sent(self, index: int, sample: SampleResponse, size: int) -> None:
        """Record that an event of `size` bytes was sent."""
        self._left -= size
        self._tokens[index] = sample.tokens
