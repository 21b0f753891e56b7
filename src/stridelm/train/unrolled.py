"""A head unrolled over its own output, as serving chains it (draft/head_drafter.py), after every entry of a text.

Entry i is made from the target's state i and token i + 1, and guesses token i + 2. A chain after entry s continues with
entries s + 1, s + 2, ...: each is made from the head's output at the one before and the next token, here the true one,
and sees the entries 0..s, which are made from the target's states, and those of its own chain. Entries of equal depth
run together:

    keys               | target 0 1 2 3 4 | depth 2, after 2 3 4  | depth 3, after 2 3 4
    depth 1, entry 3   |        x x x x . |                       |
    depth 2, after 3   |        x x x x . |                . x .  |
    depth 3, after 3   |        x x x x . |                . x .  |                . x .

This is the training-time test of EAGLE-3 (arXiv 2503.01840, section 3.1) and the recursion of FastMTP (arXiv
2509.18362).

Legend: B sequences of L tokens, E = L - 2 entries, S starts at a depth (one fewer at each further depth), H width.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from stridelm.attention.base import HeadsInput
from stridelm.batch import States
from stridelm.draft.heads import DraftHead
from stridelm.kernels.plain import roped
from stridelm.kernels.plain_step import PlainStepOps
from stridelm.models.layers.decoder import Decoder, ModelInput
from stridelm.train.dense import DenseMix, by_row, by_sequence, flat_positions, masked_attention


def target_states(target: Decoder, ids_BL: torch.Tensor, taps: tuple[int, ...]) -> States:
    """The target's hidden states of every token."""
    inputs: dict[int, torch.Tensor] = {}

    def tap(layer: int, x_NH: torch.Tensor) -> None:
        inputs[layer] = x_NH

    batch, length = ids_BL.shape
    positions = flat_positions(batch, length, ids_BL.device)
    return States(target(ModelInput(ids_BL.flatten(), positions, DenseMix(batch), tap, taps)), inputs)


class ChainMix:
    """A head's `mix` while it is unrolled: its first call passes the entries of B sequences that are made from the
    target's states, every further call one entry of each chain."""

    def __init__(self, batch: int, first: int) -> None:
        """first: entry after which the first chain starts."""
        self.batch, self.first = batch, first
        self._parts: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __call__(self, layer: int, inputs: HeadsInput) -> torch.Tensor:
        q, k, v = (by_sequence(x, self.batch) for x in roped(inputs.qkv_NXD, inputs.rope))
        self._parts.append((k, v))
        chained = len(self._parts) - 1
        if not chained:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
            return by_row(out)
        starts = q.shape[2]
        seen = (self.first + starts, *[starts] * chained)
        keys, values = (
            torch.cat([part[:, :, :count] for part, count in zip(parts, seen, strict=True)], dim=2)
            for parts in zip(*self._parts, strict=True)
        )
        return by_row(masked_attention(q, keys, values, chain_mask(self.first, starts, chained, q.device)))


def chain_mask(first: int, starts: int, chained: int, device: torch.device) -> torch.Tensor:
    """Which keys the newest entries see: [S, first + S + chained * S] bool, the entries made from the target's states,
    then depth by depth."""
    start = torch.arange(starts, device=device)
    from_target = torch.arange(first + starts, device=device) <= first + start[:, None]
    own = start == start[:, None]
    return torch.cat((from_target, own.repeat(1, chained)), dim=1)


def unrolled(head: DraftHead, states: States, rows_BL: torch.Tensor, first: int, depth: int) -> Iterator[torch.Tensor]:
    """The head's outputs at depths 1 to `depth`: [B, S, H] each.

    states: of the target, B * L rows. Number s at depth j belongs to the chain after entry first + s, and guesses token
    first + s + j + 1.
    """
    batch, length = rows_BL.shape
    device, entries = rows_BL.device, length - 2
    mix = ChainMix(batch, first)
    own = (torch.arange(batch, device=device)[:, None] * length + torch.arange(entries, device=device)).flatten()
    ids, positions = rows_BL[:, 1 : 1 + entries], flat_positions(batch, entries, device)
    out = head.forward(
        0, ids.flatten(), head.features(PlainStepOps().side_by_side(head.read(states), own)), positions, mix
    )
    hidden = out.unflatten(0, (batch, entries))[:, first:]
    yield hidden
    for step in range(2, depth + 1):
        starts = hidden.shape[1] - 1
        ids = rows_BL[:, first + step : first + step + starts]
        positions = flat_positions(batch, starts, device) + first + step - 1
        out = head.forward(0, ids.flatten(), hidden[:, :starts].flatten(0, 1), positions, mix)
        hidden = out.unflatten(0, (batch, starts))
        yield hidden
