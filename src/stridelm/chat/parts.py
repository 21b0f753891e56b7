"""What a message consists of, as it is found."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Text:
    """More of the reasoning, or of the content."""

    field: Literal["reasoning", "content"]
    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A complete call. index: among the message's calls. arguments: a JSON object, as text."""

    index: int
    id: str
    name: str
    arguments: str


Part = Text | ToolCall

MISTRAL_ID = 9
"""Letters and digits in a call's id, without which Mistral's templates refuse it."""


def call_id(style: str, name: str, index: int) -> str:
    """A new id for a call, in the style that the model's template expects."""
    if style == "kimi":
        return f"functions.{name}:{index}"
    return secrets.token_hex(MISTRAL_ID)[:MISTRAL_ID] if style == "mistral" else f"call_{secrets.token_hex(12)}"


def mistral_id(id: str) -> str:
    """The id that stands for another in templates that accept nine letters and digits only."""
    if len(id) == MISTRAL_ID and id.isascii() and id.isalnum():
        return id
    return hashlib.blake2b(id.encode()).hexdigest()[:MISTRAL_ID]
