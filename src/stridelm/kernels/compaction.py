"""The compaction of accepted paths in the KV pools of a GPU, in Triton: entries move to where a chain's would be.

Legend: T tensors, P pool slots, N entries; in kernels B words of a block, K entries moved at once.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

import torch
import triton
import triton.language as tl

from stridelm.kernels.triton_norms import VECTOR_BYTES, is_whole

MOVED_ENTRIES, MOVED_WORDS = 64, 32
"""Cache entries that a program moves at once, and words of each: usually a cache line."""


@dataclass(frozen=True, eq=False)
class Pools:
    """Tensors [P, ...] that share their slots (the keys and values of one page group's layers), in a form in which one
    kernel can reach them all. Make it once: it copies addresses to the device."""

    tensors: tuple[torch.Tensor, ...]
    """Held, so that their memory is not freed."""
    places_T2: torch.Tensor
    """int64 address and words per slot, of each tensor."""
    widest: int
    """Maximum words per slot."""
    unit: int
    """Words that a thread moves at once: 4 if each tensor's slot is a whole number of 16-byte vectors, else 1."""
    word: int
    """Bytes of a word: 4, or what divides every tensor's slot."""

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> Pools:
        assert tensors and all(is_whole(tensor) for tensor in tensors)
        sizes = [tensor[0].nbytes for tensor in tensors]
        word = gcd(4, *sizes)  # less than 4 only for a few narrow heads in eight bits
        places = [(tensor.data_ptr(), size // word) for tensor, size in zip(tensors, sizes, strict=True)]
        unit = 4 if all(size % VECTOR_BYTES == 0 for size in sizes) else 1
        return cls(tuple(tensors), torch.tensor(places, device=tensors[0].device), max(sizes) // word, unit, word)


def compact(pools: Pools, source_N: torch.Tensor, target_N: torch.Tensor) -> None:
    """Copy slot source[i] to slot target[i], in all tensors of `pools`, in one launch. Both int64 on the device.

    The rule in `StepOps.mover` on the order of entries makes this equivalent to reading all of them first.
    """
    assert source_N.dtype == target_N.dtype == torch.int64
    count = source_N.shape[0]
    if not count:
        return
    _move_kernel[len(pools.tensors), triton.cdiv(pools.widest, MOVED_WORDS)](
        pools.places_T2,
        source_N.contiguous(),
        target_N.contiguous(),
        count,
        pools.unit,
        pools.word,
        MOVED_ENTRIES,
        MOVED_WORDS,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["sources", "targets"])
def _move_kernel(
    places,
    sources,
    targets,
    count,
    UNIT: tl.constexpr,
    WORD: tl.constexpr,
    ENTRIES: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Grid (tensors, blocks of words). A program moves its words of all entries, so programs share nothing.

    Each block of entries is read completely and then written, one block after another. By the rule in `StepOps.mover`,
    no earlier block overwrites what a later one reads, and an earlier block has finished reading when a later one
    writes.
    """
    place = places + tl.program_id(0) * 2
    word: tl.constexpr = tl.int32 if WORD == 4 else tl.int16 if WORD == 2 else tl.int8
    pool = tl.multiple_of(tl.load(place).to(tl.pointer_type(word)), 16)
    words = tl.load(place + 1) // UNIT * UNIT  # the same number, but now the compiler knows it to be a multiple
    word_B = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    for first in range(0, count, ENTRIES):
        entry_K = first + tl.arange(0, ENTRIES)
        source_K = tl.load(sources + entry_K, mask=entry_K < count, other=0)
        target_K = tl.load(targets + entry_K, mask=entry_K < count, other=0)
        moved_KB = (source_K != target_K)[:, None] & (word_B < words)[None, :]
        held_KB = tl.load(pool + (source_K * words)[:, None] + word_B[None, :], mask=moved_KB)
        tl.debug_barrier()  # until all threads have read
        tl.store(pool + (target_K * words)[:, None] + word_B[None, :], held_KB, mask=moved_KB)
