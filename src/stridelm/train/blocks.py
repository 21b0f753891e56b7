"""Many mask windows in one forward pass: real rows, followed by blocks of rows, each attached to an anchor.

    row     0 1 2 3 4 5 | a: 1 2 3 | b: 1 2 3      T = 6, anchors a = 1 and b = 4, K = 3 slots
    pos     0 1 2 3 4 5 |    2 3 4 |    5 6 7
    a: 2    x x . . . . |    x x . |    . . .      real rows up to the anchor, then its own block, causally
    b: 1    x x x x x . |    . . . |    x . .

A block row computes what it would in a plain causal pass over [real rows 0..anchor | its block]: nothing
later in the text and no other block reaches it. Anchors are shared by all sequences of a batch, so there is
one mask for all.

Shape legend: B sequences, T real rows, A anchors, K slots of a block, M = A * K block rows, R = T + M rows of a
sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from stridelm.attention.base import HeadsInput
from stridelm.kernels.plain import roped
from stridelm.models.layers.decoder import Decoder, ModelInput
from stridelm.train.dense import by_row, by_sequence, masked_attention

CHUNKS = 4
"""Chunks in training: these take less than half the masked attention of one chunk; more would make kernels small."""


@dataclass(frozen=True, eq=False)  # hashed by identity: the compiler hashes what it traces
class Chunk:
    """Block rows `start` to `stop`, whose anchors are all before real row `limit`."""

    start: int
    stop: int
    limit: int
    mask_QK: torch.Tensor
    """[stop - start, limit + stop - start] bool: real rows, then the chunk's own block rows."""


@dataclass(frozen=True, eq=False)  # hashed by identity: the compiler hashes what it traces
class BlockMix:
    """The model's `mix` for B sequences of T real rows, followed by block rows in chunks."""

    batch: int
    length: int
    chunks: tuple[Chunk, ...]

    def __call__(self, layer: int, inputs: HeadsInput) -> torch.Tensor:
        q, k, v = (by_sequence(x, self.batch) for x in roped(inputs.qkv_NXD, inputs.rope))
        t = self.length
        real = F.scaled_dot_product_attention(
            q[:, :, :t], k[:, :, :t], v[:, :, :t], is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
        )
        return by_row(torch.cat((real, *(_attend_chunk(chunk, t, q, k, v) for chunk in self.chunks)), dim=2))


def _attend_chunk(
    chunk: Chunk, length: int, q_BHRD: torch.Tensor, k_BGRD: torch.Tensor, v_BGRD: torch.Tensor
) -> torch.Tensor:
    rows = slice(length + chunk.start, length + chunk.stop)
    k, v = (torch.cat((x[:, :, : chunk.limit], x[:, :, rows]), dim=2) for x in (k_BGRD, v_BGRD))
    return masked_attention(q_BHRD[:, :, rows], k, v, chunk.mask_QK)


def strata(length: int, anchors: int, slots: int) -> list[int]:
    """The A + 1 edges of `anchors` equal parts of the positions where an anchor may be.

    Raises ValueError if there are more anchors than positions.
    """
    if length - slots < anchors:
        raise ValueError(f"{anchors} anchors with {slots} masks each do not fit into {length} tokens; lower --anchors")
    return [number * (length - slots) // anchors for number in range(anchors + 1)]


def sample_anchors(length: int, anchors: int, slots: int, generator: torch.Generator) -> torch.Tensor:
    """One anchor in each of `anchors` strata of the text, none so late that its block would exceed the context.

    Returns [A] int64, ascending, on the CPU.
    """
    edges = torch.tensor(strata(length, anchors, slots))
    return edges[:-1] + (torch.rand(anchors, generator=generator) * edges.diff()).long()


def block_chunks(anchors_A: torch.Tensor, length: int, slots: int, count: int) -> tuple[Chunk, ...]:
    """Block rows in `count` chunks of neighbouring anchors, so that early chunks skip the text that they cannot see.

    With more than one chunk the anchors must come from `sample_anchors`: the limits are those of its strata, which are
    known without reading the anchors.
    """
    total = len(anchors_A)
    edges, chunks = strata(length, total, slots), []
    for number in range(count):
        first, last = number * total // count, (number + 1) * total // count
        limit = edges[last] if count > 1 else length
        mask = block_mask(anchors_A[first:last], limit, slots)
        chunks.append(Chunk(first * slots, last * slots, limit, mask))
    return tuple(chunk for chunk in chunks if chunk.stop > chunk.start)


def block_positions(anchors_A: torch.Tensor, length: int, slots: int) -> torch.Tensor:
    """Positions of the rows of one sequence: [R] int64."""
    offsets = torch.arange(1, slots + 1, device=anchors_A.device)
    return torch.cat((torch.arange(length, device=anchors_A.device), (anchors_A[:, None] + offsets).flatten()))


def block_mask(anchors_A: torch.Tensor, length: int, slots: int) -> torch.Tensor:
    """Which of `length` real rows and M block rows each block row sees: [M, length + M] bool."""
    device, rows = anchors_A.device, len(anchors_A) * slots
    number = torch.arange(rows, device=device)
    own, slot = number // slots, number % slots
    real_MT = torch.arange(length, device=device) <= anchors_A[own][:, None]
    block_MM = (own[:, None] == own) & (slot[:, None] >= slot)
    return torch.cat((real_MT, block_MM), dim=1)


def block_logits(
    model: Decoder, real_BT: torch.Tensor, block_BM: torch.Tensor, anchors_A: torch.Tensor, chunks: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the real rows [B, T, vocab] and of the block rows [B, A, K, vocab].

    block_BM: ids of the block rows, anchor by anchor. chunks: see `block_chunks`; it changes cost, not
    results.
    """
    (batch, length), anchors = real_BT.shape, len(anchors_A)
    slots = block_BM.shape[1] // anchors
    ids = torch.cat((real_BT, block_BM), dim=1).flatten()
    positions = block_positions(anchors_A, length, slots).repeat(batch)
    mix = BlockMix(batch, length, block_chunks(anchors_A, length, slots, chunks))
    logits = model.logits(model(ModelInput(ids, positions, mix))).unflatten(0, (batch, -1))
    return logits[:, :length], logits[:, length:].unflatten(1, (anchors, slots))
