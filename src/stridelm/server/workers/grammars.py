"""Trying a grammar out, in a worker: compiling some takes for ever, following others takes seconds a token."""

from __future__ import annotations

import msgspec

from stridelm.params import StructuredOutputs
from stridelm.server.workers.nursery import Work


class Opening(msgspec.Struct):
    """model: directory of the tokenizer. vocab_size: of the model."""

    model: str
    vocab_size: int


def prepare(opening: bytes) -> Work:
    """A piece of work is StructuredOutputs' fields as JSON, what comes of it what is wrong with them, or null."""
    from stridelm.sample.grammar import Grammars
    from stridelm.text.tokenizer import Tokenizer

    given = msgspec.json.decode(opening, type=Opening)
    tokenizer = Tokenizer.load(given.model)
    grammars = Grammars(tokenizer, given.vocab_size, tokenizer.eos_ids)

    def work(task: bytes) -> bytes:
        try:
            grammars.try_out(StructuredOutputs(**msgspec.json.decode(task)))
        except ValueError as error:
            return msgspec.json.encode(str(error))
        return msgspec.json.encode(None)

    return work
