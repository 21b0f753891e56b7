"""Page tables corrupted in a running engine, for the CPU's and the GPU's tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from stridelm import LLM
from stridelm.cache.transaction import Transaction
from stridelm.engine.device_step import Land
from stridelm.run.trap import PageFault
from stridelm.types import Span, StepPlan
from support.checks.identity import mixed_jobs, teach
from support.doubles.stand import Stand

PAGES, PAGE_SIZE = 600, 4
WRONG_PAGES = (0, -1, PAGES + 1, 2**31 - 1)


def engine_of(stand: Stand, backend: str, **options: Any) -> LLM:
    return stand.llm(attention=backend, check_pages=True, page_size=PAGE_SIZE, **{"num_pages": PAGES, **options})


class Spoiler:
    """Corrupts an entry of a page table while a step runs, once for each `page` that is assigned."""

    def __init__(self, llm: LLM, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine: Any = llm.engine
        self.page: int | None = None
        self.is_last = False
        """Which entry: the one that the step writes to, or the table's first."""
        self.message = ""
        self.where = where
        device = self.engine.steps.device
        monkeypatch.setattr(device, "run", self._around(device.run))
        if where == "device":
            monkeypatch.setattr(self.engine.pages, "update", self._after(self.engine.pages.update))

    def _around(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def spoiled(plan: StepPlan, transaction: Transaction, land: Land, *, detailed: bool) -> Any:
            self.undo: list[tuple[Any, int, int]] = []
            if self.where == "ledger":
                self._spoil(plan.spans)
            try:
                return run(plan, transaction, land, detailed=detailed)
            finally:
                for row, index, page in self.undo:
                    row[index] = page
                    self._stamp(plan.spans)

        return spoiled

    def _after(self, update: Callable[..., None]) -> Callable[..., None]:
        def spoiled(spans: tuple[Span, ...], transaction: Transaction) -> None:
            update(spans, transaction)
            self._spoil(spans)

        return spoiled

    def _stamp(self, spans: tuple[Span, ...]) -> None:
        """Tables of the ledger have changed."""
        for span in spans:
            lease = self.engine.ledger.lease(span.request)
            if lease is not None:
                lease.stamp = next(self.engine.ledger._stamps)

    def _spoil(self, spans: tuple[Span, ...]) -> None:
        if self.page is None:
            return
        victim = spans[len(spans) // 2].request
        index = victim.computed // PAGE_SIZE if self.is_last else 0
        table = self.engine.ledger.table(victim, "full")
        row = table if self.where == "ledger" else self.engine.pages.tables["full"][victim.slot]
        self.undo.append((row, index, int(row[index])))
        row[index] = self.page
        self._stamp(spans)
        self.message = (
            f"request {victim.id}, layer 0, page group full: entry {index} of its page table is page {self.page}; "
            f"the group has pages 1 to {PAGES}."
        )
        self.page = None


def check_names_the_entry(stand: Stand, backend: str, where: str, page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A corrupt table stops the step before the model runs. Once repaired, all requests emit what they would have."""
    llm = engine_of(stand, backend)
    engine, jobs = llm.engine, mixed_jobs(stand, 6, 0.7, ["nothing", "repetition_penalty"], seed=2)
    for job in jobs:
        teach(stand, job)
    requests = [engine.add(f"job-{i}", job.prompt, job.request) for i, job in enumerate(jobs)]
    spoiler = Spoiler(llm, where, monkeypatch)
    ran: list[object] = []
    forward = engine.loaded.model.forward

    def counted(*args: Any) -> Any:
        ran.append(None)
        return forward(*args)

    monkeypatch.setattr(engine.loaded.model, "forward", counted)
    for is_last in (False, True, False):
        for _ in range(3):
            engine.step()
        spoiler.page, spoiler.is_last = page, is_last
        said, before = [list(one.output_ids) for one in requests], len(ran)
        with pytest.raises(PageFault) as fault:
            engine.step()
        assert str(fault.value).startswith(spoiler.message)
        assert len(ran) == before and [one.output_ids for one in requests] == said
        llm.check()
    while engine.busy:
        engine.step()
    llm.check()
    for job, one in zip(jobs, requests):
        assert one.output_ids == stand.tokens(job.prompt, job.params), job
