"""Where an output ends, and its text: from the tokenizer's vocabulary and the rules alone.

A byte-level token is a few bytes, written with one printable character each (GPT-2's table). A text is all its bytes
decoded at once; however early the engine emits parts of a text, together they must equal it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer
from transformers import AutoTokenizer

from fuzz.definitions import Params

REPLACEMENT = "\ufffd"


def byte_of_character() -> dict[str, int]:
    """GPT-2's table: printable latin-1 maps to itself, the other bytes to the characters from U+0100 on."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(others)}


class Alphabet:
    """The tokenizer of a checkpoint directory."""

    def __init__(self, path: Path) -> None:
        loaded = AutoTokenizer.from_pretrained(path)  # some classes add tokens
        content = json.loads(loaded.backend_tokenizer.to_str())
        table = byte_of_character()
        self._bytes = {token: bytes(map(table.__getitem__, text)) for text, token in content["model"]["vocab"].items()}
        added = content["added_tokens"]
        self._bytes |= {entry["id"]: entry["content"].encode() for entry in added}
        self.eos_id: int | None = loaded.eos_token_id
        self.special = {entry["id"] for entry in added if entry["special"]}
        self._encoder: Tokenizer = loaded.backend_tokenizer

    def encode(self, text: str) -> list[int]:
        return list(self._encoder.encode(text, add_special_tokens=False).ids)

    def bytes_of(self, ids: Sequence[int], skip_special: bool) -> bytes:
        """An id that the tokenizer does not know has no bytes."""
        return b"".join(self._bytes.get(i, b"") for i in ids if not (skip_special and i in self.special))

    def text_behind(self, prompt: Sequence[int], output: Sequence[int], skip_special: bool) -> str:
        """Text of prompt and output without the prompt's. A character begun in the prompt and completed in the output
        belongs to the output."""
        first = self.bytes_of(prompt, skip_special)
        before = first.decode("utf-8", "replace")
        whole = (first + self.bytes_of(output, skip_special)).decode("utf-8", "replace")
        return whole[len(before) :] if whole.startswith(before) else whole[len(before) - 1 :]


@dataclass(frozen=True)
class Ending:
    tokens: int
    """Number of output tokens, including the last."""
    reason: str | None
    """None if the output goes on."""
    stop: int | str | None
    text: str | None


def ending(
    prompt: Sequence[int],
    output: Sequence[int],
    params: Params,
    eos_ids: Sequence[int],
    context: int,
    alphabet: Alphabet | None,
) -> Ending:
    """Where these tokens end, read one by one: an output of at most min_tokens tokens does not end. The tokenizer's own
    end of text has no stop reason, other ends of text and stop ids are their own, and among stop strings that are
    completed by the same token, the first in the list counts. eos_ids: from the checkpoint's files."""
    min_tokens, max_tokens = params.get("min_tokens", 0), params.get("max_tokens", 16)
    stops, include = params.get("stop") or (), params.get("include_stop_str_in_output", False)
    stops = (stops,) if isinstance(stops, str) else stops

    def text(count: int) -> str | None:
        if alphabet is None:
            return None
        return alphabet.text_behind(prompt, output[:count], params.get("skip_special_tokens", True))

    ignored = params.get("ignore_eos", False)
    own = None if ignored or alphabet is None else alphabet.eos_id
    enders = {*(() if ignored else eos_ids), *(params.get("stop_token_ids") or ())}
    settled = 0
    for count, token in enumerate(output, 1):
        armed = count > min_tokens
        ends = armed and (token == own or token in enders)
        reason = None if token == own else token
        if ends and not include:
            return Ending(count, "stop", reason, text(count - 1))
        said = text(count)
        if said is not None:
            # A possibly incomplete character at the end matches nothing yet.
            ready = len(said) - (said.endswith(REPLACEMENT) and not ends)
            if armed:
                for end in range(settled + 1, ready + 1):
                    met = [stop for stop in stops if said[:end].endswith(stop)]
                    if met:
                        shown = said[:end] if include else said[: end - len(met[0])]
                        return Ending(count, "stop", met[0], shown)
            settled = max(settled, ready)
        if ends:
            return Ending(count, "stop", reason, said)
        if count == max_tokens or len(prompt) + count >= context:
            return Ending(count, "length", None, said)
    return Ending(len(output), None, None, text(len(output)))
