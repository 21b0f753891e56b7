"""Device state of the running requests: their tokens, how far their KV is committed, and their page tables.

History is read only from here: drafters look tokens up, penalties count them, the batch takes its ids. No incremental
copy exists that could disagree. Slot -1, the last row of every table, belongs to no request: padding reads and writes
there.
"""

from __future__ import annotations

from itertools import zip_longest

import numpy as np
import torch

from stridelm.arena import Arena
from stridelm.batch import Verdict
from stridelm.cache.transaction import Transaction
from stridelm.kernels import step_ops_for
from stridelm.kernels.step_ops import StepOps
from stridelm.types import OVERRUN, Span
from stridelm.upload import upload

Tables = dict[str, torch.Tensor]
"""Page group -> [R, P] int32 pages of R requests."""


class TokenTable:
    """tokens [S + 1, L] int64, known [S + 1] and committed [S + 1] int64, one row per slot; L leaves room for an
    overrun."""

    def __init__(self, slots: int, max_length: int, device: torch.device, ops: StepOps | None = None) -> None:
        self.ops = ops or step_ops_for(device)
        self.arena = Arena(device)
        """What steps over this table read and do not change."""
        self.tokens = torch.zeros(slots + 1, max_length + OVERRUN, dtype=torch.int64, device=device)
        self.known = torch.zeros(slots + 1, dtype=torch.int64, device=device)
        self.committed = torch.zeros(slots + 1, dtype=torch.int64, device=device)

    def admit(self, slot: int, ids: list[int], computed: int = 0) -> None:
        """Write a request's prompt, and its output so far if it was preempted before.

        computed: number of its leading tokens whose KV is already there.
        """
        self.tokens[slot, : len(ids)] = upload(ids, self.tokens.device)
        # known[slot] = number would copy the number from the host, and wait for the step that the device runs.
        self.known[slot].fill_(len(ids))
        self.committed[slot].fill_(computed)

    def commit(
        self, slots_R: torch.Tensor, verdict: Verdict, reals_R: torch.Tensor, sources_R: torch.Tensor | None
    ) -> torch.Tensor:
        """Commit on the device: each request's real rows and those that are kept of its draft now have KV. Returns what
        the host reads of it (engine/outcome.py). The padding row stays at 0."""
        return self.ops.commit(self.committed, slots_R, verdict, reals_R, sources_R)


class PageTables:
    """Page group -> [S + 1, P] int32 page ids by slot, a copy of the ledger's for kernels that look up slots
    themselves.

    Entries after the pages that a request holds point to the null page: drafters that run all requests of a step to the
    same depth may reach them.
    """

    def __init__(self, groups: tuple[str, ...], slots: int, width: int, device: torch.device) -> None:
        self.tables = {group: torch.zeros(slots + 1, width, dtype=torch.int32, device=device) for group in groups}
        self._copied: dict[str, list[list[int]]] = {group: [[] for _ in range(slots)] for group in groups}
        """Page group -> for each slot, the pages that the device has."""
        self._stamps = [0] * slots
        """For each slot, the stamp of the lease they are from."""

    def of(self, slots_R: torch.Tensor) -> Tables:
        """These requests' rows."""
        return {group: pages[slots_R] for group, pages in self.tables.items()}

    def update(self, spans: tuple[Span, ...], transaction: Transaction) -> None:
        """Bring the rows of a step's requests up to date, with one small copy per group that has changes."""
        leases = [(span.request.slot, lease) for span, lease in zip(spans, transaction.leases, strict=True)]
        changed = {slot: lease for slot, lease in leases if lease.stamp != self._stamps[slot]}
        for group, target in self.tables.items():
            copied, changes = self._copied[group], []
            for slot, lease in changed.items():
                have, pages = copied[slot], lease.tables[group]
                if have != pages:
                    changes += _changes(slot, have, pages)
                    copied[slot] = list(pages)
            if changes:
                packed = upload(np.array(changes, dtype=np.int64).T, target.device)
                target.index_put_((packed[0], packed[1]), packed[2].to(torch.int32))
        for slot, lease in changed.items():
            self._stamps[slot] = lease.stamp


def _changes(slot: int, have: list[int], want: list[int]) -> list[tuple[int, int, int]]:
    """(slot, index, page) of each entry that changed; beyond a table's end is the null page."""
    # Usually a page is added, or a window passes one: bisect for the common prefix instead of comparing every entry.
    start, end = 0, min(len(have), len(want))
    while start < end:
        middle = (start + end + 1) // 2
        if have[start:middle] == want[start:middle]:
            start = middle
        else:
            end = middle - 1
    pairs = enumerate(zip_longest(have[start:], want[start:], fillvalue=0), start)
    return [(slot, index, new) for index, (old, new) in pairs if old != new]
