"""Prompt lookup on a GPU: two kernels instead of about a hundred launches.

Legend: as in step_ops.py.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from stridelm.kernels.index_kernel import index_kernel

_PLACES = 1024
"""Positions of the text that a program looks at."""
_PLACE_BITS = 32
"""An occurrence is packed into one number, the count of matching tokens above its position, so that the maximum is the
longest match and, of equally long ones, the latest."""


@index_kernel
def find_occurrence(
    slots, known, tokens, longest, best, nobody, stride_tokens, PLACES: tl.constexpr, PLACE_BITS: tl.constexpr
):
    """Grid (R, reach / PLACES): a program looks for one request's suffix at PLACES positions where it may end."""
    request = tl.program_id(0)
    slot = tl.load(slots + request)
    slot = tl.where(slot < 0, nobody, slot)
    count = tl.load(known + slot)
    first = tl.program_id(1) * PLACES
    if first >= count - 1:
        return
    row = tokens + slot * stride_tokens
    place = first + tl.arange(0, PLACES)
    running = place < count - 1
    matched = tl.zeros([PLACES], tl.int64)
    back = count * 0
    limit = tl.minimum(tl.load(longest + request), count)
    while back < limit:
        wanted = tl.load(row + count - 1 - back)
        running &= place >= back
        running &= tl.load(row + place - back, mask=running, other=-1) == wanted
        matched += running.to(tl.int64)
        back = tl.where(tl.max(running.to(tl.int32), 0) > 0, back + 1, limit)
    tl.atomic_max(best + request, tl.max((matched << PLACE_BITS) | place.to(tl.int64), 0))


@index_kernel
def take_followers(
    slots,
    known,
    tokens,
    shortest,
    bounds,
    best,
    guesses,
    valid,
    matched,
    nobody,
    stride_tokens,
    width,
    PLACE_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (R): a program takes the tokens after one request's occurrence."""
    request = tl.program_id(0)
    slot = tl.load(slots + request)
    slot = tl.where(slot < 0, nobody, slot)
    found = tl.load(best + request)
    tl.store(matched + request, found >> PLACE_BITS)
    row = tl.arange(0, BLOCK)
    index = (found & ((1 << PLACE_BITS) - 1)) + 1 + row
    there = (found >> PLACE_BITS >= tl.load(shortest + request)) & (row < tl.load(bounds + request))
    there &= (index < tl.load(known + slot)) & (row < width)
    token = tl.load(tokens + slot * stride_tokens + index, mask=there, other=0)
    tl.store(guesses + request * width + row, token, mask=row < width)
    tl.store(valid + request * width + row, there.to(tl.uint8), mask=row < width)


def followers(
    slots_R: torch.Tensor,
    known_S: torch.Tensor,
    tokens_SL: torch.Tensor,
    shortest_R: torch.Tensor,
    longest_R: torch.Tensor,
    bounds_R: torch.Tensor,
    reach: int,
    width: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    requests, nobody = len(slots_R), len(tokens_SL) - 1
    best = torch.zeros(requests, dtype=torch.int64, device=slots_R.device)
    guesses = torch.empty(requests, width, dtype=torch.int64, device=slots_R.device)
    valid = torch.empty(requests, width, dtype=torch.bool, device=slots_R.device)
    matched = torch.empty(requests, dtype=torch.int64, device=slots_R.device)
    find_occurrence[(requests, triton.cdiv(reach, _PLACES))](
        slots_R,
        known_S,
        tokens_SL,
        longest_R,
        best,
        nobody,
        tokens_SL.stride(0),
        PLACES=_PLACES,
        PLACE_BITS=_PLACE_BITS,
    )
    take_followers[(requests,)](
        slots_R,
        known_S,
        tokens_SL,
        shortest_R,
        bounds_R,
        best,
        guesses,
        valid.view(torch.uint8),
        matched,
        nobody,
        tokens_SL.stride(0),
        width,
        PLACE_BITS=_PLACE_BITS,
        BLOCK=triton.next_power_of_2(width),
    )
    return guesses, valid, matched
