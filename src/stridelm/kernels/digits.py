"""Radix selection over a row of logits: the smallest key up to which its tokens' weights reach a limit, found digit by
digit from the highest. truncate.py says which keys there are, and launches the searches.

Legend: as in truncate.py.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from stridelm.kernels.logit_rows import load_tile, mass_of, order_key

LOGITS = tl.constexpr(0)
DEPTHS = tl.constexpr(1)
IDS = tl.constexpr(2)

BITS = tl.constexpr(4)
"""Bits of a digit."""
DIGITS = tl.constexpr(16)
"""D."""


@triton.jit
def weights_by_digit(logits, first, last, vocab, heat, peak, low, edge, prefix, shift, KEY: tl.constexpr):
    """[D] the weights of the tokens whose higher digits are `prefix`, by their digit at `shift`, in a row's tiles from
    `first` to `last`. prefix: int64."""
    digit_D = tl.arange(0, DIGITS)
    sum_D = tl.zeros([DIGITS], tl.int64)
    for tile in range(first, last):
        token_T, logit_T = load_tile(logits, tile, vocab)
        if KEY == LOGITS:
            counts_T = token_T < vocab
            key_T = order_key(logit_T)
        else:
            logit_T = tl.div_rn(logit_T, heat)
            depth_T = peak - logit_T
            counts_T = logit_T >= low
            if KEY == DEPTHS:
                key_T = depth_T.to(tl.uint32, bitcast=True)
            else:
                counts_T &= depth_T == edge
                key_T = token_T.to(tl.uint32)
        counts_T &= (key_T.to(tl.int64) >> (shift + BITS)) == prefix
        # After the first digits, few tiles still hold a token that counts.
        if tl.max(counts_T.to(tl.int32)) != 0:
            if KEY == DEPTHS:
                weight_T = tl.where(counts_T, mass_of(depth_T), 0)
            else:
                weight_T = counts_T.to(tl.int64)
            own_T = ((key_T >> shift.to(tl.uint32)) & (DIGITS - 1)).to(tl.int32)
            sum_D += tl.sum(tl.where(own_T[None, :] == digit_D[:, None], weight_T[None, :], 0), 1)
    return sum_D


@triton.jit
def next_digit(sum_D, prefix, rest):
    """(prefix with one digit more, the limit minus the weights of all tokens before it)"""
    upto_D = tl.cumsum(sum_D, 0)
    under_D = upto_D < rest
    digit = tl.minimum(tl.sum(under_D.to(tl.int64)), DIGITS - 1)
    return (prefix << BITS) + digit, rest - tl.max(tl.where(under_D, upto_D, 0))


@triton.jit
def nucleus_of(sum_D, top_p):
    """The limit of a row's masses."""
    return tl.ceil(tl.sum(sum_D).to(tl.float64) * top_p.to(tl.float64)).to(tl.int64)


@triton.jit
def needed_at_edge(rest, edge):
    """How many of the equals at the edge are needed: the mass before the last of them is below the limit."""
    return tl.cdiv(rest, tl.maximum(mass_of(edge), 1))


@triton.jit
def logit_of_prefix(prefix, shift):
    """The logit whose key begins with these digits; its bits under `shift` are 0."""
    bits = (prefix << shift).to(tl.int32)
    bits = tl.where(bits < 0, bits, bits ^ 0x7FFFFFFF)
    return (bits >> shift << shift).to(tl.float32, bitcast=True)


@triton.jit
def depth_of_prefix(prefix):
    """The depth whose key is these digits."""
    return prefix.to(tl.int32).to(tl.float32, bitcast=True)
