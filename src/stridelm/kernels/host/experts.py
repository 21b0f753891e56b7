"""Products of few rows with the experts that they have chosen, in one call.

Rows of the same expert form groups, each as tall as a tile at most; threads share the blocks of all groups (team.py).
Parts and bits are those of product.py and rows.py.

Legend: as in product.py; P pairs of a row and one of its experts, E experts, G groups, H width, I an expert's width.
"""

# mypy: disable-error-code="no-untyped-def,call-arg,unreachable"
from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numba import prange

from stridelm.compiled import njit
from stridelm.kernels.host import simd
from stridelm.kernels.host.address import words
from stridelm.kernels.host.arithmetic import follow_torch, in_order, kernel
from stridelm.kernels.host.memory import NO_BIAS, array
from stridelm.kernels.host.product import FewRows, multiply_block
from stridelm.kernels.host.rows import gelu_row, gelu_tanh_row, silu_row
from stridelm.kernels.host.team import COUNTERS, next_of, tasks_of
from stridelm.kernels.ops import ACTIVATIONS

_PHASES = 3


@njit(error_model="numpy")
def group(chosen_P, experts):
    """[P] the pairs by expert, and [G, 3] (expert, first of these, how many) of each group."""
    firsts_E = np.zeros(experts + 1, np.int64)
    for expert in chosen_P:
        firsts_E[expert + 1] += 1
    groups = 0
    for expert in range(experts):
        groups += (firsts_E[expert + 1] + simd.ROWS - 1) // simd.ROWS
        firsts_E[expert + 1] += firsts_E[expert]
    pairs_P, next_E = np.empty(len(chosen_P), np.int64), firsts_E.copy()
    for pair in range(len(chosen_P)):
        pairs_P[next_E[chosen_P[pair]]] = pair
        next_E[chosen_P[pair]] += 1
    groups_G3, made = np.empty((groups, 3), np.int64), 0
    for expert in range(experts):
        for first in range(firsts_E[expert], firsts_E[expert + 1], simd.ROWS):
            count = min(simd.ROWS, firsts_E[expert + 1] - first)
            groups_G3[made, 0], groups_G3[made, 1], groups_G3[made, 2] = expert, first, count
            made += 1
    return pairs_P, groups_G3


@kernel
def _run(threads, board, x_NH, each, pairs_P, groups_G3, gate_up_E, down_E, activation, scratch, parts_PH):
    team = (threads, board)
    for _ in prange(threads):
        _work(team, x_NH, each, pairs_P, groups_G3, gate_up_E, down_E, activation, scratch, parts_PH)


@in_order
def _work(team, x_NH, each, pairs_P, groups_G3, gate_up_E, down_E, activation, scratch, parts_PH):
    """One thread's part."""
    rows_PH, inner_PI = scratch
    width, inner, pair_inputs = x_NH.shape[1], inner_PI.shape[1], 2 * simd.PAIRS
    for place in tasks_of(team, 0, len(pairs_P)):
        row = pairs_P[place] // each
        for i in range(width):
            rows_PH[place, i] = x_NH[row, i]
    sums = np.empty((simd.ROWS, simd.OUTPUTS), np.float32)
    both = np.empty((simd.ROWS, 2 * simd.OUTPUTS), np.uint16)
    blocks, configured = inner // simd.OUTPUTS, 0
    ahead = next_of(team, len(groups_G3) * blocks)
    for task in tasks_of(team, 1, len(groups_G3) * blocks):
        number, block = task // blocks, task % blocks
        expert, first, count = groups_G3[number, 0], groups_G3[number, 1], groups_G3[number, 2]
        if configured != count:
            simd.configure(simd.configuration(count))
            configured = count
        weight = words(gate_up_E[expert], (2 * blocks, width // pair_inputs, simd.PAIRS, simd.OUTPUTS))
        x, out = rows_PH[first : first + count], inner_PI[first : first + count]
        multiply_block(block, ahead, x, weight, NO_BIAS, sums, both[:count], 0)
        multiply_block(blocks + block, ahead, x, weight, NO_BIAS, sums, both[:count], simd.OUTPUTS)
        for row in range(count):
            if activation == 0:
                silu_row(row, both, out, block * simd.OUTPUTS)
            elif activation == 1:
                gelu_tanh_row(row, both, out, block * simd.OUTPUTS)
            else:
                gelu_row(row, both, out, block * simd.OUTPUTS)
    blocks = width // simd.OUTPUTS
    ahead = next_of(team, len(groups_G3) * blocks)
    for task in tasks_of(team, 2, len(groups_G3) * blocks):
        number, block = task // blocks, task % blocks
        expert, first, count = groups_G3[number, 0], groups_G3[number, 1], groups_G3[number, 2]
        if configured != count:
            simd.configure(simd.configuration(count))
            configured = count
        weight = words(down_E[expert], (blocks, inner // pair_inputs, simd.PAIRS, simd.OUTPUTS))
        multiply_block(block, ahead, inner_PI[first : first + count], weight, NO_BIAS, sums, both[:count], 0)
        for row in range(count):
            for i in range(simd.OUTPUTS):
                parts_PH[pairs_P[first + row], block * simd.OUTPUTS + i] = both[row, i]
    simd.release()


class FewRowsOfExperts:
    """The packed matrices of all experts. They share memory with what they were made of, which must be kept."""

    def __init__(self, gate_up: Sequence[FewRows], down: Sequence[FewRows]) -> None:
        """Gate, up and down each begin with a block."""
        assert gate_up[0].splits_into(2) and down[0].splits_into(1)
        self.inner, self.width = gate_up[0].outputs // 2, down[0].outputs
        self.gate_up, self.down = (np.array([each.address for each in some]) for some in (gate_up, down))

    @classmethod
    def run_once(cls, x_NH: torch.Tensor, chosen_NK: torch.Tensor) -> None:
        """Compile what `__call__` runs."""
        block = np.zeros((2, 1, simd.PAIRS, simd.OUTPUTS), np.uint32)
        gate_up, down = FewRows(block, 2 * simd.OUTPUTS), FewRows(block[:1], simd.OUTPUTS)
        cls([gate_up, gate_up], [down, down])(x_NH, chosen_NK, ACTIVATIONS[0])

    def __call__(self, x_NH: torch.Tensor, chosen_NK: torch.Tensor, activation: str) -> torch.Tensor:
        """[N, K, H]."""
        rows, each = chosen_NK.shape
        parts_NKH = x_NH.new_empty(rows, each, self.width)
        threads = follow_torch()
        pairs_P, groups_G3 = group(array(chosen_NK.flatten()), len(self.down))
        _run(
            threads,
            np.zeros((_PHASES, COUNTERS), np.int64),
            array(x_NH.contiguous()),
            each,
            pairs_P,
            groups_G3,
            self.gate_up,
            self.down,
            ACTIVATIONS.index(activation),
            (np.empty((rows * each, self.width), np.uint16), np.empty((rows * each, self.inner), np.uint16)),
            array(parts_NKH.view(rows * each, self.width)),
        )
        return parts_NKH
