"""What rows see of a pool, as attention.py reads it, from a step's geometry.

Legend: as in attention.py; P pages of a span, S page size.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import numpy as np

from stridelm.compiled import njit

TILE_QUERIES = 48
"""Most query vectors in a tile. They share the keys and values read from the pool; more of them would not fit into the
second-level cache beside those."""


@njit(error_model="numpy")
def pool_slots(tables_RP, page_size):
    """[R, L] pool slot of every storage entry; after a request's own pages come slots of the null page."""
    spans, pages = tables_RP.shape
    slots = np.empty((spans, pages * page_size), np.int64)
    for i in range(spans):
        for page in range(pages):
            for entry in range(page_size):
                slots[i, page * page_size + entry] = np.int64(tables_RP[i, page]) * page_size + entry
    return slots


@njit(error_model="numpy")
def reach(firsts_R, starts_R, reals_R, draft_rows_N, positions_N):
    """[N] each row's span's first draft entry, and [N] how many entries the row sees besides its ancestors."""
    rows, spans = len(positions_N), len(firsts_R)
    bases, limits = np.empty(rows, np.int64), np.empty(rows, np.int64)
    for i in range(spans):
        for row in range(firsts_R[i], firsts_R[i + 1] if i + 1 < spans else rows):
            bases[row] = starts_R[i] + reals_R[i]
            limits[row] = positions_N[row] + 1 if draft_rows_N[row] < 0 else bases[row]
    return bases, limits


@njit(error_model="numpy")
def tiles(firsts_R, rows, max_rows):
    """[T, 3] (span, first row, rows): each span's rows in runs of at most `max_rows`."""
    spans, count = len(firsts_R), 0
    found = np.empty((spans + rows, 3), np.int64)
    for i in range(spans):
        stop = firsts_R[i + 1] if i + 1 < spans else rows
        for row in range(firsts_R[i], stop, max_rows):
            found[count, 0], found[count, 1], found[count, 2] = i, row, min(max_rows, stop - row)
            count += 1
    return found[:count]
