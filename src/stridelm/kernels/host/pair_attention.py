"""Attention in bfloat16 by AVX512-BF16: keys, and then values, are made into blocks like those of a packed weight, and
all queries of a tile are multiplied by them (avx512.py).

Weights are rounded to bfloat16 before values are added up, as kernels for GPUs do. Values are summed pair by pair in
runs of KEYS entries, counted from a span's first, and the runs one after another. So a row's bits depend on nothing but
that row, as in attention.py, whose legend holds here: entries after those that a row sees add exact zeros. Rows of a
tree are attended to one by one, because which entries make a pair differs between them.

Whatever an entry is made of is fetched one run ahead: entries lie in pages all over the pool.

Legend: K entries of a run, W parts of a head of 2 PAIRS numbers, P pairs of such a part or of keys.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,call-arg,unreachable"
from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import prange
from numba.core import types
from numba.core.extending import intrinsic, register_jitable

from stridelm.kernels.host import avx512
from stridelm.kernels.host.address import start_of
from stridelm.kernels.host.arithmetic import in_order, kernel, narrow
from stridelm.kernels.host.attention import weigh_chain
from stridelm.kernels.host.avx512 import OUTPUTS, PAIRS

KEYS = OUTPUTS
"""Entries of a run: keys are a block's outputs, and pairs of values its inputs."""
_LANES = 16
_BYTES = 4 * _LANES
_LONG, _PAIR = ir.IntType(64), ir.IntType(32)
_VECTOR = ir.VectorType(_PAIR, _LANES)


@register_jitable
def has_whole_parts(size):
    """Of a head of this size."""
    return size % (2 * PAIRS) == 0


def fits(key_size: int, value_size: int) -> bool:
    """Whether this CPU has the instructions, and heads as stored are of whole parts."""
    return avx512.is_available() and has_whole_parts(key_size) and has_whole_parts(value_size)


@intrinsic
def _turn(typing, stored, places_K, first, offset, turned_PK):
    """Write 16 pairs of 16 entries as columns: [p, first + j] is pair p of what lies `offset` + places[first + j] bytes
    after the start of `stored`. turned: uint32, of at least 16 rows of KEYS."""

    def generate(context, builder, signature, arguments):
        source, places, target = (start_of(context, builder, signature, arguments, i) for i in (0, 1, 4))
        first, offset = arguments[2], arguments[3]
        source = builder.gep(source, [offset])
        places = builder.gep(builder.bitcast(places, _LONG.as_pointer()), [first])
        rows = []
        for entry in range(_LANES):
            at = builder.gep(source, [builder.load(builder.gep(places, [_LONG(entry)]))])
            rows.append(builder.load(builder.bitcast(at, _VECTOR.as_pointer()), align=2))
        distance = 1
        while distance < _LANES:
            rows = _exchange(builder, rows, distance)
            distance *= 2
        target = builder.gep(target, [builder.mul(first, _LONG(4))])
        for pair, row in enumerate(rows):
            at = builder.gep(target, [_LONG(4 * KEYS * pair)])
            builder.store(row, builder.bitcast(at, _VECTOR.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(stored, places_K, types.intp, types.intp, turned_PK), generate


@intrinsic
def _prefetch(typing, stored, place):
    """Have the CPU fetch what lies `place` bytes after the start of `stored`."""

    def generate(context, builder, signature, arguments):
        avx512.fetch(builder, builder.gep(start_of(context, builder, signature, arguments, 0), [arguments[1]]))
        return context.get_dummy_value()

    return types.void(stored, types.intp), generate


def _exchange(builder, rows, distance):
    """One step of a transposition: swap this bit of the numbers of rows and of lanes."""
    lanes, turned = range(_LANES), list(rows)
    low = ir.Constant(_VECTOR, [lane - distance + _LANES if lane & distance else lane for lane in lanes])
    high = ir.Constant(_VECTOR, [lane + _LANES if lane & distance else lane + distance for lane in lanes])
    for row in lanes:
        if not row & distance:
            both = rows[row], rows[row + distance]
            turned[row], turned[row + distance] = (builder.shuffle_vector(*both, mask) for mask in (low, high))
    return turned


@intrinsic
def _pair_up(typing, stored, first, second, values_BWPO, place):
    """Write 32 numbers of two entries as pairs, to columns of `values` from the one numbered `place` on. first, second:
    bytes after the start of `stored` at which they lie."""

    def generate(context, builder, signature, arguments):
        source, target = (start_of(context, builder, signature, arguments, i) for i in (0, 3))
        kind = ir.VectorType(ir.IntType(16), 2 * _LANES)
        loads = [builder.gep(source, [at]) for at in arguments[1:3]]
        both = [builder.load(builder.bitcast(at, kind.as_pointer()), align=2) for at in loads]
        for half in range(2):
            lanes = [half * _LANES + lane // 2 + lane % 2 * 2 * _LANES for lane in range(2 * _LANES)]
            mask = ir.Constant(ir.VectorType(_PAIR, 2 * _LANES), lanes)
            at = builder.gep(target, [builder.add(builder.mul(arguments[4], _LONG(4)), _LONG(half * _BYTES))])
            builder.store(builder.shuffle_vector(*both, mask), builder.bitcast(at, kind.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(stored, types.intp, types.intp, values_BWPO, types.intp), generate


@in_order
def _fetch_run(stored_PGD, head, slots_L, run):
    """Have the CPU fetch a head's entries of a run, if there is one."""
    size = stored_PGD.shape[2]
    entry_bytes = 2 * stored_PGD.shape[1] * size
    for place in range(run * KEYS, min((run + 1) * KEYS, slots_L.shape[0])):
        for at in range(0, 2 * size, _BYTES):
            _prefetch(stored_PGD, slots_L[place] * entry_bytes + 2 * head * size + at)


@in_order
def _score(queries_MD, keys_PGD, values_PGD, head, slots_L, scale, scores_MRK):
    """Scaled queries times keys, run after run."""
    vectors, size = queries_MD.shape
    entry_bytes = 2 * keys_PGD.shape[1] * size
    keys_1WPK, places_K = np.empty((1, size // (2 * PAIRS), PAIRS, KEYS), np.uint32), np.empty(KEYS, np.int64)
    sums_MK = np.empty((vectors, KEYS), np.float32)
    for run in range(scores_MRK.shape[1]):
        _fetch_run(keys_PGD, head, slots_L, run + 1)
        _fetch_run(values_PGD, head, slots_L, run)
        filled = min(KEYS, slots_L.shape[0] - run * KEYS)
        for j in range(KEYS):  # after the filled ones, the last is repeated
            places_K[j] = slots_L[run * KEYS + min(j, filled - 1)] * entry_bytes
        for part in range(size // (2 * PAIRS)):
            for first in range(0, filled, _LANES):
                _turn(keys_PGD, places_K, first, 2 * head * size + _BYTES * part, keys_1WPK[0, part])
        avx512.multiply_cached(queries_MD, keys_1WPK, 0, sums_MK)
        for m in range(vectors):
            for j in range(KEYS):
                scores_MRK[m, run, j] = sums_MK[m, j] * scale


@in_order
def _mix(weights_MRK, values_PGD, head, slots_L, mixed_MBO):
    """Add weights times values, run after run."""
    (vectors, runs, _), blocks, size = weights_MRK.shape, mixed_MBO.shape[1], values_PGD.shape[2]
    entry_bytes, parts = 2 * values_PGD.shape[1] * size, min(2 * blocks, size // (2 * _LANES))
    values_BWPO = np.zeros((blocks, KEYS // (2 * PAIRS), PAIRS, OUTPUTS), np.uint32)
    rounded_MK, sums_MO = np.empty((vectors, KEYS), np.uint16), np.empty((vectors, OUTPUTS), np.float32)
    for run in range(runs):
        filled = min(KEYS, slots_L.shape[0] - run * KEYS)
        for m in range(vectors):
            for j in range(KEYS):
                rounded_MK[m, j] = narrow(weights_MRK[m, run, j], rounded_MK)
        for pair in range((filled + 1) // 2):  # after these, weights are zero and stale values finite
            even = slots_L[run * KEYS + 2 * pair] * entry_bytes + 2 * head * size
            odd = slots_L[run * KEYS + min(2 * pair + 1, filled - 1)] * entry_bytes + 2 * head * size
            for part in range(parts):
                column = (part // 2 * KEYS // 2 + pair) * OUTPUTS + part % 2 * 2 * _LANES
                _pair_up(values_PGD, even + _BYTES * part, odd + _BYTES * part, values_BWPO, column)
        for block in range(blocks):
            avx512.multiply_cached(rounded_MK, values_BWPO, block, sums_MO)
            for m in range(vectors):
                for d in range(OUTPUTS):
                    mixed_MBO[m, block, d] += sums_MO[m, d]


@register_jitable
def _seen(limit, ancestors):
    """How many entries a row sees."""
    while ancestors:
        ancestors &= ancestors - 1
        limit += 1
    return limit


@register_jitable
def _branches(ancestors_N):
    """Whether some row's ancestors are not all entries from the first draft entry to the last ancestor."""
    found = False
    for ancestors in ancestors_N:
        found = found or ancestors & (ancestors + 1) != 0
    return found


@in_order
def _line_up(slots_L, limit, base, ancestors):
    """The entries that a row sees, as if its ancestors were a chain."""
    lined_up_L = np.empty(_seen(limit, ancestors), np.int64)
    for place in range(limit):
        lined_up_L[place] = slots_L[place]
    for bit in range(64):
        if (ancestors >> bit) & 1:
            lined_up_L[limit] = slots_L[base + bit]
            limit += 1
    return lined_up_L


@in_order
def _attend(first, rows, head, q_NHD, keys_PGD, values_PGD, slots_L, limits_N, ancestors_N, window, scale, out_NHD):
    """Rows whose entries follow each other without gaps."""
    size, out_size, shared = q_NHD.shape[2], out_NHD.shape[2], q_NHD.shape[1] // keys_PGD.shape[1]
    vectors, blocks = rows * shared, (out_size + OUTPUTS - 1) // OUTPUTS
    queries_MD = np.empty((vectors, size), np.uint16)
    for m in range(vectors):
        row, query = first + m // shared, head * shared + m % shared
        for d in range(size):
            queries_MD[m, d] = q_NHD[row, query, d]
    scores_MRK = np.empty((vectors, (slots_L.shape[0] + KEYS - 1) // KEYS, KEYS), np.float32)
    _score(queries_MD, keys_PGD, values_PGD, head, slots_L, scale, scores_MRK)
    scores_ML = scores_MRK.reshape((vectors, scores_MRK.shape[1] * KEYS))
    for m in range(vectors):
        row = first + m // shared
        weigh_chain(scores_ML[m], _seen(limits_N[row], ancestors_N[row]), window)
    mixed_MBO = np.zeros((vectors, blocks, OUTPUTS), np.float32)
    _mix(scores_MRK, values_PGD, head, slots_L, mixed_MBO)
    mixed_MD = mixed_MBO.reshape((vectors, blocks * OUTPUTS))
    for m in range(vectors):
        row, query = first + m // shared, head * shared + m % shared
        for d in range(out_size):
            out_NHD[row, query, d] = narrow(mixed_MD[m, d], out_NHD)


@in_order
def attend_tile(
    task, q_NHD, keys_PGD, values_PGD, slots_RL, tiles_T3, limits_N, bases_N, ancestors_N, window, scale, out_NHD
):
    """As in attention.py, for heads of whole parts."""
    tile, head = task // keys_PGD.shape[1], task % keys_PGD.shape[1]
    span, first, rows = tiles_T3[tile]
    slots_L, stop = slots_RL[span], first + rows
    _fetch_run(keys_PGD, head, slots_L, 0)
    branches, count = _branches(ancestors_N[first:stop]), 0
    for row in range(first, stop):
        count = max(count, _seen(limits_N[row], ancestors_N[row]))
    at_once = 1 if branches else rows
    for row in range(first, stop, at_once):  # one place for both, since all of it is compiled into its callers
        lined_up_L = _line_up(slots_L, limits_N[row], bases_N[row], ancestors_N[row]) if branches else slots_L[:count]
        seen = (limits_N, ancestors_N, window, scale, out_NHD)
        _attend(row, at_once, head, q_NHD, keys_PGD, values_PGD, lined_up_L, *seen)


@kernel
def attend(q_NHD, keys_PGD, values_PGD, slots_RL, tiles_T3, limits_N, bases_N, ancestors_N, window, scale, out_NHD):
    """As in attention.py, for heads that fit."""
    for task in prange(tiles_T3.shape[0] * keys_PGD.shape[1]):
        seen = (slots_RL, tiles_T3, limits_N, bases_N, ancestors_N, window, scale)
        attend_tile(task, q_NHD, keys_PGD, values_PGD, *seen, out_NHD)
