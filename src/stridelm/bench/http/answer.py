"""One HTTP/1.1 answer as it arrives: while others are being timed nothing of it is parsed but its end.

A server of an 8B model sends some ten thousand events per second to one client process. To decode each would make the
client late, and its lateness would be measured. So bytes are kept with their time of arrival, and `events` reads them
once the load is over.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

LAST_CHUNK = b"\r\n0\r\n\r\n"
"""Cannot be inside an event: JSON writes line ends of strings as escapes."""


@dataclass
class Answer:
    sent: float
    """When its request was sent, in seconds."""
    times: list[float] = field(default_factory=list)
    parts: list[bytes] = field(default_factory=list)
    _tail: bytes = b""
    _chunked: bool | None = None
    _length: int = 0

    def add(self, now: float, data: bytes) -> bool:
        """Take bytes that arrived. Returns whether the answer is complete."""
        self.times.append(now)
        self.parts.append(data)
        if self._chunked is None:
            self._read_head()
        if self._chunked:
            self._tail = (self._tail + data)[-len(LAST_CHUNK) :]
            return self._tail == LAST_CHUNK
        return self._chunked is False and sum(map(len, self.parts)) >= self._length

    @property
    def status(self) -> int:
        return int(b"".join(self.parts).split(b" ", 2)[1])

    def text(self) -> str:
        """Everything that arrived, for an error message."""
        return b"".join(self.parts).decode(errors="replace")

    def events(self) -> list[tuple[float, dict[str, Any]]]:
        """Server-sent events with JSON, each with the time at which its last byte arrived. Raises ValueError if the
        answer is not a stream of them."""
        if self.status != 200 or not self._chunked:
            raise ValueError(f"not a stream of events: {self.text()[:500]}")
        raw = b"".join(self.parts)
        arrived = list(accumulate(map(len, self.parts)))
        content, chunks = _dechunked(raw, raw.index(b"\r\n\r\n") + 4)
        ends = [end for end, _ in chunks]
        found, at = [], 0
        for line in content.split(b"\n"):
            at = min(at + len(line) + 1, len(content))
            if line.startswith(b"data: {"):
                end, raw_end = chunks[bisect_left(ends, at)]
                part = bisect_left(arrived, raw_end - (end - at))
                found.append((self.times[part], json.loads(line[6:])))
        return found

    def _read_head(self) -> None:
        head, blank, _ = b"".join(self.parts).partition(b"\r\n\r\n")
        if not blank:
            return
        fields = dict(line.lower().split(b":", 1) for line in head.split(b"\r\n")[1:])
        self._chunked = b"chunked" in fields.get(b"transfer-encoding", b"")
        self._length = len(head) + len(blank) + int(fields.get(b"content-length", b"0"))
        self._tail = b"".join(self.parts[:-1])[-len(LAST_CHUNK) :]


def _dechunked(raw: bytes, at: int) -> tuple[bytes, list[tuple[int, int]]]:
    """The content of the chunks from `at` on, and for each chunk where it ends in the content and in `raw`."""
    pieces: list[bytes] = []
    chunks: list[tuple[int, int]] = []
    length = 0
    while True:
        line = raw.index(b"\r\n", at)
        size = int(raw[at:line].partition(b";")[0], 16)
        if not size:
            return b"".join(pieces), chunks
        first = line + 2
        pieces.append(raw[first : first + size])
        length += size
        chunks.append((length, first + size))
        at = first + size + 2
