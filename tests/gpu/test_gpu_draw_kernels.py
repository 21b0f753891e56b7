"""Kernels of sampler and verifier on a GPU: against the torch code, against themselves, and in captured graphs."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from stridelm.kernels import noise, plain_logits
from stridelm.kernels.draw import PADDING, confidence, draw
from stridelm.kernels.plain_logits import argmax
from stridelm.kernels.plain_step import PlainStepOps
from stridelm.kernels.search import programs_of
from stridelm.kernels.step_ops import Cut
from stridelm.kernels.triton_step import TritonStepOps
from stridelm.kernels.truncate import truncate
from stridelm.kernels.walk import walk
from stridelm.sample.rows import Rows
from stridelm.sample.table import SamplingTable
from support.checks.draw_kernels import (
    KINDS,
    TRUNCATED,
    check_kept,
    columns,
    cut_of,
    drawn,
    kernel_noise,
    make_logits,
    sampler_of,
    table_of,
    twin,
)
from support.checks.walk_kernels import SKELETON, Tables, agreeable, check_follow, random_draft, random_nodes
from support.gpu import NEEDS_GPU

pytestmark = NEEDS_GPU
VOCAB = 128256
HALF = (torch.bfloat16, torch.float16)
CLOSE = 1e-5
"""Two scores closer than this are a tie that another library's logarithm may decide differently."""
MAX_TIES = 1
"""Of up to 1,024 rows: the best two scores lie within CLOSE in about one row of 100,000."""


def positions_of(rows: int) -> torch.Tensor:
    return torch.arange(rows, device="cuda") * 7 + 3


def check_against_sampler(logits: torch.Tensor, slots: list[int], table: SamplingTable) -> None:
    """The tokens are the same, except for ties in sampled rows."""
    positions = positions_of(len(slots))
    got, wanted = drawn(logits, slots, positions, table), twin(logits, slots, positions, table)
    rows = (got != wanted).nonzero()[:, 0]
    assert len(rows) <= MAX_TIES
    if len(rows):
        odd = [slots[row] for row in rows.tolist()]
        assert all(KINDS[slot]["temperature"] > 0 for slot in odd), "a greedy row has no ties to decide"
        tokens = torch.stack((got[rows], wanted[rows]), 1)
        ours, theirs = scores(logits[rows], odd, positions[rows], table, tokens).unbind(1)
        assert bool(((ours - theirs).abs() <= CLOSE * theirs.abs().clamp(min=1)).all())


def scores(
    logits: torch.Tensor, slots: list[int], positions: torch.Tensor, table: SamplingTable, tokens: torch.Tensor
) -> torch.Tensor:
    """[M, 2] the sampler's scores of two tokens per row."""
    slots_M = torch.tensor(slots, device="cuda")
    processed = sampler_of(table).processed(logits, Rows(slots_M, positions), slots).gather(1, tokens)
    return processed + noise.gumbel_at(table.seed[slots_M], positions, table.sample_index[slots_M], tokens)


# Against the torch code


@pytest.mark.parametrize("dtype", [*HALF, torch.float32], ids=str)
@pytest.mark.parametrize("rows", [1, 3, 64, 257, 1024])
def test_tokens_are_the_samplers(rows: int, dtype: torch.dtype) -> None:
    table = table_of(KINDS, VOCAB, "cuda")
    rng = random.Random(rows)
    slots = [rng.randrange(len(KINDS)) for _ in range(rows)]
    check_against_sampler(make_logits(rows, VOCAB, dtype, "cuda", seed=rows), slots, table)


@pytest.mark.parametrize("vocab", [1, 4097, 50257, 151936, 262144])
def test_vocabularies(vocab: int) -> None:
    """Vocabulary sizes that are not multiples of a block, and larger ones."""
    table = table_of(KINDS, vocab, "cuda")
    slots = [row % len(KINDS) for row in range(20)]
    for dtype in HALF:
        check_against_sampler(make_logits(20, vocab, dtype, "cuda", seed=vocab), slots, table)


def test_equals_go_to_the_lowest_id() -> None:
    """Coarse logits, so that every greedy row has many best tokens."""
    table = table_of(KINDS[:1], VOCAB, "cuda")
    for rows in (1, 33, 500):
        logits = make_logits(rows, VOCAB, torch.bfloat16, "cuda", seed=rows, step=4.0)
        first = (logits == logits.amax(1, keepdim=True)).int().argmax(1)
        assert torch.equal(drawn(logits, [0] * rows, positions_of(rows), table), first)
        assert torch.equal(argmax(logits), first)


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, 0x123456789ABCDEF0])
def test_noise_is_the_samplers(seed: int) -> None:
    for position, sample, stream in ((0, 0, 0), (131071, 1023, 2**31), (2**32 - 1, 2**32 - 1, 2**32 - 1)):
        words, floats = kernel_noise(seed, position, sample, stream, 1024, "cuda")
        seeds, positions, samples = (torch.tensor([value], device="cuda") for value in (seed, position, sample))
        assert torch.equal(words, noise.bits(seeds, positions, samples, 4096, stream)[0])
        wanted = noise.gumbel(seeds, positions, samples, 4096, stream)[0]
        torch.testing.assert_close(floats, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [*HALF, torch.float32], ids=str)
def test_confidence_is_the_samplers(dtype: torch.dtype) -> None:
    logits = make_logits(300, VOCAB, dtype, "cuda") * torch.linspace(0.1, 5, 300, device="cuda").to(dtype)[:, None]
    got = confidence(logits)
    torch.testing.assert_close(got, plain_logits.confidence(logits), rtol=2.0**-22, atol=0)
    for rows in (1, 7, 100):
        assert torch.equal(confidence(logits[:rows]), got[:rows])


@pytest.mark.parametrize("step", [0.0, 0.25])
@pytest.mark.parametrize("dtype", [*HALF, torch.float32], ids=str)
def test_what_truncation_keeps(dtype: torch.dtype, step: float) -> None:
    """Exactly what the sampler keeps of large vocabularies, and therefore the same tokens."""
    for vocab in (4097, VOCAB, 262144):
        table = table_of(TRUNCATED, vocab, "cuda")
        slots = [row % len(TRUNCATED) for row in range(40)]
        logits = make_logits(40, vocab, dtype, "cuda", seed=vocab, step=step)
        check_kept(logits, slots, table)
        positions = positions_of(40)
        got = drawn(logits, slots, positions, table, cut=cut_of(logits, slots, table))
        assert int((got != twin(logits, slots, positions, table)).sum()) <= MAX_TIES


# Bit for bit


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_rows_do_not_depend_on_their_neighbours(dtype: torch.dtype) -> None:
    """A row draws the same alone, in any batch, and at any place in it: over all ways in which rows are split."""
    table = table_of(KINDS, VOCAB, "cuda")
    rng = random.Random(0)
    slots = [rng.randrange(len(KINDS)) for _ in range(1024)]
    positions = positions_of(1024)
    logits = make_logits(1024, VOCAB, dtype, "cuda", step=0.25)
    whole = drawn(logits, slots, positions, table)
    assert torch.equal(drawn(logits, slots, positions, table), whole)
    for rows in (1, 2, 16, 100, 600):
        first = rng.randrange(1024 - rows)
        part = slice(first, first + rows)
        assert torch.equal(drawn(logits[part], slots[part], positions[part], table), whole[part]), rows


def test_cuts_do_not_depend_on_their_neighbours() -> None:
    table = table_of(TRUNCATED, VOCAB, "cuda")
    slots = [row % len(TRUNCATED) for row in range(300)]
    logits = make_logits(300, VOCAB, torch.bfloat16, "cuda", step=0.125)
    whole = cut_of(logits, slots, table)
    for first, rows in ((3, 1), (20, 17), (100, 150)):
        part = slice(first, first + rows)
        cut = cut_of(logits[part], slots[part], table)
        for field in fields(Cut):
            assert torch.equal(getattr(cut, field.name), getattr(whole, field.name)[part]), (field.name, rows)


@pytest.mark.parametrize("dtype", [*HALF, torch.float32], ids=str)
@pytest.mark.parametrize("rows", [1, 7, 16, 64, 132])
def test_programs_that_wait_for_each_other(rows: int, dtype: torch.dtype) -> None:
    """Find what one program finds by itself, again and again, and while launches on another stream do the same."""
    table = table_of(TRUNCATED, VOCAB, "cuda")
    slots = [(3 * row + 5) % len(TRUNCATED) for row in range(rows)]
    logits = make_logits(rows, VOCAB, dtype, "cuda", step=0.125)
    device = logits.device
    alone = -(-1000 // rows)
    assert programs_of(rows, VOCAB, device) > 1 and programs_of(rows * alone, VOCAB, device) == 1
    wanted = cut_of(logits.repeat(alone, 1), slots * alone, table)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    for _ in range(20):
        with torch.cuda.stream(side):
            beside = cut_of(logits, slots, table)
        cut = cut_of(logits, slots, table)
        side.synchronize()
        for field in fields(Cut):
            for got in (cut, beside):
                assert torch.equal(getattr(got, field.name), getattr(wanted, field.name)[:rows]), field.name


# In a captured graph


def captured(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    call()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


@pytest.mark.parametrize("kinds", [KINDS, TRUNCATED], ids=["min-p", "truncated"])
@pytest.mark.parametrize("rows", [1, 24, 300])
def test_graph_of_draw(rows: int, kinds: tuple[dict[str, Any], ...]) -> None:
    """A captured launch stays correct when parameters, slots, positions and logits change between replays."""
    rng = random.Random(rows)
    table = table_of(kinds, VOCAB, "cuda")
    params, top_k, top_p = columns(table), table.top_k.clone(), table.top_p.clone()
    logits = make_logits(rows, VOCAB, torch.bfloat16, "cuda")
    slots_M, positions_M, out = (torch.zeros(rows, dtype=torch.int64, device="cuda") for _ in range(3))

    def call() -> None:
        cut = None
        if kinds is TRUNCATED:
            asked = (params["temperature_S"], params["sampled_S"], params["log_min_p_S"], top_k, top_p)
            cut = truncate(logits, slots_M, *asked)
        draw(logits, slots_M, positions_M, **params, cut=cut, out=out)

    graph = captured(call)
    for rope in range(4):
        fresh = table_of(tuple(rng.sample(kinds, len(kinds))), VOCAB, "cuda", seed=rope)
        for name, column in columns(fresh).items():
            params[name].copy_(column)
        top_k.copy_(fresh.top_k)
        top_p.copy_(fresh.top_p)
        slots = [rng.randrange(-1, len(kinds)) for _ in range(rows)]
        slots_M.copy_(torch.tensor(slots))
        positions_M.copy_(positions_of(rows) + rope)
        logits.copy_(make_logits(rows, VOCAB, torch.bfloat16, seed=rope))
        graph.replay()
        cut = cut_of(logits, slots, fresh) if kinds is TRUNCATED else None
        assert torch.equal(out, drawn(logits, slots, positions_M, fresh, cut=cut))
        assert (out[slots_M < 0] == PADDING).all()


@pytest.mark.parametrize("width", [1, 8, 64])
def test_follow(width: int) -> None:
    check_follow(width, "cuda", TritonStepOps(), 10)


@pytest.mark.parametrize("width", [1, 8, 64])
def test_graph_of_walk(width: int) -> None:
    """A captured walk follows new trees of new requests, and appends to their tables."""
    rng = random.Random(width)
    draft, tables = random_draft(rng, width, "cuda"), Tables(rng, "cuda")
    drawn_RK, nodes = agreeable(rng, draft), random_nodes(rng, width, "cuda")
    verdicts = []
    graph = captured(lambda: verdicts.append(walk(draft, drawn_RK, nodes, *tables.arguments())))
    for _ in range(5):
        fresh, others = random_draft(rng, width, "cuda"), Tables(rng, "cuda")
        for name in ("tokens", "valid", *SKELETON):
            getattr(draft, name).copy_(getattr(fresh, name))
        draft.max_depth = fresh.max_depth
        drawn_RK.copy_(agreeable(rng, fresh))
        for mine, theirs in zip(tables.arguments(), others.arguments()):
            mine.copy_(theirs)
        graph.replay()
        for mine, theirs in zip(tables.arguments(), others.arguments()):
            theirs.copy_(mine)
        others.check(verdicts[-1], PlainStepOps().walk(fresh, drawn_RK, nodes, *others.twins()))
