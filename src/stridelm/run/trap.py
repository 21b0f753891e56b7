"""A check of page indices (`check_pages`): everything a forward pass would read and write, before it runs, and before
drafters read the tables.

Kernels trust page tables. A wrong entry is an illegal address on a GPU, which ends the process without naming the
request, or it reads the KV of another request. The trap raises before the index is used, and names the request. The
host waits for the device's answer, which is one synchronisation per step, so it is opt-in.

It cannot detect an entry that points to another request's page, since requests with a common prefix share pages.

Legend: R spans, P entries of a page table, N rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from stridelm.batch import ForwardBatch
from stridelm.cache.layout import windows_of
from stridelm.cache.pool import PagePool
from stridelm.types import Request, Span


class PageFault(RuntimeError):
    """A forward pass would have read or written where it must not."""


@dataclass(slots=True)
class _Rows:
    """Where a batch's rows read and write."""

    span_N: torch.Tensor
    storage_N: torch.Tensor
    live_N: torch.Tensor
    """bool; the others are padding."""
    start_R: torch.Tensor
    """Storage index of each span's first row."""
    end_R: torch.Tensor
    """One past the highest storage index that attention may read for a span."""

    @classmethod
    def of(cls, batch: ForwardBatch, base_R: torch.Tensor) -> _Rows:
        geometry = batch.geometry
        span_N = torch.repeat_interleave(torch.tensor(batch.row_counts)).to(base_R.device)
        real_N = geometry.draft_rows < 0
        storage_N = torch.where(real_N, geometry.positions, base_R[span_N] + geometry.draft_rows)
        start_R = geometry.starts.to(torch.int64)
        end_R = (geometry.starts + geometry.counts).to(torch.int64)
        return cls(span_N, storage_N, real_N | (geometry.ancestors != 0), start_R, end_R)


class PageTrap:
    def __init__(self, pool: PagePool) -> None:
        self._page_size = pool.page_size
        self._windows = windows_of(pool.states)
        self._last = pool.pages
        """Page group -> its last page, which may change."""
        self._groups: dict[str, int] = {}
        """Page group -> its first layer."""
        for number, state in enumerate(pool.states):
            self._groups.setdefault(state.group, number)

    def check(self, batch: ForwardBatch, base_R: torch.Tensor, tables: dict[str, torch.Tensor]) -> None:
        """Raise PageFault for the first wrong entry, else the first wrong slot, of a page group.

        A span reads the table entries from storage index 0, or from where its first row's window begins, to the end of
        its rows; each must be a page from 1 on. A row must write to its own storage index, where no other row writes,
        and padding to the null page.

        base_R: storage index of each span's first draft row. tables: page group -> [R, P] page ids.
        """
        rows = _Rows.of(batch, base_R)
        padded = self._padded(tables)
        found = [
            torch.cat(
                (
                    self._wrong_entry(group, pages_RP, rows.start_R, rows.end_R),
                    _wrong_slot(rows, pages_RP, batch.slots[group], self._page_size),
                )
            )
            for group, pages_RP in padded.items()
        ]
        looked = torch.stack(found).tolist()  # the one wait for the device
        for group, (span, index, page, row, slot, other) in zip(padded, looked, strict=True):
            self._raise_entry(group, batch.spans, span, index, page)
            if row >= 0:
                owners = [s.request for s, n in zip(batch.spans, batch.row_counts, strict=True) for _ in range(n)]
                why = f"row {row} writes to slot {slot} of page {slot // self._page_size}, "
                why += "which is not its own" if other < 0 else f"as row {other} of request {owners[other].id} does"
                raise self._fault(group, owners[row], why)

    def check_tables(self, spans: Sequence[Span], slots_R: torch.Tensor, tables: dict[str, torch.Tensor]) -> None:
        """Raise PageFault for the first wrong entry that a step of these spans may read, as far as the host knows their
        bounds. slots_R: rows of the tables. tables: page group -> [S, P] page ids."""
        bounds = torch.tensor([(span.start, span.end) for span in spans], device=slots_R.device)
        padded = self._padded({group: pages[slots_R] for group, pages in tables.items()})
        found = [self._wrong_entry(group, pages_RP, *bounds.unbind(1)) for group, pages_RP in padded.items()]
        for group, (span, index, page) in zip(padded, torch.stack(found).tolist(), strict=True):
            self._raise_entry(group, spans, span, index, page)

    def _padded(self, tables: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """int64, with the null page at the end of each table, so that a span that reaches beyond it is detected there.
        Without groups that have no layer in this pool, such as a head's if all of the model's layers have windows."""
        return {
            group: torch.nn.functional.pad(pages.to(torch.int64), (0, 1))
            for group, pages in tables.items()
            if group in self._groups
        }

    def _wrong_entry(
        self, group: str, pages_RP: torch.Tensor, start_R: torch.Tensor, end_R: torch.Tensor
    ) -> torch.Tensor:
        return _wrong_entry(start_R, end_R, pages_RP, self._last[group], self._page_size, self._windows[group])

    def _raise_entry(self, group: str, spans: Sequence[Span], span: int, index: int, page: int) -> None:
        if span >= 0:
            raise self._fault(group, spans[span].request, f"entry {index} of its page table is page {page}")

    def _fault(self, group: str, request: Request, why: str) -> PageFault:
        layer, last = self._groups[group], self._last[group]
        return PageFault(
            f"request {request.id}, layer {layer}, page group {group}: {why}; the group has pages 1 to {last}. "
            "This is a bug in the engine: report it with this line"
        )


def _wrong_entry(
    start_R: torch.Tensor, end_R: torch.Tensor, pages_RP: torch.Tensor, last: int, page_size: int, window: int | None
) -> torch.Tensor:
    """[3]: span, index and page of the first entry that is read and is not a page of the group; all -1 if there is
    none. start_R, end_R: as in _Rows."""
    width = pages_RP.shape[1]
    first_P = torch.arange(width, device=pages_RP.device) * page_size
    read_RP = first_P < end_R[:, None]
    if window is not None:
        read_RP &= first_P + page_size > start_R[:, None] - window + 1
    at = _first(read_RP & ((pages_RP < 1) | (pages_RP > last)))
    return torch.where(at < 0, -1, torch.stack((at // width, at % width, pages_RP.flatten()[at])))


def _wrong_slot(rows: _Rows, pages_RP: torch.Tensor, slots_N: torch.Tensor, page_size: int) -> torch.Tensor:
    """[3]: the first row that does not write to the slot of its storage index (padding: to the null page), its slot,
    -1; else a row whose slot an earlier one writes to as well, the slot, the earlier row; else all -1."""
    index_N = (rows.storage_N // page_size).clamp(0, pages_RP.shape[1] - 1)
    own_N = slots_N == pages_RP[rows.span_N, index_N] * page_size + rows.storage_N % page_size
    astray = _first(~torch.where(rows.live_N, own_N, (slots_N >= 0) & (slots_N < page_size)))
    # Give padding distinct keys, so that equal neighbours in sorted order are live rows that write to the same slot.
    padding_N = -1 - torch.arange(len(slots_N), device=slots_N.device)
    taken_N, order_N = torch.where(rows.live_N, slots_N, padding_N).sort(stable=True)
    twin = _first(taken_N.diff(prepend=taken_N[:1] - 1) == 0)
    row = torch.where(astray < 0, torch.where(twin < 0, -1, order_N[twin]), astray)
    other = torch.where((astray < 0) & (twin >= 0), order_N.roll(1)[twin], -1)
    return torch.where(row < 0, -1, torch.stack((row, slots_N[row], other)))


def _first(found: torch.Tensor) -> torch.Tensor:
    """Flat index of the first True; -1 if there is none."""
    flat = found.flatten()
    return torch.where(flat.any(), flat.to(torch.uint8).argmax(), -1)
