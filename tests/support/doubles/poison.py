"""Pages that no request holds are filled with a value that reveals any access: a read spoils an output, a write
destroys the value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from stridelm.cache.transaction import Transaction
from stridelm.engine.device_step import Land, Run
from stridelm.engine.engine import Engine
from stridelm.params import SamplingParams
from stridelm.types import StepPlan
from support.checks.identity import prompts
from support.doubles.stand import Stand

POISON = 3.0
"""Far from any key or value of the tests' models, and finite: masked entries may be read and multiplied by zero."""
QUIET = 3
"""Steps that a page must have been unheld before it is watched: rows of a finished request may still be in flight, and
write to the pages that it held when they were launched."""


Request = tuple[list[int], SamplingParams]
POOL = {"enable_prefix_caching": False, "page_size": 8, "num_pages": 180}
KINDS: list[dict[str, Any]] = [
    {"drafter": "none"},
    {"drafter": "ngram", "prompt_lookup_min": 1},
    {"drafter": "mask", "depth": 2},
    {"drafter": "mask", "depth": 2, "acceptance": "trust"},
    {"drafter": "medusa", "depth": 3},
    {"drafter": "model", "depth": 3},
    {"drafter": "mtp", "depth": 3},
    {"drafter": "eagle", "depth": 3},
    {"drafter": "frozen_kv", "depth": 3},
    {"drafter": "suffix"},
]


def requests(stand: Stand, kinds: list[dict[str, Any]]) -> list[Request]:
    """At least seven, so that a captured step is padded; they end at different lengths."""
    made = []
    for i, prompt in enumerate(prompts(stand, max(7, len(kinds)))):
        kind = kinds[i % len(kinds)]
        made.append((prompt, SamplingParams(temperature=0.0, max_tokens=6 + 3 * i, ignore_eos=True, speculation=kind)))
    return made


class PoisonedPool:
    """Steps an engine and watches the pages that no request holds. Needs an engine without a prefix cache."""

    def __init__(self, engine: Engine) -> None:
        assert not engine.config.enable_prefix_caching
        self._engine = engine
        (pages,) = engine.ledger.total()
        self._idle = [QUIET] * (pages + 1)
        self._poison(range(1, pages + 1))
        self.watched = 0
        """Pages checked, over all steps."""
        self._reserved: set[int] = set()
        """Pages that the last launched step may write to, even if a verdict read since then has given them back."""
        self._run = engine.steps.device.run
        engine.steps.device.run = self._listening  # type: ignore[method-assign]

    def _listening(self, plan: StepPlan, transaction: Transaction, land: Land, *, detailed: bool = False) -> Run:
        self._reserved = {page for lease in transaction.leases for page in lease.tables["full"]}
        return self._run(plan, transaction, land, detailed=detailed)

    def step(self) -> None:
        """One step of the engine. Raises AssertionError if an unheld page was written."""
        self._engine.step()
        self._look()

    def _look(self) -> None:
        (pages,) = self._engine.ledger._pages.values()
        untouched, new = [], []
        for page in range(1, len(self._idle)):
            held = pages.holders(page) > 0 or page in self._reserved
            quiet = self._idle[page] >= QUIET
            self._idle[page] = 0 if held else self._idle[page] + 1
            if not held and quiet:
                untouched.append(page)
            elif self._idle[page] == QUIET:
                new.append(page)
        self.watched += len(untouched)
        size = self._engine.config.page_size
        for tensor in self._tensors():
            whole = tensor.view(-1, size, *tensor.shape[1:])[untouched]
            assert bool((whole == POISON).all()), "a page that no request holds was written"
        self._poison(new)
        self._reserved = set()

    def _poison(self, pages: range | list[int]) -> None:
        size = self._engine.config.page_size
        for tensor in self._tensors():
            tensor.view(-1, size, *tensor.shape[1:])[list(pages)] = POISON

    def _tensors(self) -> list[torch.Tensor]:
        pool = self._engine.loaded.pool
        return pool.tensors


def check_pages(poisoned: Engine, clean: Engine, asked: Sequence[Request]) -> int:
    """A batch whose first request is aborted midway emits the same on a poisoned pool as on a clean one.

    Returns the number of pages checked, over all steps.
    """
    pool = PoisonedPool(poisoned)
    said = []
    for engine, step in ((clean, clean.step), (poisoned, pool.step)):
        added = [engine.add(str(i), prompt, params) for i, (prompt, params) in enumerate(asked)]
        for _ in range(4):
            step()
        engine.abort("0")
        while engine.busy:
            step()
        engine.check()
        said.append([request.output_ids for request in added[1:]])
    assert said[0] == said[1]
    return pool.watched
