"""The requests of a closed loop: the same for every server, and for the engine without one.

Imports nothing that is slow to import: every client process starts with it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

PROMPT, OUTPUT = (128, 512), (128, 384)
"""Shortest and longest, in tokens; all lengths are equally likely."""
VOCAB = 4088
"""Prompts are made of ids below this, which every model here has and which are not special in the built-in one."""
KINDS = ("plain", "json_schema", "penalties", "logprobs", "drafters")
ENTRY = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "count": {"type": "integer"}},
    "required": ["name", "count"],
    "additionalProperties": False,
}
SCHEMA = {
    "type": "object",
    "properties": {"entries": {"type": "array", "items": ENTRY, "minItems": 64}},
    "required": ["entries"],
    "additionalProperties": False,
}
"""Long enough for an output to end by its limit."""


@dataclass(frozen=True)
class Asked:
    number: int
    prompt: list[int]
    max_tokens: int


def stream_of(index: int, streams: int) -> Iterator[Asked]:
    """The requests of one of so many streams, one after another, without end."""
    number = index
    while True:
        draw = random.Random(number)
        prompt = draw.choices(range(VOCAB), k=draw.randint(*PROMPT))
        yield Asked(number, prompt, draw.randint(*OUTPUT))
        number += streams


def body_of(asked: Asked, kind: str, model: str, drafters: tuple[str, ...]) -> bytes:
    """The JSON of a streamed, greedy completion. drafters: NAME@DEPTH:RULE, which requests of that kind use in turn; a
    depth is a number or auto."""
    body: dict[str, Any] = {
        "model": model,
        "prompt": asked.prompt,
        "max_tokens": asked.max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if kind == "json_schema":
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "entries", "schema": SCHEMA}}
    else:
        body["ignore_eos"] = True
    if kind == "penalties":
        body |= {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1}
    elif kind == "logprobs":
        body["logprobs"] = 5
    elif kind == "drafters":
        drafter, _, rest = drafters[asked.number % len(drafters)].partition("@")
        depth, _, acceptance = rest.partition(":")
        body["speculation"] = {
            "drafter": drafter,
            **({"depth": depth if depth == "auto" else int(depth)} if depth else {}),
            **({"acceptance": acceptance} if acceptance else {}),
        }
    return json.dumps(body).encode()
