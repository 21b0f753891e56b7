"""The noise of Gumbel-max sampling, as a pure function of seed, sample index, position and token.

A token is `argmax(logits + g)`. Because `g` depends on nothing else, a position's token is the same whichever
step, batch, draft or device computes it: that is what lets sampled output be verified by equality. The bits
come from Philox-4x32-10, a counter-based generator (Salmon et al., "Parallel random numbers: as easy as 1, 2,
3", SC 2011):

    key     = the two 32-bit halves of the seed, low half first
    counter = (token id // 4, position, sample index, stream);  output word = token id % 4

`stream` separates uses that must not share noise. Stream 0 is the target's own. Streams from _ATTEMPTS on belong to
rules that accept at random: one for each use in each attempt.

Legend: M rows, V vocabulary, K tokens or nodes, B = ceil(V / 4) Philox blocks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import TypeVar

import torch

from stridelm.kernels.ahead import only_compiles

T = TypeVar("T")

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW32 = 0xFFFFFFFF
_ROUNDS = 10

DRAFT, ACCEPT, RESIDUAL = 1, 2, 3
"""What noise is used for in an attempt to extend a request by a draft: the draft's own draws, accepting, and the token
drawn after the accepted ones."""
_ATTEMPTS = 1 << 31

_CPU_TILE = 16384
"""Philox blocks computed at once on the CPU: three arrays of 256 KiB stay in the second-level cache."""


def gumbel(
    seeds_M: torch.Tensor,
    positions_M: torch.Tensor,
    samples_M: torch.Tensor,
    vocab_size: int,
    stream: int | torch.Tensor = 0,
) -> torch.Tensor:
    """Standard Gumbel noise [M, V] float32 for every token of the vocabulary.

    seeds_M: int64, all 64 bits count. positions_M, samples_M: int64 in [0, 2**32): the absolute position of
    the token to be drawn, and the request's sample index. stream: one number, or int64 [M], in [0, 2**32).
    """
    return to_gumbel_(_words(torch.float32, seeds_M, positions_M, samples_M, vocab_size, stream))[:, :vocab_size]


def bits(
    seeds_M: torch.Tensor,
    positions_M: torch.Tensor,
    samples_M: torch.Tensor,
    vocab_size: int,
    stream: int | torch.Tensor = 0,
) -> torch.Tensor:
    """The integers [M, V] int64 in [0, 2**32) that `gumbel` is made from: equal on every device and in every batch."""
    return _words(torch.int64, seeds_M, positions_M, samples_M, vocab_size, stream)[:, :vocab_size]


def attempt_stream(kind: int, known_M: torch.Tensor) -> torch.Tensor:
    """int64 [M]: the stream of a use (DRAFT, ACCEPT, RESIDUAL) in the attempt that starts from this many known tokens.

    Every step emits a token, so no length recurs and a request's attempts share no noise.
    known_M: int64 in [0, 2**29).
    """
    return _ATTEMPTS + 4 * known_M + kind


def uniforms(
    seeds_M: torch.Tensor,
    positions_M: torch.Tensor,
    samples_M: torch.Tensor,
    count: int,
    stream: int | torch.Tensor = 0,
) -> torch.Tensor:
    """Uniform noise [M, K] float64, strictly inside (0, 1): K = count numbers per row, indexed as tokens would be."""
    return (bits(seeds_M, positions_M, samples_M, count, stream).double() + 0.5) * 2.0**-32


def gumbel_at(
    seeds_M: torch.Tensor,
    positions_M: torch.Tensor,
    samples_M: torch.Tensor,
    ids_MK: torch.Tensor,
    stream: int | torch.Tensor = 0,
) -> torch.Tensor:
    """`gumbel` [M, K] float32 at token ids [M, K] or [K]: for drafters with a vocabulary of their own."""
    ids_MK = ids_MK.expand(seeds_M.shape[0], ids_MK.shape[-1])
    block, word = ids_MK >> 2, ids_MK & 3
    position_MK, sample_MK = positions_M[:, None].expand_as(block), samples_M[:, None].expand_as(block)
    streams_M = _each(stream, positions_M)
    words = philox([block, position_MK, sample_MK, streams_M[:, None].expand_as(block)], [seeds_M, seeds_M >> 32])
    return to_gumbel_(torch.stack(words).gather(0, word[None])[0].float())


def to_gumbel_(words: torch.Tensor) -> torch.Tensor:
    """Turn float32 words in [0, 2**32] into Gumbel noise, in place: g = -log(E), E = -log1p(-v).

    v = (word + 0.5) / 2**32 lies strictly inside (0, 1): at least 2**-33, and clamped to the float below 1. Large
    noise, the kind that wins an argmax, comes from small v, where floats are densest: all 32 bits count there, and g
    reaches 22.9. The usual -log(-log(u)) gets its large values from u near 1, where floats are 2**-24 apart, and stops
    at 16.6.
    """
    minus_v = words.mul_(-(2.0**-32)).sub_(2.0**-33).clamp_(min=-(1.0 - 2.0**-24))
    return minus_v.log1p_().neg_().log_().neg_()


def philox(counter: list[torch.Tensor], key: list[torch.Tensor]) -> list[torch.Tensor]:
    """Philox-4x32-10 of counters c0..c3 (int64 [M, B] each, in [0, 2**32)) under keys k0, k1 (int64 [M])."""
    even, odd = torch.stack((counter[0], counter[2])), torch.stack((counter[1], counter[3]))
    even, odd = _rounds(even, odd, _round_keys(*key))
    return [even[0], odd[0], even[1], odd[1]]


def _words(
    dtype: torch.dtype,
    seeds_M: torch.Tensor,
    positions_M: torch.Tensor,
    samples_M: torch.Tensor,
    vocab_size: int,
    stream: int | torch.Tensor,
) -> torch.Tensor:
    """The words [M, 4 B] in `dtype`, computed tile by tile on the CPU and at once elsewhere."""
    rows, blocks = seeds_M.shape[0], (vocab_size + 3) // 4
    words_MB4 = torch.empty(rows, blocks, 4, dtype=dtype, device=seeds_M.device)
    index_B = torch.arange(blocks, device=seeds_M.device)
    streams_M = _each(stream, positions_M)
    keys = _round_keys(seeds_M, seeds_M >> 32)
    row_step, block_step = _tile(rows, blocks, seeds_M.device)
    for r in range(0, rows, row_step):
        m = slice(r, r + row_step)
        narrow = (positions_M[m, None], samples_M[m, None], streams_M[m, None])
        for b in range(0, blocks, block_step):
            n = slice(b, b + block_step)
            _fill_tile(words_MB4[m, n], index_B[n], *narrow, keys[:, :, m])
    return words_MB4.view(rows, blocks * 4)


def _each(stream: int | torch.Tensor, positions_M: torch.Tensor) -> torch.Tensor:
    """int64 [M]: each row's stream."""
    return stream if isinstance(stream, torch.Tensor) else torch.full_like(positions_M, stream)


def _fill_tile(
    out_MB4: torch.Tensor,
    index_B: torch.Tensor,
    position_M1: torch.Tensor,
    sample_M1: torch.Tensor,
    stream_M1: torch.Tensor,
    keys: torch.Tensor,
) -> None:
    shape = (2, *out_MB4.shape[:2])
    even, odd = index_B.new_empty(shape), index_B.new_empty(shape)
    even[0], even[1] = index_B, sample_M1
    odd[0], odd[1] = position_M1, stream_M1
    even, odd = _rounds(even, odd, keys)
    out_2MB2 = out_MB4.view(*out_MB4.shape[:2], 2, 2).permute(2, 0, 1, 3)
    out_2MB2[..., 0] = even
    out_2MB2[..., 1] = odd


def _rounds(even: torch.Tensor, odd: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The ten rounds on (c0, c2) and (c1, c3), int64 [2, M, B]; both are overwritten.

    A round sends c0 to hi(M1 c2) ^ c1 ^ k0, c2 to hi(M0 c0) ^ c3 ^ k1, c1 to lo(M1 c2) and c3 to lo(M0 c0).
    Two things halve the work: the halves of a product are left where the product was, so c0 and c2 swap places every
    round (after ten, an even number, they are back), and the low half is not masked until something needs it clean.
    Products wrap at 64 bits, and their bits are those of the unsigned product's low and high words.
    """
    multipliers, shift, low = _shared(_constants, even.device)
    product = torch.empty_like(odd)
    first, second = even[0], even[1]
    odd_halves, product_halves = (odd[0], odd[1]), (product[0], product[1])
    for r in range(_ROUNDS):
        torch.mul(even, multipliers[r % 2], out=product)
        torch.bitwise_right_shift(product, shift, out=even)
        first.bitwise_xor_(odd_halves[1])
        second.bitwise_xor_(odd_halves[0])
        even.bitwise_xor_(keys[r]).bitwise_and_(low)
        odd, product = product, odd
        odd_halves, product_halves = product_halves, odd_halves
    return even, odd.bitwise_and_(low)


def _round_keys(k0_M: torch.Tensor, k1_M: torch.Tensor) -> torch.Tensor:
    """[10, 2, M, 1]: each round's key halves, ordered as `_rounds` holds c0 and c2; the low 32 bits count."""
    order = torch.stack((k1_M, k0_M, k0_M, k1_M)).view(1, 2, 2, -1, 1)
    return (order + _shared(_weyl, k0_M.device)).view(_ROUNDS, 2, -1, 1)


def _tile(rows: int, blocks: int, device: torch.device) -> tuple[int, int]:
    """How many rows and blocks to compute at once."""
    if device.type != "cpu":
        return max(rows, 1), blocks
    return max(1, _CPU_TILE // blocks), min(blocks, _CPU_TILE)


def _shared(make: Callable[[torch.device], T], device: torch.device) -> T:
    """What a cached function makes for the device; not kept if it would have no memory."""
    return inspect.unwrap(make)(device) if only_compiles() else make(device)


@cache  # numbers of the generator itself, the same for all engines, as if they stood in a kernel
def _constants(device: torch.device) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor, torch.Tensor]:
    """Both orders of the multipliers [2, 1, 1], the shift by 32 and the mask of the low 32 bits."""
    m0, m1 = _MULTIPLIERS
    orders = torch.tensor([[m0, m1], [m1, m0]], device=device).view(2, 2, 1, 1)
    return (orders[0], orders[1]), torch.tensor(32, device=device), torch.tensor(_LOW32, device=device)


@cache
def _weyl(device: torch.device) -> torch.Tensor:
    """[5, 2, 2, 1, 1]: what round 2a + b adds to the key halves in the order of `_round_keys`."""
    w0, w1 = _WEYL
    steps = [[r * w1, r * w0] if r % 2 == 0 else [r * w0, r * w1] for r in range(_ROUNDS)]
    return torch.tensor(steps, device=device).view(5, 2, 2, 1, 1)
