"""Grammars from clients are tried in a process of their own first, which is killed when it takes too long.

Compiling some of them takes for ever, following others takes seconds a token, and a thread cannot be stopped: neither
the engine nor the HTTP process may be where that is found out. What has passed is compiled by the engine, on a thread.

`python -m stridelm.server.grammar_desk`, started by Desk: JSON lines in, a JSON line out for each.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections import OrderedDict
from dataclasses import asdict
from typing import Any

from stridelm.params import StructuredOutputs
from stridelm.server.errors import bad_request
from stridelm.server.lifeline import end_with

COMPILE_S = 5.0
START_S = 60.0
REMEMBERED = 1024
LINE = 64 << 20
"""Longest line in bytes; bodies are limited before."""


class Desk:
    """model: directory of the tokenizer; vocab_size: of the model."""

    def __init__(self, model: str, vocab_size: int, timeout_s: float = COMPILE_S) -> None:
        self._model, self._vocab_size, self._timeout_s = model, vocab_size, timeout_s
        self._passed: OrderedDict[StructuredOutputs, None] = OrderedDict()
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    async def check(self, asked: StructuredOutputs) -> None:
        """Raises ApiError if it cannot be compiled, or not in time."""
        if asked in self._passed:
            return
        async with self._turn:
            try:
                process = await self._start()
                error = await asyncio.wait_for(self._ask(process, asdict(asked)), self._timeout_s)
            except asyncio.TimeoutError:
                self._kill()
                raise bad_request(
                    f"structured_outputs: the {asked.kind} took longer than {self._timeout_s:g} s to compile; make it "
                    "simpler",
                    "structured_outputs",
                ) from None
            except BaseException:  # half an answer may be on its way
                self._kill()
                raise
        if error is not None:
            raise bad_request(error, "structured_outputs")
        self._passed[asked] = None
        if len(self._passed) > REMEMBERED:
            self._passed.popitem(last=False)

    async def close(self) -> None:
        if self._process is not None:
            self._kill()

    async def _start(self) -> asyncio.subprocess.Process:
        if self._process is None or self._process.returncode is not None:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "stridelm.server.grammar_desk"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=LINE,
                start_new_session=True,
            )
            opening = {"model": self._model, "vocab_size": self._vocab_size, "parent": os.getpid()}
            await asyncio.wait_for(self._ask(self._process, opening), START_S)
        return self._process

    async def _ask(self, process: asyncio.subprocess.Process, question: dict[str, Any]) -> str | None:
        """What is wrong with it, or None."""
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(question).encode() + b"\n")
        await process.stdin.drain()
        answer = await process.stdout.readline()
        if not answer:
            return "structured_outputs: compiling it ended the compiler; make it simpler"
        error: str | None = json.loads(answer)
        return error

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.kill()


def main() -> None:
    """Answer each line of standard input, until it ends."""
    from stridelm.sample.grammar import Grammars
    from stridelm.text.tokenizer import Tokenizer

    lines = iter(sys.stdin.buffer)
    opening = json.loads(next(lines))
    end_with(opening["parent"])  # also in the middle of a grammar that takes for ever
    tokenizer = Tokenizer.load(opening["model"])
    grammars = Grammars(tokenizer, opening["vocab_size"], tokenizer.eos_ids)
    _answer(None)
    for line in lines:
        try:
            grammars.try_out(StructuredOutputs(**json.loads(line)))
        except ValueError as error:
            _answer(str(error))
        else:
            _answer(None)


def _answer(error: str | None) -> None:
    sys.stdout.write(json.dumps(error) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
