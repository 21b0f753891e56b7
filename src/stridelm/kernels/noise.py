"""The noise of Gumbel-max sampling, as a pure function of seed, sample index, position and token.

A token is `argmax(logits + g)`. Because `g` depends on nothing else, a position's token is the same whichever
step, batch, draft or device computes it: that is what lets sampled output be verified by equality. The bits
come from Philox-4x32-10, a counter-based generator (Salmon et al., "Parallel random numbers: as easy as 1, 2,
3", SC 2011):

    key     = the two 32-bit halves of the seed, low half first
    counter = (token id // 4, position, sample index, stream);  output word = token id % 4

`stream` separates uses that must not share noise. Stream 0 is the target's own. Streams from _ATTEMPTS on belong to
rules that accept at random: one for each use in each attempt.

Legend: M rows, V vocabulary, K tokens or nodes.
"""

from __future__ import annotations

import torch

DRAFT, ACCEPT, RESIDUAL = 1, 2, 3
"""What noise is used for in an attempt to extend a request by a draft: the draft's own draws, accepting, and the token
drawn after the accepted ones."""
_ATTEMPTS = 1 << 31


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
    return to_gumbel_(_words(torch.float32, seeds_M, positions_M, samples_M, stream, vocab_size))[:, :vocab_size]


def bits(
    seeds_M: torch.Tensor,
    positions_M: torch.Tensor,
    samples_M: torch.Tensor,
    vocab_size: int,
    stream: int | torch.Tensor = 0,
) -> torch.Tensor:
    """The integers [M, V] int64 in [0, 2**32) that `gumbel` is made from: equal on every device and in every batch."""
    return _words(torch.int64, seeds_M, positions_M, samples_M, stream, vocab_size)[:, :vocab_size]


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
    count = ids_MK.shape[-1]
    ids_MK = ids_MK.expand(len(seeds_M), count)
    return to_gumbel_(_words(torch.float32, seeds_M, positions_M, samples_M, stream, count, ids_MK))


def to_gumbel_(words: torch.Tensor) -> torch.Tensor:
    """Turn float32 words in [0, 2**32] into Gumbel noise, in place: g = -log(E), E = -log1p(-v).

    v = (word + 0.5) / 2**32 lies strictly inside (0, 1): at least 2**-33, and clamped to the float below 1. Large
    noise, the kind that wins an argmax, comes from small v, where floats are densest: all 32 bits count there, and g
    reaches 22.9. The usual -log(-log(u)) gets its large values from u near 1, where floats are 2**-24 apart, and stops
    at 16.6.
    """
    minus_v = words.mul_(-(2.0**-32)).sub_(2.0**-33).clamp_(min=-(1.0 - 2.0**-24))
    return minus_v.log1p_().neg_().log_().neg_()


def _words(
    dtype: torch.dtype,
    seeds_M: torch.Tensor,
    positions_M: torch.Tensor,
    samples_M: torch.Tensor,
    stream: int | torch.Tensor,
    count: int,
    ids_MK: torch.Tensor | None = None,
) -> torch.Tensor:
    """[M, K] contiguous: the words of these tokens, K = count; None: of the first ones, K = count or up to 3 more."""
    if seeds_M.is_cpu:
        from stridelm.kernels.host.philox import fill  # loads Numba, which a GPU does not need
    else:
        from stridelm.kernels.philox import fill
    width = -(-count // 4) * 4 if ids_MK is None else count
    words_MK = torch.empty(len(seeds_M), width, dtype=dtype, device=seeds_M.device)
    streams_M = stream if isinstance(stream, torch.Tensor) else torch.full_like(positions_M, stream)
    fill(words_MK, (seeds_M, positions_M, samples_M, streams_M), ids_MK)
    return words_MK
