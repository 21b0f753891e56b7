"""Decoder layers for few rows: one call for all of them, where the host would otherwise make nine for each and prepare
each.

Threads share the work of the whole call (team.py). What they run are the parts of the kernels in rows.py, attention.py
and product.py, so the bits are theirs, whatever the number of threads.

Legend: as in kernels/ops.py and attention.py; L layers, K kinds of attention, F columns of a table.
"""

# mypy: disable-error-code="no-untyped-def,call-arg,unreachable,attr-defined"
from __future__ import annotations

import numpy as np
from numba import prange
from numba.core import types

from stridelm.compiled import njit
from stridelm.kernels.host import attention, pair_attention, simd
from stridelm.kernels.host.address import floats, halves, integers, page_ids, words
from stridelm.kernels.host.apart import apart, caller
from stridelm.kernels.host.arithmetic import in_order, kernel
from stridelm.kernels.host.columns import (
    ACTIVATION,
    AFTER_MIXER,
    AFTER_MLP,
    ANCESTORS,
    COS,
    DELTA,
    DOWN,
    DOWN_BIAS,
    DRAFT_ROWS,
    EPS,
    FACTOR,
    FIRSTS,
    GATE_UP,
    GATE_UP_BIAS,
    HEAD_SIZE,
    HEADS,
    KEPT,
    KEYS,
    KIND,
    KV_HEADS,
    LOOKERS,
    LOOKING,
    MIXER_NORM,
    MLP_NORM,
    MLP_WIDTH,
    NORM,
    NORMED,
    OUT,
    OUT_BIAS,
    PAGE_SIZE,
    PAGES,
    POSITIONS,
    QK_EPS,
    QK_NORMS,
    QKV,
    QKV_BIAS,
    READ,
    READS,
    REALS,
    ROTATED,
    ROWS,
    SCALE,
    SEEN_AT,
    SHARED,
    SIN,
    SLOTS,
    SPANS,
    STARTS,
    TABLE_PAGES,
    THREADS,
    VALUES,
    WAITING,
    WIDTH,
    WINDOW,
    X,
)
from stridelm.kernels.host.geometry import TILE_QUERIES, pool_slots, reach, tiles
from stridelm.kernels.host.product import multiply_block
from stridelm.kernels.host.rows import add_row, gelu_row, gelu_tanh_row, norm_row, rope_heads, scale_row, silu_row
from stridelm.kernels.host.team import COUNTERS, next_of, tasks_of

PHASES = 9
"""Of a layer."""
_MANY = 1 << 40
"""Rows of a table whose number is not needed."""
_LINE, _TABLE, _STACK = types.int64[::1], types.int64[:, ::1], types.int64[:, :, ::1]
_TEAM, _TABLES = types.Tuple((types.int64, _TABLE)), types.Tuple((_TABLE, _TABLE, _TABLE))
_SIGHT = types.Tuple((_STACK, _STACK, _LINE, _LINE, _LINE, _LINE))
_WORK = types.Tuple((_TEAM, types.uint16[:, ::1], _LINE, _TABLES, _SIGHT))
"""What a thread is given: a team, scratch memory, a call, tables of layers, and what rows see."""
_call = caller(_WORK)


def run_layers(call_F, kinds_KF, stored_LF, layers_LF):
    """Add to the residual stream x, in place. Write to `delta` what is still to be added to it, or, if there is a norm,
    add that too and write the norm. Arguments: tables whose columns columns.py lists."""
    _run_layers(_work(), call_F, kinds_KF, stored_LF, layers_LF)


@njit(error_model="numpy")
def _run_layers(work, call_F, kinds_KF, stored_LF, layers_LF):
    rows, width, spans, kinds = call_F[ROWS], call_F[WIDTH], call_F[SPANS], len(kinds_KF)
    looking = call_F[LOOKING] if call_F[LOOKERS] else rows
    firsts = page_ids(call_F[FIRSTS], (spans,))
    starts, reals = page_ids(call_F[STARTS], (spans,)), page_ids(call_F[REALS], (spans,))
    draft_rows, seen_at = integers(call_F[DRAFT_ROWS], (looking,)), integers(call_F[SEEN_AT], (looking,))
    bases, limits = reach(firsts, starts, reals, draft_rows, seen_at)
    slots_KRL = np.empty((kinds, spans, call_F[TABLE_PAGES] * call_F[PAGE_SIZE]), np.int64)
    tiles_KT3, counts_K = np.empty((kinds, spans + looking, 3), np.int64), np.zeros(kinds, np.int64)
    widest = width
    for layer in range(len(layers_LF)):
        about, stored = layers_LF[layer], stored_LF[layer]
        widest = max(widest, (about[HEADS] + 2 * about[KV_HEADS]) * about[HEAD_SIZE], about[MLP_WIDTH])
        kind = stored[KIND]
        if not counts_K[kind]:
            pages = page_ids(kinds_KF[kind, PAGES], (spans, call_F[TABLE_PAGES]))
            slots_KRL[kind] = pool_slots(pages, call_F[PAGE_SIZE])
            found = tiles(firsts, looking, max(1, TILE_QUERIES // stored[SHARED]))
            tiles_KT3[kind, : len(found)], counts_K[kind] = found, len(found)
    team = (call_F[THREADS], np.zeros((PHASES * len(layers_LF) + 1, COUNTERS), np.int64))
    sight = (slots_KRL, tiles_KT3, counts_K, limits, bases, integers(call_F[ANCESTORS], (looking,)))
    _share(work, team, np.empty((4, rows * widest), np.uint16), call_F, (layers_LF, stored_LF, kinds_KF), sight)


@kernel
def _share(work, team, scratch, call_F, tables, sight):
    for _ in prange(team[0]):
        _call(work, (team, scratch, call_F, tables, sight))


@apart(_WORK)
def _work(given):
    """One thread's part."""
    team, scratch, call_F, (layers_LF, stored_LF, kinds_KF), sight = given
    rows, width, eps = call_F[ROWS], call_F[WIDTH], np.int32(call_F[EPS]).view(np.float32)
    x_NC, delta_NC = halves(call_F[X], (rows, width)), halves(call_F[DELTA], (rows, width))
    positions_N = integers(call_F[POSITIONS], (rows,))
    sums, normed = np.empty((rows, simd.OUTPUTS), np.float32), scratch[0, : rows * width].reshape((rows, width))
    simd.configure(simd.configuration(rows))
    phase, after, factor = 0, 0, 0
    for layer in range(len(layers_LF)):
        about, stored = layers_LF[layer], stored_LF[layer]
        adds = call_F[WAITING] != 0 or layer > 0
        if about[MIXER_NORM]:
            _norm(team, phase, adds, x_NC, delta_NC, after, factor, about[MIXER_NORM], eps, normed)
            read_NI = normed
        else:
            read_NI = halves(call_F[READ], (rows, call_F[READS]))
        q = _queries(team, phase + 1, read_NI, about, stored, kinds_KF[stored[KIND]], positions_N, sums, scratch)
        if call_F[LOOKERS]:
            rows = call_F[LOOKING]
            lookers, kept = integers(call_F[LOOKERS], (rows,)), halves(call_F[KEPT], (rows, width))
            q, x_NC = _kept(team, phase + 3, lookers, q, scratch[1], x_NC, kept), kept
            delta_NC, sums = halves(call_F[DELTA], (rows, width)), sums[:rows]
            normed = scratch[0, : rows * width].reshape((rows, width))
            simd.configure(simd.configuration(rows))
        mixed = _attention(team, phase + 4, q, stored, sight, scratch)
        _multiply(team, phase + 5, mixed, about[OUT], about[OUT_BIAS], sums, delta_NC)
        _norm(team, phase + 6, True, x_NC, delta_NC, about[AFTER_MIXER], 0, about[MLP_NORM], eps, normed)
        gated = scratch[1, : rows * about[MLP_WIDTH]].reshape((rows, about[MLP_WIDTH]))
        _gate(team, phase + 7, normed, about, sums, gated)
        _multiply(team, phase + 8, gated, about[DOWN], about[DOWN_BIAS], sums, delta_NC)
        phase, after, factor = phase + PHASES, about[AFTER_MLP], about[FACTOR]
    simd.release()
    if call_F[NORM]:
        normed = halves(call_F[NORMED], (rows, width))
        _norm(team, phase, True, x_NC, delta_NC, after, factor, call_F[NORM], eps, normed)


@in_order
def _norm(team, phase, adds, x_NC, delta_NC, after, factor, weight, eps, out_NC):
    """The norm of the stream, to which `delta` is added first if `adds`: its norm if there is an `after`, the sum times
    a factor if there is one. after, factor, weight: addresses; 0 for none."""
    width = x_NC.shape[1]
    after_C, factor_1 = halves(after, (width if after else 0,)), halves(factor, (1 if factor else 0,))
    weight_C = halves(weight, (width,))
    for row in tasks_of(team, phase, len(x_NC)):
        if adds:
            if len(after_C):
                norm_row(row, delta_NC, after_C, eps, delta_NC)
            add_row(row, x_NC, delta_NC)
            if len(factor_1):
                scale_row(row, x_NC, factor_1)
        norm_row(row, x_NC, weight_C, eps, out_NC)


@in_order
def _queries(team, phase, x_NC, about, stored, kind, positions_N, sums, scratch):
    """[N, H, D] the queries of all rows, whose keys and values are stored."""
    rows, heads, size = len(x_NC), about[HEADS], about[HEAD_SIZE]
    both, kv_heads = heads + 2 * about[KV_HEADS], heads // stored[SHARED]
    projected, q = scratch[1, : rows * both * size], scratch[2, : rows * heads * size].reshape((rows, heads, size))
    keys, values = halves(stored[KEYS], (_MANY, kv_heads, size)), halves(stored[VALUES], (_MANY, kv_heads, size))

    _multiply(team, phase, x_NC, about[QKV], about[QKV_BIAS], sums, projected.reshape((rows, both * size)))
    normed = 0 if not about[QK_NORMS] else 2 if about[KV_HEADS] else 1
    norms = halves(about[QK_NORMS], (normed, size))
    pairs = about[ROTATED] // 2
    cos, sin = floats(about[COS], (_MANY, pairs)), floats(about[SIN], (_MANY, pairs))
    slots, eps = integers(kind[SLOTS], (rows,)), np.int32(about[QK_EPS]).view(np.float32)
    heads_NXD = projected.reshape((rows, both, size))
    for task in tasks_of(team, phase + 1, rows * kv_heads):
        row, group = task // kv_heads, task % kv_heads
        rope_heads(row, group, heads_NXD, norms, eps, positions_N, cos, sin, slots, q, keys, values)
    return q


@in_order
def _kept(team, phase, lookers_M, q_NHD, spare, x_NC, kept_MC):
    """[M, H, D] the queries of some rows, in spare memory; their stream is written to `kept`."""
    rows, (_, heads, size) = len(lookers_M), q_NHD.shape
    q_MHD = spare[: rows * heads * size].reshape((rows, heads, size))
    for row in tasks_of(team, phase, rows):  # by loops: copies of slices take a second to compile
        for head in range(heads):
            for d in range(size):
                q_MHD[row, head, d] = q_NHD[lookers_M[row], head, d]
        for column in range(x_NC.shape[1]):
            kept_MC[row, column] = x_NC[lookers_M[row], column]
    return q_MHD


@in_order
def _attention(team, phase, q_NHD, stored, sight, scratch):
    """[N, H D] the values of all heads side by side."""
    slots_KRL, tiles_KT3, counts_K, limits_N, bases_N, ancestors_N = sight
    (rows, heads, size), number = q_NHD.shape, stored[KIND]
    kv_heads = heads // stored[SHARED]
    tiles_T3, mixed = tiles_KT3[number, : counts_K[number]], scratch[3, : rows * heads * size]
    keys, values = halves(stored[KEYS], (_MANY, kv_heads, size)), halves(stored[VALUES], (_MANY, kv_heads, size))

    seen = (slots_KRL[number], tiles_T3, limits_N, bases_N, ancestors_N)
    scale, out = np.int32(stored[SCALE]).view(np.float32), mixed.reshape((rows, heads, size))
    for task in tasks_of(team, phase, len(tiles_T3) * kv_heads):
        if pair_attention.has_whole_parts(size):
            pair_attention.attend_tile(task, q_NHD, keys, values, *seen, stored[WINDOW], scale, out)
        else:
            attention.attend_tile(task, q_NHD, keys, values, *seen, stored[WINDOW], scale, out)
    return mixed.reshape((rows, heads * size))


@in_order
def _multiply(team, phase, x_NI, weight, bias, sums, out_NO):
    """weight, bias: addresses; 0 for no bias."""
    outputs = out_NO.shape[1]
    weight_OIPB, bias_O = _weights(weight, x_NI.shape[1], outputs), halves(bias, (outputs if bias else 0,))
    ahead = next_of(team, len(weight_OIPB))
    for block in tasks_of(team, phase, len(weight_OIPB)):
        multiply_block(block, ahead, x_NI, weight_OIPB, bias_O, sums, out_NO, block * simd.OUTPUTS)


@in_order
def _gate(team, phase, x_NI, about, sums, out_NI):
    """The product with gate and up, and the gate: a task has a block of both."""
    (rows, width), activation = out_NI.shape, about[ACTIVATION]
    both_N2B = np.empty((rows, 2 * simd.OUTPUTS), np.uint16)
    weight = _weights(about[GATE_UP], x_NI.shape[1], 2 * width)
    bias = halves(about[GATE_UP_BIAS], (2 * width if about[GATE_UP_BIAS] else 0,))
    blocks = width // simd.OUTPUTS
    ahead = next_of(team, blocks)
    for block in tasks_of(team, phase, blocks):
        multiply_block(block, ahead, x_NI, weight, bias, sums, both_N2B, 0)
        multiply_block(blocks + block, ahead, x_NI, weight, bias, sums, both_N2B, simd.OUTPUTS)
        for row in range(rows):
            if activation == 0:
                silu_row(row, both_N2B, out_NI, block * simd.OUTPUTS)
            elif activation == 1:
                gelu_tanh_row(row, both_N2B, out_NI, block * simd.OUTPUTS)
            else:
                gelu_row(row, both_N2B, out_NI, block * simd.OUTPUTS)


@in_order
def _weights(address, inputs, outputs):
    """A product's weight in blocks (product.py)."""
    blocks = -(-outputs // simd.OUTPUTS)
    return words(address, (blocks, inputs // (2 * simd.PAIRS), simd.PAIRS, simd.OUTPUTS))
