"""Which tokens each step sees: a pure function of the seed and of the number of windows before it, so that a resumed
run continues exactly as the interrupted one would have."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from stridelm.train.settings import RunSettings


class Batches(Protocol):
    """An endless sequence of training examples."""

    def batch(self, first: int, count: int) -> torch.Tensor:
        """Examples number `first` to `first + count` since training began: [count, tokens] int64."""
        ...


class Windows:
    """An endless, shuffled sequence of windows of `length + 1` tokens (the last is only a target).

    Every epoch cuts the stream at a different offset and visits all windows once, in a different order.
    """

    def __init__(self, tokens: torch.Tensor, length: int, seed: int) -> None:
        """tokens: [n] integers on the training device. Raises ValueError if they do not fill two windows."""
        if len(tokens) < 2 * length + 1:
            raise ValueError(
                f"the training text has {len(tokens)} tokens, too few for sequences of {length}; "
                "give more text or a smaller --length"
            )
        self.tokens, self.length, self.seed = tokens, length, seed
        self.per_epoch = (len(tokens) - 1) // length - 1
        self._span = torch.arange(length + 1, device=tokens.device)
        self._epoch, self._starts = -1, np.zeros(0, dtype=np.int64)

    def batch(self, first: int, count: int) -> torch.Tensor:
        """Windows number `first` to `first + count` since training began: [count, length + 1] int64."""
        starts = torch.from_numpy(np.array([self._start(first + i) for i in range(count)], dtype=np.int64))
        starts = starts.to(self.tokens.device, non_blocking=True)
        return self.tokens[starts[:, None] + self._span].long()

    def _start(self, number: int) -> int:
        epoch, place = divmod(number, self.per_epoch)
        if epoch != self._epoch:
            random = np.random.default_rng((self.seed, self.length, epoch))
            offset = int(random.integers(0, self.length))
            self._starts = offset + self.length * random.permutation(self.per_epoch).astype(np.int64)
            self._epoch = epoch
        return int(self._starts[place])


def text_windows(tokens: torch.Tensor, run: RunSettings) -> dict[int, Windows]:
    """The windows of a run over a text, by each length that it uses."""
    return {length: Windows(tokens, length, run.seed) for length in {run.length, run.short_length} - {0}}


class Rows:
    """Rows of a matrix, each once per epoch, in a different order every epoch."""

    def __init__(self, rows_NL: torch.Tensor, seed: int) -> None:
        """rows_NL: integers on the training device."""
        self.rows, self.seed = rows_NL, seed
        self._epoch, self._order = -1, np.zeros(0, dtype=np.int64)

    def batch(self, first: int, count: int) -> torch.Tensor:
        chosen = torch.from_numpy(np.array([self._row(first + i) for i in range(count)], dtype=np.int64))
        return self.rows[chosen.to(self.rows.device, non_blocking=True)].long()

    def _row(self, number: int) -> int:
        epoch, place = divmod(number, len(self.rows))
        if epoch != self._epoch:
            self._order = np.random.default_rng((self.seed, epoch)).permutation(len(self.rows))
            self._epoch = epoch
        return int(self._order[place])


def fixed_windows(tokens: torch.Tensor, length: int, limit: int) -> torch.Tensor:
    """At most `limit` tokens' worth of windows, evenly spread over the stream: [V, length + 1] int64.

    Raises ValueError if the stream is shorter than one window.
    """
    whole = (len(tokens) - 1) // length
    if whole < 1:
        raise ValueError(
            f"the validation text has {len(tokens)} tokens, fewer than one sequence of {length}; hold out more text"
        )
    count = max(1, min(whole, limit // length))
    starts = torch.arange(count, device=tokens.device) * whole // count * length
    return tokens[starts[:, None] + torch.arange(length + 1, device=tokens.device)].long()


def step_generator(seed: int, step: int, device: torch.device | str = "cpu") -> torch.Generator:
    """Random numbers of one step: the same ones whether or not the run was interrupted before it."""
    mixed = int(np.random.SeedSequence((seed, step)).generate_state(1, np.uint64)[0] >> np.uint64(1))
    return torch.Generator(device).manual_seed(mixed)
