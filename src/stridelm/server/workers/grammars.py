"""Tries out a grammar in a worker: some never finish compiling, others take seconds per token to follow."""

from __future__ import annotations

import msgspec

from stridelm.params import StructuredOutputs
from stridelm.server.workers.nursery import Work


class Opening(msgspec.Struct):
    """model: directory of the tokenizer. vocab_size: of the model."""

    model: str
    vocab_size: int


def prepare(opening: bytes) -> Work:
    """A task is StructuredOutputs' fields as JSON; the result, also JSON, is an error message, or the bytes that the
    compiled grammar is counted with."""
    from stridelm.grammar.compiler import Grammars
    from stridelm.text.tokenizer import Tokenizer

    setup = msgspec.json.decode(opening, type=Opening)
    tokenizer = Tokenizer.load(setup.model)
    grammars = Grammars(tokenizer, setup.vocab_size, tokenizer.eos_ids)

    def work(task: bytes) -> bytes:
        try:
            return msgspec.json.encode(grammars.try_out(StructuredOutputs(**msgspec.json.decode(task))))
        except ValueError as error:
            return msgspec.json.encode(str(error))

    return work
