"""The verifier's kernels, run by Triton's interpreter: verdicts and token table equal torch's."""

from __future__ import annotations

import random
from dataclasses import fields

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from stridelm.arena import Arena
from stridelm.batch import CANDIDATE, Verdict
from stridelm.draft.base import TreeShape, empty_draft
from stridelm.kernels import STEP_OPS
from stridelm.kernels.step_ops import StepOps
from support.checks.following import check_commit
from support.checks.step_ops import every_set
from support.checks.walk_kernels import SPANS, Tables, agreeable, check_follow, random_draft, random_nodes
from support.doubles.interpreter import INTERPRETED

pytestmark = INTERPRETED
CPU = torch.device("cpu")
TRITON, PLAIN = (STEP_OPS.get(name)() for name in ("triton", "plain"))


# The exact rule


@pytest.mark.parametrize("width", [1, 2, 7, 20, 63, 64])
def test_walk(width: int) -> None:
    """Down any tree, with siblings, probes and invalid rows, like the rule's own walk."""
    longest = 0
    for seed in range(3):
        rng = random.Random(100 * width + seed)
        draft, tables = random_draft(rng, width), Tables(rng)
        drawn, nodes = agreeable(rng, draft), random_nodes(rng, width)
        verdict = TRITON.walk(draft, drawn, nodes, *tables.arguments())
        tables.check(verdict, PLAIN.walk(draft, drawn, nodes, *tables.twins()))
        longest = max(longest, int(verdict.kept.max()))
    assert longest >= min(width, 3)


@pytest.mark.parametrize("width", [1, 2, 7, 20, 64])
def test_follow(width: int) -> None:
    check_follow(width, "cpu", TRITON, 3)


def test_whole_chain() -> None:
    """64 rows, all accepted: the last is the bitmask's sign bit. One skeleton is expanded over the requests."""
    tokens = torch.arange(64).repeat(SPANS, 1)
    draft = TreeShape.of(range(-1, 63), [CANDIDATE] * 64, CPU).draft(tokens, torch.ones_like(tokens, dtype=torch.bool))
    drawn = torch.arange(65).repeat(SPANS, 1)
    drawn[::2, 63] = 0  # all but the last row
    tables = Tables(random.Random(0))
    verdict = TRITON.walk(draft, drawn, drawn + 7, *tables.arguments())
    tables.check(verdict, PLAIN.walk(draft, drawn, drawn + 7, *tables.twins()))
    assert set(verdict.kept.tolist()) == {0, 63, 64} and set(verdict.leaf.tolist()) == {-1, 62, 63}


def test_plain_decoding_walks_an_empty_tree() -> None:
    tables = Tables(random.Random(1))
    drawn, draft = torch.arange(SPANS)[:, None] + 5, empty_draft(SPANS, Arena(CPU))
    verdict = TRITON.walk(draft, drawn, drawn * 3, *tables.arguments())
    tables.check(verdict, PLAIN.walk(draft, drawn, drawn * 3, *tables.twins()))
    assert verdict.path.shape == (SPANS, 0)


def test_one_copy_brings_a_verdict_to_the_host() -> None:
    tables = Tables(random.Random(2))
    drawn = torch.arange(SPANS)[:, None]
    verdict = TRITON.walk(empty_draft(SPANS, Arena(CPU)), drawn, drawn, *tables.arguments())
    storages = {getattr(verdict, field.name).untyped_storage().data_ptr() for field in fields(Verdict)}
    assert len(storages) == 1
    nobody = TRITON.walk(empty_draft(0, Arena(CPU)), drawn[:0], drawn[:0], *(each[:0] for each in tables.arguments()))
    assert nobody.tokens.shape == (0, 1)


# The trust rule


@pytest.mark.parametrize("confident", [False, True])
@pytest.mark.parametrize("width", [0, 1, 3, 15, 64])
def test_windows(width: int, confident: bool) -> None:
    """The longest confident prefix, of windows of any length, and at least one token."""
    rng = random.Random(width)
    tables = Tables(rng)
    lengths = torch.tensor([rng.randrange(width + 1) for _ in range(SPANS)])
    nodes = torch.arange(SPANS * (width + 1)).view(SPANS, -1) * 2
    nodes[torch.arange(width + 1) > lengths[:, None]] = -1
    drawn = torch.randint(0, 1000, nodes.shape, generator=torch.Generator().manual_seed(width))
    sureness = None
    if confident:
        peaks = torch.rand(nodes.shape, generator=torch.Generator().manual_seed(width + 1))
        levels = torch.tensor([rng.choice((0.0, 0.1, 0.5)) for _ in range(SPANS)])
        peaks[:, width // 2], levels[:5] = 0.5, 0.5  # exactly at the threshold
        sureness = peaks, levels
    verdict = TRITON.cut_windows(drawn, nodes, *tables.arguments(), sureness)
    tables.check(verdict, PLAIN.cut_windows(drawn, nodes, *tables.twins(), sureness))


@every_set
def test_commit(ops: StepOps) -> None:
    """Texts of active requests grow by what is real and what is kept; those of other slots do not change."""
    for seed in range(20):
        check_commit(seed, "cpu", ops)
    slots, none = torch.tensor([3, -1, 0, -1]), torch.zeros(4, dtype=torch.int64)
    kept, lengths = torch.tensor([4, 7, 0, 1]), torch.tensor([1, 2, 3, 4, 0])
    one = none[:, None]
    verdict = Verdict(one, none, one, one[:, :0], kept, none, none, none, none)
    ops.commit(lengths, slots, verdict, torch.tensor([1, 1, 2, 1]), None)
    assert lengths.tolist() == [3, 2, 3, 9, 0]
