"""The sampler's kernels, run by Triton's interpreter: against the sampler itself, and against themselves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from stridelm.kernels import logit_rows, noise, plain_logits
from stridelm.kernels.draw import PADDING, confidence
from stridelm.kernels.plain_logits import argmax
from stridelm.kernels.search import PROGRAMS_PER_PROCESSOR
from stridelm.kernels.step_ops import Cut
from support.checks.compiled import compiled
from support.checks.draw_kernels import (
    KINDS,
    TRUNCATED,
    check_kept,
    cut_of,
    drawn,
    kernel_noise,
    make_logits,
    table_of,
    twin,
)
from support.doubles.interpreter import INTERPRETED

pytestmark = INTERPRETED
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SLOTS = [0, 3, 1, 0, 2, 4, 5, 1, 3]
"""The slot of each row: greedy and sampled rows interleaved, some of them of the same request."""
POSITIONS = torch.tensor([5, 6, 7, 131071, 2**32 - 1, 0, 9, 8, 100])


@pytest.fixture
def few_splits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Programs of several tiles, as on a small GPU."""
    monkeypatch.setattr(logit_rows, "multiprocessors", lambda device: 2)
    logit_rows.splits_of.cache_clear()
    yield
    logit_rows.splits_of.cache_clear()


# Against the sampler


@pytest.mark.parametrize("step", [0.0, 0.5])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [1, 61, 1024, 5003])
def test_tokens_are_the_samplers(vocab: int, dtype: torch.dtype, step: float) -> None:
    """Greedy and sampled rows in any mixture, with and without min-p, in any dtype, with and without ties."""
    table = table_of(KINDS, vocab)
    logits = make_logits(len(SLOTS), vocab, dtype, seed=vocab, step=step)
    for stream in (0, 2**32 - 1):
        got = drawn(logits, SLOTS, POSITIONS, table, stream=stream)
        assert got.dtype == torch.int64
        assert torch.equal(got, twin(logits, SLOTS, POSITIONS, table, stream))


def test_each_row_has_its_stream() -> None:
    """Passed as a tensor, as the sampler takes it; rows without noise ignore it."""
    table = table_of(KINDS, 1500)
    logits = make_logits(len(SLOTS), 1500, torch.float32)
    streams = torch.tensor([0, 1, 2**31, 2**32 - 1, 5, 2**31 + 4 * 77 + 3, 9, 8, 7])
    got = drawn(logits, SLOTS, POSITIONS, table, stream=streams)
    assert torch.equal(got, twin(logits, SLOTS, POSITIONS, table, streams))
    assert not torch.equal(got, drawn(logits, SLOTS, POSITIONS, table))


@pytest.mark.usefixtures("few_splits")
def test_programs_of_several_tiles() -> None:
    table = table_of(KINDS, 9001)
    logits = make_logits(len(SLOTS), 9001, torch.bfloat16)
    assert logit_rows.splits_of(*logits.shape, logits.device) == 2
    assert torch.equal(drawn(logits, SLOTS, POSITIONS, table), twin(logits, SLOTS, POSITIONS, table))


def test_min_p_at_its_edge() -> None:
    """The token that min-p just keeps and the one that it just drops, with the same rounding as the sampler's."""
    table = table_of(({"temperature": 0.7, "min_p": 0.1},), 64)
    edge = 2.0 + 0.7 * float(table.log_min_p[0])
    near = torch.nextafter(torch.tensor(edge), torch.tensor([-9.0, 9.0]))
    logits = torch.full((120, 64), -9.0)
    logits[:, 0], logits[:, 20], logits[:, 41:43], logits[:, 63] = 2.0, edge, near, edge - 1e-3
    slots, positions = [0] * 120, torch.arange(120)
    got = drawn(logits, slots, positions, table)
    assert torch.equal(got, twin(logits, slots, positions, table))
    assert {0, 42} <= set(got.tolist()) <= {0, 20, 41, 42}


def test_without_min_p_it_may_be_left_out() -> None:
    table = table_of(KINDS[:3], 300)
    slots = [slot % 3 for slot in SLOTS]
    logits = make_logits(len(slots), 300, torch.float16)
    got = drawn(logits, slots, POSITIONS, table, log_min_p_S=None)
    assert torch.equal(got, twin(logits, slots, POSITIONS, table))


def test_equals_go_to_the_lowest_id() -> None:
    """Within a tile, between tiles and between splits; 0 and -0 tie too."""
    table = table_of(KINDS[:1], 5000)
    logits = torch.full((4, 5000), -1.0, dtype=torch.bfloat16)
    logits[0, [4999, 17, 3000]] = 1.0
    logits[1, [2100, 2099]] = 1.0
    logits[2, 2000], logits[2, 1000] = 0.0, -0.0
    got = drawn(logits, [0] * 4, torch.arange(4), table)
    assert got.tolist() == [17, 2099, 1000, 0]
    assert torch.equal(got, argmax(logits))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_forbidden_tokens(dtype: torch.dtype) -> None:
    """-inf is never drawn if there is anything else; if there is not, token 0 is."""
    table = table_of(KINDS, 2500)
    logits = torch.full((len(SLOTS), 2500), float("-inf"), dtype=dtype)
    assert drawn(logits, SLOTS, POSITIONS, table).tolist() == [0] * len(SLOTS)
    logits[:, 2001] = -30.0
    assert drawn(logits, SLOTS, POSITIONS, table).tolist() == [2001] * len(SLOTS)


def test_nan_is_never_drawn() -> None:
    """An id outside the vocabulary could crash the next step."""
    table = table_of(KINDS[:3], 1500)
    logits, positions = torch.full((3, 1500), float("nan")), torch.arange(3)
    assert drawn(logits, [0, 1, 2], positions, table).tolist() == [0] * 3
    logits[:, 1400] = 1.0
    assert drawn(logits, [0, 1, 2], positions, table).tolist() == [1400] * 3


# Noise


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63), 0x123456789ABCDEF0])
def test_noise_is_the_samplers(seed: int) -> None:
    """The integers agree exactly, the floats to a few units in the last place."""
    for position, sample, stream in ((0, 0, 0), (7, 1, 1), (131071, 1023, 2**31), (2**32 - 1, 2**32 - 1, 2**32 - 1)):
        words, floats = kernel_noise(seed, position, sample, stream, 256)
        seeds, positions, samples = (torch.tensor([value]) for value in (seed, position, sample))
        assert torch.equal(words, noise.bits(seeds, positions, samples, 1024, stream)[0])
        wanted = noise.gumbel(seeds, positions, samples, 1024, stream)[0]
        torch.testing.assert_close(floats, wanted, rtol=1e-6, atol=1e-6)


# Against itself


@pytest.mark.usefixtures("few_splits")
def test_rows_do_not_depend_on_the_launch() -> None:
    """Neither on the rows beside them, nor on how the vocabulary is split, nor on the logits' addresses."""
    table = table_of(KINDS, 4099)
    logits = make_logits(len(SLOTS), 4099, torch.float16, step=0.5)
    whole = drawn(logits, SLOTS, POSITIONS, table)
    spread = torch.zeros(len(SLOTS), 4200, dtype=torch.float16)
    spread[:, :4099] = logits
    assert torch.equal(drawn(spread[:, :4099], SLOTS, POSITIONS, table), whole)
    for row, slot in enumerate(SLOTS):
        alone = drawn(logits[row : row + 1], [slot], POSITIONS[row : row + 1], table)
        assert torch.equal(alone, whole[row : row + 1])


def test_padding() -> None:
    """A row without a slot gets no token, whatever it holds; the others are unaffected."""
    table = table_of(KINDS, 1030)
    logits = make_logits(5, 1030, torch.float32)
    slots, positions = [1, -1, 3, -7, 0], torch.tensor([4, -(2**40), 5, 1, 6])
    logits[1], logits[3] = float("nan"), float("inf")
    out = torch.full((5,), 99)
    assert drawn(logits, slots, positions, table, out=out) is out
    real = [0, 2, 4]
    assert out[[1, 3]].tolist() == [PADDING, PADDING]
    assert torch.equal(out[real], twin(logits[real], [slots[row] for row in real], positions[real], table))
    assert drawn(logits[:0], [], positions[:0], table).shape == (0,)


# Truncation


@pytest.mark.parametrize(("vocab", "step"), [(3, 0.5), (61, 0.0), (61, 4.0), (1300, 0.0), (1300, 0.5)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_truncation_keeps(vocab: int, dtype: torch.dtype, step: float) -> None:
    """Exactly what the sampler keeps, with few ties and with many, down to the last tie at the edge."""
    table = table_of(TRUNCATED, vocab)
    slots = list(range(len(TRUNCATED)))
    logits = make_logits(len(slots), vocab, dtype, seed=vocab, step=step)
    logits[::3, vocab // 2 :] = float("-inf")
    check_kept(logits, slots, table)


@pytest.mark.parametrize("first", [0.0, -0.0])
def test_zeros_of_both_signs_are_equal(first: float) -> None:
    """Also as the largest logits, from which depths are measured."""
    table = table_of(TRUNCATED, 300)
    slots = list(range(len(TRUNCATED)))
    logits = make_logits(len(slots), 300, torch.float32, step=100.0)
    assert not logits.any()
    logits[:, 0] = first
    check_kept(logits, slots, table)


def test_near_zero_depths_round_to_equals() -> None:
    """Different logits whose depths are equal are ties: those of lowest id are kept."""
    table = table_of(TRUNCATED, 300)
    slots = list(range(len(TRUNCATED)))
    logits = torch.rand(len(slots), 300, generator=torch.Generator().manual_seed(0)).sub(0.5).mul(1e-6).bfloat16()
    logits[:, 7] = 4.0
    check_kept(logits, slots, table)


def test_truncated_tokens_are_the_samplers() -> None:
    """Drawn from what is kept; beside rows without truncation, padding and greedy rows."""
    table = table_of(TRUNCATED, 1100)
    slots = [slot for slot in range(len(TRUNCATED)) for _ in range(2)]
    logits = make_logits(len(slots), 1100, torch.bfloat16, step=0.25)
    logits[[4, 11, 17]] = float("-inf")
    positions = torch.arange(len(slots))
    got = drawn(logits, slots, positions, table, cut=cut_of(logits, slots, table))
    assert torch.equal(got, twin(logits, slots, positions, table))
    padded = [-1 if row % 2 else slot for row, slot in enumerate(slots)]
    again = drawn(logits, padded, positions, table, cut=cut_of(logits, padded, table))
    assert torch.equal(again[::2], got[::2]) and set(again[1::2].tolist()) == {PADDING}


@pytest.mark.usefixtures("few_splits")
def test_cuts_do_not_depend_on_the_launch() -> None:
    table = table_of(TRUNCATED, 2100)
    slots = list(range(len(TRUNCATED)))
    logits = make_logits(len(slots), 2100, torch.float16)
    whole = cut_of(logits, slots, table)
    for row in (5, 9):
        alone = cut_of(logits[row : row + 1], [row], table)
        for field in fields(Cut):
            assert torch.equal(getattr(alone, field.name)[0], getattr(whole, field.name)[row])
    assert cut_of(logits[:0], [], table).low_M.shape == (0,)


def test_searches_that_no_row_asks_for_may_be_left_out() -> None:
    for kinds, option in (((*TRUNCATED[:4], TRUNCATED[8]), "top_p_S"), ((TRUNCATED[1], *TRUNCATED[4:7]), "top_k_S")):
        table = table_of(kinds, 500)
        slots = list(range(len(kinds)))
        logits = make_logits(len(slots), 500, torch.float32)
        positions = torch.arange(len(slots))
        cut = cut_of(logits, slots, table, **{option: None})
        assert torch.equal(drawn(logits, slots, positions, table, cut=cut), twin(logits, slots, positions, table))


def test_several_tiles_for_a_bit() -> None:
    """A program remembers where no token counts by 64 bits, and may have more tiles."""
    table = table_of(TRUNCATED, 70001)
    slots = [4, 7, 9]
    logits = make_logits(len(slots), 70001, torch.bfloat16, step=0.5)
    check_kept(logits, slots, table)


def test_two_launches_fit_at_once(tmp_path: Path) -> None:
    """On a processor of Hopper: the programs of a row wait for each other, so all must be running."""
    for kernel in compiled("search_compiles", tmp_path):
        assert kernel["releases"] > 0  # they do wait
        programs = min(65536 // (kernel["registers"] * kernel["threads"]), (227 << 10) // (kernel["shared"] + 1024))
        assert min(programs, 2048 // kernel["threads"]) >= 2 * PROGRAMS_PER_PROCESSOR


# Confidence


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [1, 1000, 5003])
def test_confidence_is_the_samplers(vocab: int, dtype: torch.dtype) -> None:
    """Within the difference of two libraries' exponentials; bit for bit, whatever rows share the call."""
    logits = make_logits(5, vocab, dtype, seed=1)
    logits[1, : vocab // 2] = float("-inf")
    got = confidence(logits)
    torch.testing.assert_close(got, plain_logits.confidence(logits), rtol=2.0**-22, atol=0)
    for row in range(5):
        assert torch.equal(confidence(logits[row : row + 1]), got[row : row + 1])
    assert confidence(logits[:0]).shape == (0,)
