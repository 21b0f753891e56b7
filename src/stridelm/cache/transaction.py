"""KV as a transaction: reserve slots up to every span's bound, run, commit what was accepted.

Exiting without a commit gives back every page that was taken, as if the step had not happened. A step whose verdict the
host reads later keeps its transaction open until then; several may be open at once, and they commit in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Protocol

from stridelm.types import Request, Span


class Held(Protocol):
    """The part of a lease that a transaction uses."""

    tables: dict[str, list[int]]
    stamp: int


class Books(Protocol):
    """The part of the ledger that a transaction uses."""

    def grow(self, request: Request, end: int) -> Held: ...

    def trim(self, request: Request) -> None: ...

    def advance(self, request: Request, rows: int) -> None: ...

    def lease(self, request: Request) -> Held | None: ...


class Transaction:
    def __init__(self, ledger: Books, spans: tuple[Span, ...]) -> None:
        """spans: what to reserve for; `open` takes the pages."""
        self.spans = spans
        self._ledger = ledger
        self._open = False
        self._held = False
        self.leases: list[Held] = []
        """Of each span's request; its page tables are long enough for the span's bound."""

    def open(self) -> Transaction:
        """Take pages up to every span's bound, and count the spans' rows as in flight."""
        assert not self._open and not self.leases, "a transaction opens once"
        for span in self.spans:
            self.leases.append(self._ledger.grow(span.request, span.end))
            span.request.rows_in_flight += span.rows
            span.request.tokens_in_flight += span.decides
        self._open = True
        return self

    def hold(self) -> None:
        """Stay open beyond the `with` block: the step is in flight."""
        self._held = True

    def commit(self, kept: Sequence[int], reals: Sequence[int] | None = None) -> list[bool]:
        """Keep each span's real rows and its first `kept` draft rows, and give back the rest.

        reals: number of real rows of each span, if the plan knew only a bound. The draft rows to keep must already be
        stored in order after the real rows. A span whose request has since lost its lease (it finished, was preempted
        or aborted) keeps nothing; returns which spans still had theirs.
        """
        assert self._open, "a transaction commits once"
        self._open = False
        alive = self._current()
        reals = [span.real for span in self.spans] if reals is None else reals
        for span, rows, real, here in zip(self.spans, kept, reals, alive, strict=True):
            assert 0 <= rows <= span.draft and 0 < real <= span.real
            if here:
                self._take_off(span)
                self._ledger.advance(span.request, real + rows)
        return alive

    def _current(self) -> list[bool]:
        return [self._ledger.lease(span.request) is lease for span, lease in zip(self.spans, self.leases, strict=True)]

    def _take_off(self, span: Span) -> None:
        span.request.rows_in_flight -= span.rows
        span.request.tokens_in_flight -= span.decides

    def __enter__(self) -> Transaction:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._open and not (self._held and error is None):
            self._open = False
            for span, here in zip(self.spans, self._current(), strict=True):
                if here:
                    self._take_off(span)
                    self._ledger.trim(span.request)
