"""The noise is Philox, a pure function of its key and counter, and Gumbel-distributed."""

from __future__ import annotations

import math

import pytest
import torch
from sampling_oracle import philox_ints, word

from stridelm.kernels import noise
from stridelm.kernels.philox import philox

# Random123's kat_vectors: counter, key, output.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]
SEEDS = [0, 1, -1, 2**63 - 1, -(2**63), 0x123456789ABCDEF0, -987654321]


Columns = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Seeds, positions, samples."""


def _columns(seeds: list[int], position: int = 7, sample: int = 0) -> Columns:
    seeds_M = torch.tensor(seeds)
    return seeds_M, torch.full_like(seeds_M, position), torch.full_like(seeds_M, sample)


def _row(columns: Columns, m: int) -> Columns:
    seeds_M, positions_M, samples_M = columns
    return seeds_M[m : m + 1], positions_M[m : m + 1], samples_M[m : m + 1]


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN)
def test_philox_gives_the_published_answers(counter: str, key: str, output: str) -> None:
    c, k, expected = ([int(w, 16) for w in text.split()] for text in (counter, key, output))
    assert list(philox_ints(tuple(c), tuple(k))) == expected
    words = philox([torch.tensor([[w]]) for w in c], [torch.tensor([w]) for w in k])
    assert [int(w) for w in words] == expected


def test_bits_follow_key_and_counter_for_every_kind_of_seed() -> None:
    seeds_M = torch.tensor(SEEDS)
    positions_M = torch.tensor([0, 1, 5, 131071, 2**31, 2**32 - 1, 9])
    samples_M = torch.tensor([0, 3, 0, 1023, 0, 2**32 - 1, 1])
    streams_M = torch.tensor([0, 1, 2, 3, 2**31, 2**32 - 1, 0])
    bits_MV = noise.bits(seeds_M, positions_M, samples_M, 23, streams_M)
    for m, seed in enumerate(SEEDS):
        p, s, t = int(positions_M[m]), int(samples_M[m]), int(streams_M[m])
        assert bits_MV[m].tolist() == [word(seed, p, s, token, t) for token in range(23)]


@pytest.mark.parametrize("vocab", [1, 4097, 65537, 152064])
def test_bits_do_not_depend_on_width_or_neighbours(vocab: int) -> None:
    columns = _columns([11, -12, 2**62 + 5], position=130000)
    bits_MV = noise.bits(*columns, vocab)
    assert bits_MV.shape == (3, vocab)
    for m in range(3):
        assert torch.equal(noise.bits(*_row(columns, m), vocab)[0], bits_MV[m])
    for token in {0, vocab // 2, max(0, vocab - 2), vocab - 1, min(65536, vocab - 1)}:
        assert int(bits_MV[2, token]) == word(2**62 + 5, 130000, 0, token)


@pytest.mark.parametrize("vocab", [5, 257, 4099, 50257])
def test_floats_do_not_depend_on_neighbours_or_width(vocab: int) -> None:
    columns = _columns(SEEDS)
    g_MV = noise.gumbel(*columns, vocab)
    for m in (0, 3, 6):
        alone = _row(columns, m)
        assert torch.equal(noise.gumbel(*alone, vocab)[0], g_MV[m])
        assert torch.equal(noise.gumbel(*alone, vocab + 3)[0, :vocab], g_MV[m])


def test_noise_at_chosen_tokens_is_the_noise_of_the_vocabulary() -> None:
    columns = _columns(SEEDS)
    g_MV = noise.gumbel(*columns, 1000, stream=5)
    ids_K = torch.tensor([999, 0, 3, 4, 777, 42])
    assert torch.equal(noise.gumbel_at(*columns, ids_K, stream=5), g_MV[:, ids_K])
    ids_MK = torch.arange(14).view(7, 2) * 31
    assert torch.equal(noise.gumbel_at(*columns, ids_MK, stream=5), g_MV.gather(1, ids_MK))


def test_everything_in_key_and_counter_matters() -> None:
    base = noise.bits(*_columns([5], 7, 0), 64)
    others = [
        noise.bits(*_columns([6], 7, 0), 64),
        noise.bits(*_columns([5 + 2**32], 7, 0), 64),
        noise.bits(*_columns([5], 8, 0), 64),
        noise.bits(*_columns([5], 7, 1), 64),
        noise.bits(*_columns([5], 7, 0), 64, stream=1),
    ]
    for other in others:
        assert not bool((other == base).any())


def test_extreme_words_give_finite_noise() -> None:
    """v stays strictly inside (0, 1), and the tail of large noise is fine to the last bit."""
    words = torch.tensor([0, 1, 2, 2**31, 2**32 - 1])
    g = noise.to_gumbel_(words.float())
    assert bool(g.isfinite().all())
    assert bool((g[:-1] > g[1:]).all())
    expected = [-math.log(-math.log1p(-(w + 0.5) / 2**32)) for w in (0, 1, 2, 2**31)]
    torch.testing.assert_close(g[:-1], torch.tensor(expected), rtol=2e-6, atol=2e-6)
    assert g[0] > 22.8
    assert float(g[-1]) == pytest.approx(-math.log(24 * math.log(2)), abs=1e-5)


def test_words_are_uniform() -> None:
    bits_MV = noise.bits(torch.arange(64), torch.arange(64), torch.zeros(64, dtype=torch.int64), 4096)
    for shift in (0, 26):
        counts = torch.bincount((bits_MV >> shift & 63).flatten(), minlength=64).double()
        expected = bits_MV.numel() / 64
        chi2 = float(((counts - expected) ** 2 / expected).sum())
        assert chi2 < 63 + 4 * math.sqrt(2 * 63)


def test_uniforms_lie_inside_and_fill() -> None:
    """From 2**-33 on, in steps of 2**-32, never 0 and never 1."""
    words = torch.tensor([0, 2**32 - 1])
    assert ((words.double() + 0.5) * 2.0**-32).tolist() == [2.0**-33, 1 - 2.0**-33]
    columns = _columns(list(range(4096)))
    u_MK = noise.uniforms(*columns, 5, stream=7)
    assert u_MK.dtype == torch.float64 and u_MK.shape == (4096, 5)
    assert torch.equal(u_MK, (noise.bits(*columns, 5, 7).double() + 0.5) * 2.0**-32)
    counts = torch.histc(u_MK.float(), 64, 0, 1).double()
    assert float(((counts - 320) ** 2 / 320).sum()) < 63 + 4 * math.sqrt(2 * 63)


def test_attempts_share_no_stream() -> None:
    """Every use in every attempt has a stream of its own, apart from the target's and within Philox's counter range."""
    kinds = (noise.DRAFT, noise.ACCEPT, noise.RESIDUAL)
    known = torch.tensor([0, 1, 2, 131072, 2**29 - 1])
    streams = torch.cat([noise.attempt_stream(kind, known) for kind in kinds])
    assert len(set(streams.tolist())) == 15
    assert bool(((streams >= 2**31) & (streams < 2**32)).all())


def test_each_row_has_its_stream() -> None:
    """Passed as a tensor or one by one."""
    columns, ids = _columns(SEEDS), torch.tensor([3, 900])
    streams = 2**31 + torch.arange(len(SEEDS))
    at, everywhere = noise.gumbel_at(*columns, ids, streams), noise.uniforms(*columns, 9, streams)
    for m in range(len(SEEDS)):
        alone, stream = _row(columns, m), int(streams[m])
        assert torch.equal(noise.gumbel_at(*alone, ids, stream), at[m : m + 1])
        assert torch.equal(noise.uniforms(*alone, 9, stream), everywhere[m : m + 1])
