"""The messages between the server and a worker that reads a large body."""

from __future__ import annotations

import msgspec


class Opening(msgspec.Struct):
    model: str
    chat_template: str | None
    context: int
    vocab_size: int
    token_bytes: int | None


class Read(msgspec.Struct, array_like=True):
    rest: bytes = b""
    """The body as JSON, with stubs in place of its prompts."""
    prompts: list[bytes] | None = None
    """Token ids, packed."""
    reply: bytes | None = None
    """The whole answer, if the worker can make it from the body alone."""
    error: tuple[int, str, str | None] | None = None
    """Status, message and field."""


encode = msgspec.msgpack.Encoder().encode
decoded = msgspec.msgpack.Decoder(Read).decode
