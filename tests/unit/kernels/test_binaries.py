"""Kernels over a step's rows have one binary, however many rows there are and wherever their tensors lie: a request
would wait for another."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from stridelm.kernels import fp8, products
from stridelm.kernels.plain_fp8 import quantised
from stridelm.kernels.quantise import quantise
from stridelm.kernels.row_forms import RowForm
from stridelm.kernels.triton_rows import TritonOps
from stridelm.kernels.triton_step import TritonStepOps
from stridelm.models.layers.expert_products import GroupedExperts
from stridelm.models.layers.fp8_experts import GroupedFP8Experts
from stridelm.models.layers.products import tiled_product
from stridelm.sample.rows import Rows
from support.checks.edit_kernels import Case, make_case
from support.checks.experts import Case as DenseExperts
from support.checks.fp8 import ExpertsCase
from support.checks.layout_kernel import check_layout
from support.checks.source_choice import CLASS_OF_LENGTH, random_tables
from support.checks.walk_kernels import Tables, agreeable, random_draft, random_nodes
from support.doubles.binaries import Binaries, recorded
from support.doubles.interpreter import INTERPRETED

pytestmark = INTERPRETED
TRUNCATED = {"temperature": 0.8, "top_k": 5, "top_p": 0.9, "min_p": 0.01}
TRITON = TritonStepOps()
PURPOSES = {"BIT", "B", "R", "K", "G", "HEIGHTS", "SORTED", "BY_BLOCK", "ACTIVATION", "STAGES", "num_stages"}
"""Constants that say what a kernel is to do, and the sizes of its tiles, of which few serve all steps."""
ALLOWED = {"layout.lay_spans": 2, "expert_pairs._sort_kernel": 2}
"""One for short spans and one for long ones; one for each power of two of pairs, which the sizes of captured steps have
too."""


def parts(case: Case) -> list[Case]:
    """1 to 9 rows of the case, from the first on and from the second, as views."""
    rows, found = case.rows, []
    assert rows.extra is not None
    for first in (0, 1):
        for count in range(1, 10):
            at = slice(first, first + count)
            some = Rows(rows.slots[at], rows.positions[at], rows.extra[at], rows.longest)
            found.append(replace(case, logits=case.logits[at], rows=some, slots=case.slots[at]))
    return found


def draw_rows() -> None:
    for case in parts(make_case(1, 64, others=(TRUNCATED,), padding=0)):
        case.drawn()
        case.sampler.ops.confidence(case.logits)


def verify_drafts() -> None:
    for width in (1, 2, 3, 7, 9, 64):
        rng = random.Random(width)
        draft, tables = random_draft(rng, width), Tables(rng)
        drawn, nodes = agreeable(rng, draft), random_nodes(rng, width)
        TRITON.walk(draft, drawn, nodes, *tables.arguments())
        TRITON.cut_windows(drawn, nodes, *tables.arguments())


def lay_out() -> None:
    for width in (0, 1, 2, 5, 9):
        check_layout(width, width, "cpu", TRITON)


def choose_drafts() -> None:
    for width in range(1, 10):
        tables = random_tables(random.Random(width), wide=16)
        slots, found = torch.arange(width) % 8, torch.zeros(width, width, dtype=torch.int64)
        TRITON.choose_sources(tables, slots, slots, width, found, found.bool(), slots, torch.tensor(CLASS_OF_LENGTH))
        TRITON.learn_sources(tables, slots, torch.zeros(width, width + 1, dtype=torch.int64), slots)


def multiply() -> None:
    weight = torch.zeros(64, 256)
    stored, scale = quantised(weight)
    for rows in range(1, 10):
        x = torch.zeros(rows, 256)
        products.product(x, weight, None)
        fp8.product(quantise(x, RowForm.BLOCKS), stored, scale, None)
        fp8.product(quantise(x, RowForm.WHOLE), stored, torch.ones(64, 1), None)
        case = ExpertsCase(rows, 5, 2, 128, 256, "block", torch.float32, "cpu")
        case.run(GroupedFP8Experts(case.layer, tiled_product, case.powers), TritonOps())
        DenseExperts(rows, 5, 2, 128, 256, torch.float16).run(GroupedExperts(), TritonOps())


def kinds(found: Binaries) -> dict[tuple[object, ...], int]:
    """(kernel, what it is for) -> number of binaries. What is optional, such as a bias, is a kind of its own."""
    counts: dict[tuple[object, ...], int] = {}
    for kernel, binaries in found.items():
        for binary in binaries:
            kind = (kernel, *(each for each in binary if each[0] in PURPOSES or each[1] is type(None)))
            counts[kind] = counts.get(kind, 0) + 1
    return counts


@pytest.mark.parametrize("launch", [draw_rows, verify_drafts, lay_out, choose_drafts, multiply])
def test_steps_of_all_sizes_share_binaries(launch: Callable[[], None]) -> None:
    with recorded(run=launch is lay_out) as found:  # which checks what it gets
        launch()
    assert found
    several = {kind: count for kind, count in kinds(found).items() if count > ALLOWED.get(str(kind[0]), 1)}
    assert not several
