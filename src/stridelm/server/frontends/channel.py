"""One end of the connection between the parent and a front-end: messages over a Unix socket."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Callable
from typing import Generic, TypeVar

from stridelm.server.frontends.messages import FromFrontend, ToFrontend, encode

HEAD = struct.Struct("<I")
"""A message's size in bytes."""
T = TypeVar("T")


class Channel(Generic[T]):
    """decode: of the messages that arrive."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, decode: Callable[[bytes], T]
    ) -> None:
        self._reader, self._writer, self._decode = reader, writer, decode

    @classmethod
    async def over(cls, line: socket.socket, decode: Callable[[bytes], T]) -> Channel[T]:
        """Takes the socket over."""
        reader, writer = await asyncio.open_unix_connection(sock=line)
        return cls(reader, writer, decode)

    def send(self, message: ToFrontend | FromFrontend) -> None:
        """Never blocks. Dropped if the other side has ended, which `messages` shows."""
        if not self._writer.is_closing():
            body = encode(message)
            self._writer.write(HEAD.pack(len(body)) + body)

    async def messages(self) -> AsyncIterator[T]:
        """What arrives, until the other side ends."""
        try:
            while True:
                [size] = HEAD.unpack(await self._reader.readexactly(HEAD.size))
                yield self._decode(await self._reader.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError):
            return

    def close(self) -> None:
        self._writer.transport.abort()
