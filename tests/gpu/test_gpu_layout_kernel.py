"""On a GPU: the kernels that lay out the rows of a step and of a head and set some aside, those for prompt lookup, and
those that choose what drafts."""

from __future__ import annotations

import pytest

from support.gpu import NEEDS_GPU

pytest.importorskip("triton", reason="triton is not installed")

from stridelm.kernels.triton_step import TritonStepOps
from support.checks.following import check_commit, check_following
from support.checks.layout_kernel import check_layout
from support.checks.lookup_kernel import check_lookup
from support.checks.place_kernel import check_place
from support.checks.set_aside import check_set_aside
from support.checks.source_choice import check_source_choice
from support.checks.sources import check_sources

pytestmark = NEEDS_GPU


@pytest.mark.parametrize("width", [0, 1, 5, 64])
def test_layout(width: int) -> None:
    for seed in range(20):
        check_layout(seed, width, "cuda", TritonStepOps())


def test_place() -> None:
    for seed in range(40):
        check_place(seed, "cuda")


def test_sources() -> None:
    for seed in range(40):
        check_sources(seed, "cuda", TritonStepOps())


def test_following() -> None:
    for seed in range(40):
        check_following(seed, "cuda", TritonStepOps())
        check_commit(seed, "cuda", TritonStepOps())


def test_set_aside() -> None:
    for seed in range(40):
        check_set_aside(seed, "cuda", TritonStepOps())


def test_sources_of_drafts() -> None:
    for seed in range(40):
        check_source_choice(seed, "cuda", TritonStepOps())


@pytest.mark.parametrize("longest", [60, 5000])
def test_lookup(longest: int) -> None:
    for seed in range(20):
        check_lookup(seed, "cuda", TritonStepOps(), longest)
