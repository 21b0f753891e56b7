"""Which of two sources drafts, and what is learnt from what became of both."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from stridelm.kernels.host.step import HostStepOps
from stridelm.kernels.plain_sources import MOST_CHECKS, OWN, PRIOR, SourceTables
from stridelm.kernels.plain_step import PlainStepOps
from stridelm.kernels.step_ops import StepOps
from support.checks.source_choice import check_source_choice
from support.doubles.interpreter import INTERPRETED


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def fresh(given: list[list[float]], slots: int = 2) -> SourceTables:
    """Tables of requests of which nothing is known."""
    means = torch.tensor(given)
    return SourceTables(
        guesses_S2W=torch.zeros(slots + 1, 2, 4, dtype=torch.int64),
        levels_S2=torch.zeros(slots + 1, 2, dtype=torch.int64),
        classes_S2=torch.zeros(slots + 1, 2, dtype=torch.int64),
        luck_S22=torch.zeros(slots + 1, 2, 2),
        shares_S=torch.ones(slots + 1, dtype=torch.bool),
        counts_CD2=torch.zeros(*means.shape, 2, dtype=torch.int64),
        given_CD=means,
    )


def choose(ops: StepOps, tables: SourceTables, found: int, matched: int, bound: int = 4, guessed: int = 3) -> bool:
    exists = torch.arange(4)[None] < found
    looked = torch.tensor([[7, 8, 9, 10]])
    return bool(
        ops.choose_sources(tables, ints(0), ints(bound), guessed, looked, exists, ints(matched), ints(1, 1, 1, 2))
    )


SETS = (PlainStepOps(), HostStepOps())


@pytest.mark.parametrize("ops", SETS)
def test_the_greater_expectation_wins(ops: StepOps) -> None:
    """Guesses 0.5 + 0.25 + 0.125; a short match 0.2, 0.04, ...; a long one 0.9 + 0.81 + ..."""
    tables = fresh([[0.5], [0.2], [0.9]])
    assert not choose(ops, tables, found=4, matched=2)
    assert choose(ops, tables, found=4, matched=3)
    assert choose(ops, tables, found=1, matched=3), "0.9 is more than 0.875"
    assert not choose(ops, tables, found=0, matched=3)
    assert choose(ops, tables, found=1, matched=3, bound=1, guessed=1)
    assert not choose(ops, fresh([[0.5], [0.2], [0.8]]), found=1, matched=3)


@pytest.mark.parametrize("ops", SETS)
def test_both_are_learnt_from_what_was_emitted(ops: StepOps) -> None:
    """7 8 1 were emitted: of what was looked up two levels were right and the third wrong, and of the guesses 7 5 the
    second was wrong, so nothing is known of later ones. A request's luck is how much more came than was expected."""
    tables = fresh([[0.5], [0.2], [0.9]])
    choose(ops, tables, found=4, matched=3)
    tables.guesses_S2W[0, 0, :3], tables.levels_S2[0, 0] = ints(7, 5, 1), 3
    ops.learn_sources(tables, ints(0), torch.tensor([[7, 8, 1]]), ints(3))
    assert tables.counts_CD2[:, 0].tolist() == [[1, 2], [0, 0], [2, 3]]
    assert tables.luck_S22[0].flatten().tolist() == pytest.approx([1, 1.0, 2, 2.7])
    assert tables.levels_S2[0].tolist() == [0, 0]
    ops.learn_sources(tables, ints(0), torch.tensor([[7, 8, 1]]), ints(3))
    assert tables.counts_CD2[:, 0].tolist() == [[1, 2], [0, 0], [2, 3]], "a proposal is learnt from once"


@pytest.mark.parametrize("ops", SETS)
def test_a_request_that_shares_nothing(ops: StepOps) -> None:
    """It neither reads nor feeds what others' drafts got: only the given means and its own luck count."""
    tables = fresh([[0.5], [0.2], [0.9]])
    tables.shares_S[0] = False
    tables.counts_CD2[2] = ints(0, 4000)  # for the others long matches never worked
    assert choose(ops, tables, found=4, matched=3)
    for _ in range(12):
        choose(ops, tables, found=4, matched=3)
        ops.learn_sources(tables, ints(0), torch.tensor([[1]]), ints(1))
    assert tables.counts_CD2[2, 0].tolist() == [0, 4000]
    assert not choose(ops, tables, found=4, matched=3), "its own matches never worked either"


@pytest.mark.parametrize("ops", SETS)
def test_old_checks_count_less(ops: StepOps) -> None:
    tables = fresh([[0.5], [0.2], [0.9]])
    tables.counts_CD2[2, 0] = ints(100, MOST_CHECKS)
    choose(ops, tables, found=1, matched=3)
    ops.learn_sources(tables, ints(0), torch.tensor([[7]]), ints(1))
    assert tables.counts_CD2[2, 0].tolist() == [50, (MOST_CHECKS + 1) // 2]
    assert tables.means()[2, 0].item() == pytest.approx((50 + PRIOR * 0.9) / ((MOST_CHECKS + 1) // 2 + PRIOR))
    assert OWN > 0


def test_compiled() -> None:
    """Random tables: the compiled form and torch choose and learn the same."""
    assert sum(check_source_choice(seed, "cpu", HostStepOps()) for seed in range(60)) > 20


@INTERPRETED
@pytest.mark.skipif(not find_spec("triton"), reason="triton is not installed")
def test_kernels() -> None:
    """So does the GPU's form."""
    from stridelm.kernels.triton_step import TritonStepOps

    for seed in range(60):
        check_source_choice(seed, "cpu", TritonStepOps())
