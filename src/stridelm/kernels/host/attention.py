"""Attention over pages on a CPU: one call per layer, one task per tile of rows and KV head.

Every number of a row is computed from that row's query and its own keys, in order of position, by the same operations
whichever tile the row is in: each score is one reduction over the head, the softmax runs over the row's own keys
without gaps, and values are added key after key (keys that a row does not see add exact zeros). So a row's bits depend
on nothing else: not on the rows beside it, the page size, or the order in which its ancestors are stored.

Hot loops index whole arrays and take no slices: a slice costs a reference count, and an index that the compiler cannot
prove to be positive prevents a loop from being vectorised.

Legend: N rows, R spans, T tiles, H query heads, G KV heads, D head size, P pool slots, L storage entries of a span, M
query vectors of a tile and KV head.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import numpy as np
from numba import prange
from numba.core.extending import register_jitable

from stridelm.kernels.host.arithmetic import by_lanes, exp, in_order, kernel, narrow, ordered, unordered, widen

KEYS = 64
"""Entries that are widened to float32 at a time and shared by all queries of a tile."""


@register_jitable
def _entries_seen(limits, bases, ancestors):
    """One past the last entry that any of a tile's rows sees."""
    seen = 0
    for i in range(limits.shape[0]):
        seen = max(seen, limits[i])
        if ancestors[i]:
            for bit in range(64):
                if (ancestors[i] >> bit) & 1:
                    seen = max(seen, bases[i] + bit + 1)
    return seen


@register_jitable
def _take(stored_PGD, head, slots_L, at, filled, taken_KD):
    """Widen `filled` entries of a KV head, from entry `at` on, into the first rows of `taken`."""
    for j in range(filled):
        slot = slots_L[at + j]
        for d in range(taken_KD.shape[1]):
            taken_KD[j, d] = widen(stored_PGD[slot, head, d])


@by_lanes
def _score(queries_MD, stored_PGD, head, slots_L, scores_ML):
    """Queries times keys, four keys at a time. Rows of `scores` are padded to a multiple of 4."""
    vectors, size = queries_MD.shape
    taken = np.zeros((KEYS, size), np.float32)
    for at in range(0, slots_L.shape[0], KEYS):
        filled = min(KEYS, slots_L.shape[0] - at)
        _take(stored_PGD, head, slots_L, at, filled, taken)
        for m in range(vectors):
            for j in range(0, filled, 4):
                s0 = s1 = s2 = s3 = np.float32(0)
                for d in range(size):
                    q = queries_MD[m, d]
                    s0 += q * taken[j, d]
                    s1 += q * taken[j + 1, d]
                    s2 += q * taken[j + 2, d]
                    s3 += q * taken[j + 3, d]
                scores_ML[m, at + j] = s0
                scores_ML[m, at + j + 1] = s1
                scores_ML[m, at + j + 2] = s2
                scores_ML[m, at + j + 3] = s3


@by_lanes
def _softmax(scores):
    """In place. The maximum is searched among integers, because that loop is vectorised."""
    highest = np.int32(-0x7FFFFFFF)
    for j in range(scores.shape[0]):
        highest = max(highest, ordered(scores[j]))
    top = unordered(highest)
    total = np.float32(0)
    for j in range(scores.shape[0]):
        x = exp(scores[j] - top)
        scores[j] = x
        total += x
    scale = np.float32(1) / total
    for j in range(scores.shape[0]):
        scores[j] *= scale


@in_order
def weigh_chain(scores, count, window):
    """One query's scores to weights in place: a softmax over the first `count` entries, or the last `window` of these,
    zero elsewhere."""
    first = max(0, count - window)
    _softmax(scores[first:count])
    scores[:first] = 0
    scores[count:] = 0


@in_order
def _weigh(scores, limit, base, ancestors, window):
    """One query's scores to weights in place: a softmax over the entries it sees, zero elsewhere."""
    if not ancestors:
        weigh_chain(scores, limit, window)
        return
    path = np.empty(64, np.int64)
    length = 0
    for bit in range(64):
        if (ancestors >> bit) & 1:
            path[length] = base + bit
            length += 1
    for i in range(length):  # close the gaps: the visible entries are now contiguous, as in a chain
        scores[limit + i] = scores[path[i]]
    weigh_chain(scores, limit + length, window)
    for i in range(length - 1, -1, -1):  # and move the weights back, last first
        if path[i] != limit + i:
            scores[path[i]] = scores[limit + i]
            scores[limit + i] = 0


@in_order
def _mix(weights_ML, stored_PGD, head, slots_L, mixed_MD):
    """Add weights times values, key after key: four keys and two queries at a time, to load and store less."""
    vectors, size = mixed_MD.shape
    taken = np.zeros((KEYS, size), np.float32)
    for at in range(0, slots_L.shape[0], KEYS):
        filled = min(KEYS, slots_L.shape[0] - at)
        _take(stored_PGD, head, slots_L, at, filled, taken)
        for m in range(0, vectors - 1, 2):
            for j in range(0, filled, 4):  # beyond `filled`, weights are zero and the stale values in `taken` finite
                i, n = at + j, m + 1
                p0, p1, p2, p3 = weights_ML[m, i], weights_ML[m, i + 1], weights_ML[m, i + 2], weights_ML[m, i + 3]
                r0, r1, r2, r3 = weights_ML[n, i], weights_ML[n, i + 1], weights_ML[n, i + 2], weights_ML[n, i + 3]
                for d in range(size):
                    v0, v1, v2, v3 = taken[j, d], taken[j + 1, d], taken[j + 2, d], taken[j + 3, d]
                    mixed_MD[m, d] = mixed_MD[m, d] + p0 * v0 + p1 * v1 + p2 * v2 + p3 * v3
                    mixed_MD[n, d] = mixed_MD[n, d] + r0 * v0 + r1 * v1 + r2 * v2 + r3 * v3
        if vectors % 2:
            m = vectors - 1
            for j in range(0, filled, 4):
                i = at + j
                p0, p1, p2, p3 = weights_ML[m, i], weights_ML[m, i + 1], weights_ML[m, i + 2], weights_ML[m, i + 3]
                for d in range(size):
                    v0, v1, v2, v3 = taken[j, d], taken[j + 1, d], taken[j + 2, d], taken[j + 3, d]
                    mixed_MD[m, d] = mixed_MD[m, d] + p0 * v0 + p1 * v1 + p2 * v2 + p3 * v3


@in_order
def attend_tile(
    task, q_NHD, keys_PGD, values_PGD, slots_RL, tiles_T3, limits_N, bases_N, ancestors_N, window, scale, out_NHD
):
    """One of `attend`'s tasks: a tile and a KV head."""
    tiles, heads, kv_heads = tiles_T3.shape[0], q_NHD.shape[1], keys_PGD.shape[1]
    size, shared = q_NHD.shape[2], heads // kv_heads
    tile, head = task % tiles, task // tiles
    span, first, rows = tiles_T3[tile]
    count = _entries_seen(
        limits_N[first : first + rows], bases_N[first : first + rows], ancestors_N[first : first + rows]
    )
    slots = slots_RL[span, :count]
    queries = np.empty((rows * shared, size), np.float32)
    for m in range(rows * shared):
        for d in range(size):
            queries[m, d] = widen(q_NHD[first + m // shared, head * shared + m % shared, d]) * scale
    scores = np.empty((rows * shared, (count + 3) // 4 * 4), np.float32)
    _score(queries, keys_PGD, head, slots, scores)
    for m in range(rows * shared):
        row = first + m // shared
        _weigh(scores[m], limits_N[row], bases_N[row], ancestors_N[row], window)
    mixed = np.zeros((rows * shared, out_NHD.shape[2]), np.float32)
    _mix(scores, values_PGD, head, slots, mixed)
    for m in range(rows * shared):
        for d in range(out_NHD.shape[2]):
            out_NHD[first + m // shared, head * shared + m % shared, d] = narrow(mixed[m, d], out_NHD)


@kernel
def attend(q_NHD, keys_PGD, values_PGD, slots_RL, tiles_T3, limits_N, bases_N, ancestors_N, window, scale, out_NHD):
    """Write softmax(q k^T scale) v of every row into out_NHD, whose heads may be narrower than the values: of these the
    first entries are read.

    slots_RL: pool slot of each storage entry of a span. tiles_T3: (span, first row, rows) of each tile. A row sees the
    first `limits` entries of its span and, from entry `bases` on, those whose bits are set in `ancestors`; of all
    these, only the last `window`.
    """
    for task in prange(tiles_T3.shape[0] * keys_PGD.shape[1]):
        seen = (slots_RL, tiles_T3, limits_N, bases_N, ancestors_N, window, scale)
        attend_tile(task, q_NHD, keys_PGD, values_PGD, *seen, out_NHD)
