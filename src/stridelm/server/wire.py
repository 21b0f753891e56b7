"""A connection's transport for uvicorn that tracks how much has been written, and closes without a reset. Streams write
their events to it directly.

Closing a socket with unread received data resets the connection, and the client may lose an answer that is on its way.
So a connection whose request has not arrived completely first closes only its sending side, and keeps receiving for a
moment (RFC 9112, 9.6).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

PIECE = 16 << 10
"""Bytes that must leave for the client to count as reading: a trickle does not."""


class Wire(asyncio.Transport):
    """unread: whether a part of the client's request has not been received yet."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__()
        self.inner = transport
        self.lingers_until: float | None = None
        self.unread = False
        self.on_writable: Callable[[], None] = nothing
        """Called when the client has read enough for `writable` to hold again."""
        self._paused = False
        self._flow_paused = self._held = False
        """Whether reading is paused by uvicorn's flow control, and because received bytes wait for the parser."""
        self._written = 0
        self._left_at_mark = 0
        self._marked = time.monotonic()

    @property
    def waiting(self) -> int:
        """Bytes that the client has not read yet."""
        return self.inner.get_write_buffer_size()

    def idle_seconds(self, now: float) -> float:
        """Seconds in which the client has read less than PIECE bytes while some were waiting."""
        left = self._written - self.waiting
        if not self.waiting or left - self._left_at_mark >= PIECE:
            self._left_at_mark, self._marked = left, now
        return now - self._marked

    @property
    def writable(self) -> bool:
        """Whether what is written will be sent soon: the client keeps up, and the connection is open."""
        return not self._paused and not self.is_closing()

    def pause_writing(self) -> None:
        """Called when much is waiting."""
        self._paused = True

    def resume_writing(self) -> None:
        """Called when most of it has left."""
        self._paused = False
        self.on_writable()

    def write_chunk(self, data: bytes) -> None:
        """Write a part, not empty, of a body in chunked transfer coding (RFC 9112, 7.1), unless the connection is being
        closed. Does not wait: check `writable`."""
        if not self.is_closing():
            self.write(b"%x\r\n%b\r\n" % (len(data), data))

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        self._written += len(data)
        self.inner.write(data)

    def close(self) -> None:
        """Close once everything written has left. While a request is still arriving: after LINGER_S at the latest."""
        if not self.unread or self.inner.is_closing():
            self.inner.close()
        elif self.lingers_until is None:
            self.lingers_until = time.monotonic() + LINGER_S
            self.inner.resume_reading()
            self.inner.write_eof()

    def abort(self) -> None:
        self.inner.abort()

    def is_closing(self) -> bool:
        return self.lingers_until is not None or self.inner.is_closing()

    def pause_reading(self) -> None:
        self._flow_paused = True
        self._read_or_not()

    def resume_reading(self) -> None:
        self._flow_paused = False
        self._read_or_not()

    def hold_reading(self, held: bool) -> None:
        """Pause reading, beside flow control, or end that pause."""
        if held is not self._held:
            self._held = held
            self._read_or_not()

    def _read_or_not(self) -> None:
        if self.is_closing():
            return  # what is received is dropped
        if self._flow_paused or self._held:
            self.inner.pause_reading()
        else:
            self.inner.resume_reading()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self.inner.get_extra_info(name, default)

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.inner.set_protocol(protocol)


LINGER_S = 2.0


def nothing() -> None:
    """What is called when nobody waits."""
