"""How often a stream repeats itself.

Each event of SGLang's streams holds all of its sample so far, so that a stream's bytes grow with the square of its
length: 3.7 GB of a request of 5 kB. No event is needed but the last, so once a stream has said much, the next comes
when there is enough to add to be worth repeating the rest.
"""

from __future__ import annotations

from stridelm.server.sglang.response import SampleResponse

GROWTH = 8
"""Then an event adds an eighth at least, and all that follow come to nine times the last."""


class Pace:
    """most_bytes: of a stream, until its events come less often."""

    def __init__(self, most_bytes: int, samples: int) -> None:
        self._left = most_bytes
        self._tokens = [0] * samples
        """Of each sample when it was last told."""

    def due(self, index: int, sample: SampleResponse) -> bool:
        """Whether its next event is to be sent now."""
        if self._left > 0 or sample.ended:
            return True
        sent = self._tokens[index]
        return sample.tokens - sent >= max(1, sent // GROWTH)

    def sent(self, index: int, sample: SampleResponse, size: int) -> None:
        """An event of so many bytes was."""
        self._left -= size
        self._tokens[index] = sample.tokens
