"""A head that reads its target's keys and values, unrolled over its own output, as serving chains it
(draft/frozen_kv/drafter.py), after every entry of a text.

A chain after entry s begins with token s + 1 and the target's state s, and guesses token s + 2. It continues with
tokens s + 2, s + 3, ..., here the true ones, and the head's own output before. All of its rows have position s + 1 and
see the entries 0..s, which are the target's:

    keys               | target 0 1 2 3 4
    any depth, after 2 |        x x x . .
    any depth, after 3 |        x x x x .

Legend: B sequences of L tokens, S starts at a depth (one fewer at each further depth), G KV heads, D head width,
H width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from stridelm.attention.base import HeadsInput
from stridelm.batch import States
from stridelm.kernels.plain import roped
from stridelm.models.layers.attention import HeadsSpec
from stridelm.models.layers.decoder import Decoder, ModelInput
from stridelm.train.dense import DenseMix, by_row, by_sequence, flat_positions, masked_attention

if TYPE_CHECKING:  # the drafter's folder may be missing
    from stridelm.draft.frozen_kv.head import FrozenKVHead

Entries = Mapping[int, tuple[torch.Tensor, torch.Tensor]]
"""Layer of the target -> its keys and values, [B, G, L, D] each."""


@dataclass
class StatesAndEntries(States):
    entries: Entries = field(default_factory=dict)


class KeepingMix:
    """A target's `mix` over whole sequences, which keeps the keys and values of some layers."""

    def __init__(self, batch: int, layers: tuple[int, ...]) -> None:
        self._mix, self._batch, self._layers = DenseMix(batch), batch, layers
        self.entries: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, layer: int, inputs: HeadsInput) -> torch.Tensor:
        if layer in self._layers:
            _, k, v = (by_sequence(x, self._batch) for x in roped(inputs.qkv_NXD, inputs.rope))
            self.entries[layer] = k, v
        return self._mix(layer, inputs)


def states_and_entries(head: FrozenKVHead, target: Decoder, rows_BL: torch.Tensor) -> StatesAndEntries:
    """What the head reads of the target over these texts."""
    batch, length = rows_BL.shape
    mix = KeepingMix(batch, head.sources)
    final = target(ModelInput(rows_BL.flatten(), flat_positions(batch, length, rows_BL.device), mix))
    return StatesAndEntries(final, {}, mix.entries)


class EntriesMix:
    """The head's `mix`: S rows of each sequence, of which number s sees the entries up to `first` + s."""

    def __init__(self, head: FrozenKVHead, entries: Entries, batch: int, first: int) -> None:
        self._entries, self._batch, self._first = entries, batch, first
        self._mixers = [layer.mixer for layer in head.spec.layers]

    def __call__(self, layer: int, inputs: HeadsInput) -> torch.Tensor:
        mixer = self._mixers[layer]
        assert isinstance(mixer, HeadsSpec) and mixer.reads is not None
        q, _, _ = roped(inputs.qkv_NXD, inputs.rope)
        q_BHSD = by_sequence(q, self._batch)
        starts = q_BHSD.shape[2]
        keys, values = (part[:, :, : self._first + starts].to(q.dtype) for part in self._entries[mixer.reads])
        mask = entries_mask(self._first, starts, q.device)
        return by_row(masked_attention(q_BHSD, keys, values, mask, mixer.scale))


def entries_mask(first: int, starts: int, device: torch.device) -> torch.Tensor:
    """[S, first + S] bool: which entries the rows of the chains after entries first .. first + S - 1 see."""
    return torch.arange(first + starts, device=device) <= first + torch.arange(starts, device=device)[:, None]


def unrolled_over_entries(
    head: FrozenKVHead, states: StatesAndEntries, rows_BL: torch.Tensor, first: int, depth: int
) -> Iterator[torch.Tensor]:
    """The head's outputs at depths 1 to `depth`: [B, S, H] each. Number s at depth j belongs to the chain after entry
    first + s, and guesses token first + s + j + 1."""
    batch, length = rows_BL.shape
    mix = EntriesMix(head, states.entries, batch, first)
    hidden = states.final.unflatten(0, (batch, length))[:, first : length - 2]
    for step in range(1, depth + 1):
        starts = length - 1 - step - first
        ids = rows_BL[:, first + step : first + step + starts]
        positions = flat_positions(batch, starts, rows_BL.device) + first + 1
        out = head.forward(0, ids.flatten(), hidden[:, :starts].flatten(0, 1), positions, mix)
        yield out.unflatten(0, (batch, starts))
        hidden = head.passed_on(out).unflatten(0, (batch, starts))
