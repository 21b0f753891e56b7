"""Moves memory between page groups when a plan is short of pages in one of them.

Which group gives and how much is decided in cache/split.py. Pages are moved only while no step is in flight: the
ledger drops a group's last pages, what they hold is copied to lower ones, and their memory goes to another group's end.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Protocol

from stridelm.cache.ledger import Ledger
from stridelm.cache.split import GroupPages, most_pages, split
from stridelm.schedule.rows import longest, smallest_budget
from stridelm.types import PageCounts, Request, StepPlan

logger = logging.getLogger(__name__)

REST = 32
"""Steps for which a group that was given pages gives none away, so that they do not move back and forth."""

AGAIN = 8
"""Steps for which newcomers wait after memory could not be moved for one: running requests are not counted each
time."""


class Storage(Protocol):
    """What the pages of all groups are in: see PagePool."""

    pages: dict[str, int]
    budget: int

    @property
    def most(self) -> Mapping[str, int] | None: ...

    def bytes_at(self, pages: Mapping[str, int]) -> int: ...

    def move(self, group: str, renamed: Mapping[int, int]) -> None: ...

    def resize(self, pages: Mapping[str, int]) -> None: ...


class Resplit:
    def __init__(self, ledger: Ledger, storage: Storage, max_length: int, step_rows: int) -> None:
        """max_length: tokens that a context may have. step_rows: maximum rows of a step."""
        self._ledger = ledger
        self._storage = storage
        self._max_length = max_length
        self._step_pages = ledger.pages_for(step_rows)
        self._given: dict[str, int] = {}
        """Page group -> the step at which it was last given pages."""
        self._failed = False
        self._step = self._again = 0
        """Steps planned so far, and the one from which on to try again after memory could not be moved."""

    def warm_up(self) -> None:
        """Compile what moves pages, by moving the null page onto itself."""
        for group in self._storage.most or ():
            self._storage.move(group, {0: 0})

    def most_pages(self, need: PageCounts) -> PageCounts:
        """For each group, the pages that it could have while the others have those that a request needs."""
        if self._failed or self._storage.most is None:
            return self._ledger.total()
        needed = dict(zip(self._ledger.counts(), need, strict=True))
        found = most_pages(needed, self._storage.most, self._storage.budget, self._bytes_at)
        return PageCounts(found.values())

    def totals(self, plan: StepPlan, running: Iterable[Request], *, stuck: bool) -> dict[str, int] | None:
        """Page group -> pages with which the plan would lack none; None if it lacks none, or if memory cannot be moved
        so. To be asked at every step.

        running: requests that may still take pages. stuck: whether nothing can run as things are.
        """
        self._step += 1
        most, lacking = self._storage.most, plan.lacking
        if self._failed or most is None or lacking is None:
            return None
        if self._step < self._again and not (plan.preempted or stuck):
            return None
        totals = self._split(most, lacking, running, stuck)
        if totals is None:
            self._again = self._step + AGAIN
        return totals

    def _split(
        self, most: Mapping[str, int], lacking: PageCounts, running: Iterable[Request], stuck: bool
    ) -> dict[str, int] | None:
        reserved = sum(map(self._to_come, running), start=lacking.all(0))
        groups = {}
        for (name, counts), short, soon in zip(self._ledger.counts().items(), lacking, reserved, strict=True):
            groups[name] = GroupPages(
                total=counts["total"],
                most=most[name],
                free=counts["free"],
                cached=counts["cached"],
                lacking=short,
                reserved=soon,
                kept=self._step_pages if self._ledger.windows[name] is not None else 0,
                rests=name in self._given and self._step < self._given[name] + REST,
                bytes_at=partial(self._bytes_at, name),
            )
        return split(groups, self._storage.budget, stuck=stuck)

    def apply(self, totals: Mapping[str, int]) -> None:
        """Let groups have these pages. No step may be in flight. If the device refuses, groups keep what they have got
        by then, and memory is moved no more."""
        before = dict(zip(self._ledger.counts(), self._ledger.total(), strict=True))
        for group, total in totals.items():
            if total < before[group]:
                renamed = self._ledger.resize(group, total)
                self._storage.move(group, renamed)
        try:
            self._storage.resize(totals)
        except RuntimeError:
            self._failed = True
            logger.exception("memory could not be moved between page groups; from now on the split stays as it is")
        for group, total in totals.items():
            if total > before[group] and self._storage.pages[group] == total:
                self._ledger.resize(group, total)
                self._given[group] = self._step
        changes = ", ".join(f"{group} {before[group]} -> {total}" for group, total in totals.items())
        logger.info("pages of KV by group: %s", changes)

    def _bytes_at(self, group: str, pages: int) -> int:
        return self._storage.bytes_at({group: pages})

    def _to_come(self, request: Request) -> PageCounts:
        """Pages that the request may still take: until it ends, or, if only the context's length ends it, for the
        tokens it has and one page more."""
        tokens = longest(request, self._max_length)
        if tokens >= self._max_length:
            tokens = min(tokens, request.known + request.rows_in_flight + self._ledger.page_size)
        window = request.rows_by_depth[-1] if request.all_or_nothing else 0
        return self._ledger.to_come(request, tokens + window, smallest_budget(request))
