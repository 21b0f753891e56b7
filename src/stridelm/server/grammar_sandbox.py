"""Grammars from clients are tried out by workers first: neither the engine nor the HTTP process may be where it is
found that one takes for ever. What has passed is compiled by the engine, on a thread, and is remembered here.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import asdict

import msgspec

from stridelm.params import StructuredOutputs
from stridelm.server.errors import bad_request
from stridelm.server.workers.grammars import Opening
from stridelm.server.workers.pool import Died, Lane, Pool, TookTooLong

QUICK_S, COMPILE_S = 0.5, 5.0
"""That a trial may take before it must make room for others, and at most. Usual are a few hundredths of a second."""
WAITING, SLOW_WAITING = 16, 4
"""Trials that wait for one of the two quick workers, and for the slow one: a usual grammar waits four seconds at
most."""
REMEMBERED_BYTES = 8 << 20
"""Of grammars that have passed."""
OVERHEAD = 256
"""Bytes that remembering one takes beside its text."""


class GrammarSandbox:
    """model: directory of the tokenizer; vocab_size: of the model."""

    def __init__(self, model: str, vocab_size: int) -> None:
        self._pool = Pool(
            "grammars",
            msgspec.json.encode(Opening(model, vocab_size)),
            "grammars",
            Lane(places=2, waiting=WAITING, seconds=QUICK_S),
            Lane(places=1, waiting=SLOW_WAITING, seconds=COMPILE_S),
        )
        self._passed: OrderedDict[StructuredOutputs, int] = OrderedDict()
        """With their bytes, the latest asked for last."""
        self._bytes = 0

    async def check(self, asked: StructuredOutputs) -> None:
        """Raises ApiError if it cannot be compiled, or not in time. Cancelled, its trial ends at once."""
        if asked in self._passed:
            self._passed.move_to_end(asked)
            return
        text = msgspec.json.encode(asdict(asked))
        try:
            error = msgspec.json.decode(await self._pool.do(text), type=str | None)
        except TookTooLong:
            error = f"structured_outputs: the {asked.kind} took longer than {COMPILE_S:g} s to compile; make it simpler"
        except Died:
            error = "structured_outputs: compiling it ended the compiler; make it simpler"
        if error is not None:
            raise bad_request(error, "structured_outputs")
        self._remember(asked, len(text) + OVERHEAD)

    async def close(self) -> None:
        await self._pool.close()

    def _remember(self, asked: StructuredOutputs, size: int) -> None:
        self._bytes += size - self._passed.get(asked, 0)
        self._passed[asked] = size
        while self._bytes > REMEMBERED_BYTES:
            _, freed = self._passed.popitem(last=False)
            self._bytes -= freed
