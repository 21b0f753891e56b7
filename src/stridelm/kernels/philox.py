"""The noise's integers in torch, on any device: Philox-4x32-10, fifty passes over its blocks.

host/philox.py and draw.py make the same integers in one. Key and counter are described in noise.py.

Legend: M rows, K tokens, B blocks of four tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import TypeVar

import torch

from stridelm.kernels.ahead import only_compiles

T = TypeVar("T")

Columns = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Seeds, positions, samples and streams: int64 [M] each, any stride."""

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW32 = 0xFFFFFFFF
_ROUNDS = 10


def fill(words_MK: torch.Tensor, columns: Columns, ids_MK: torch.Tensor | None = None) -> None:
    """Write each row's words of these tokens; None: of tokens 0 to K - 1, K being a multiple of 4.

    words_MK: float32 or int64, contiguous. ids_MK: int64, any stride.
    """
    rows, count = words_MK.shape
    whole_MB = torch.arange(count // 4, device=words_MK.device).expand(rows, -1)
    block_MB = whole_MB if ids_MK is None else ids_MK >> 2
    seeds_M, *others = columns
    counter = [block_MB, *(each[:, None].expand_as(block_MB) for each in others)]
    words_MB4 = torch.stack(philox(counter, [seeds_M, seeds_M >> 32]), -1)
    words_MK.copy_(words_MB4.flatten(1) if ids_MK is None else words_MB4.gather(-1, (ids_MK & 3)[..., None])[..., 0])


def philox(counter: list[torch.Tensor], key: list[torch.Tensor]) -> list[torch.Tensor]:
    """Philox-4x32-10 of counters c0..c3 (int64 [M, B] each, in [0, 2**32)) under keys k0, k1 (int64 [M])."""
    even, odd = torch.stack((counter[0], counter[2])), torch.stack((counter[1], counter[3]))
    even, odd = _rounds(even, odd, _round_keys(*key))
    return [even[0], odd[0], even[1], odd[1]]


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
