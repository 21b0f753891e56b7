"""KV as a transaction: open with slots up to every span's bound, run, commit what was accepted.

Leaving without commit gives back every page that was taken for it, as if the step had never been.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from stridelm.types import Span

if TYPE_CHECKING:
    from stridelm.cache.ledger import Ledger


class Transaction:
    def __init__(self, ledger: Ledger, spans: tuple[Span, ...]) -> None:
        self.spans = spans
        self._ledger = ledger
        self._open = True
        for span in spans:
            ledger.grow(span.request, span.end)

    def tables(self, group: str) -> list[list[int]]:
        """Page table of each span's request, long enough for the span's bound."""
        return [self._ledger.table(span.request, group) for span in self.spans]

    def commit(self, kept: Sequence[int]) -> None:
        """Keep each span's real rows and its first `kept` draft rows, and take the rest back.

        The draft rows to keep must already lie in order behind the real rows (`PagePool.compact`).
        """
        assert self._open, "a transaction commits once"
        self._open = False
        for span, rows in zip(self.spans, kept, strict=True):
            assert 0 <= rows <= span.draft
            self._ledger.advance(span.request, span.real + rows)

    def __enter__(self) -> Transaction:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._open:
            self._open = False
            for span in self.spans:
                if self._ledger.holds(span.request):
                    self._ledger.trim(span.request)
