"""Which binaries Triton would compile for the launches of a kernel, told without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Recorder:
    """Stands in for a kernel, and does nothing. Triton makes one binary for each kind of arguments: the values of
    constants and options, types, which numbers are 1, and which numbers and addresses are multiples of 16, except where
    the kernel says that it does not matter."""

    def __init__(self, kernel: Any) -> None:
        self._arguments = kernel.arg_names
        self._whatever = set(kernel.kwargs["do_not_specialize"] or ())
        self._anywhere = self._whatever | set(kernel.kwargs["do_not_specialize_on_alignment"] or ())
        self.kinds: set[tuple[tuple[str, Any], ...]] = set()

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **named: Any) -> None:
            given = {**dict(zip(self._arguments, args, strict=False)), **named}
            constants = {name for name in given if name.isupper() or name.startswith("num_")}
            self.kinds.add(
                tuple((name, x if name in constants else self._kind(name, x)) for name, x in sorted(given.items()))
            )

        return launch

    def _kind(self, name: str, x: object) -> object:
        if isinstance(x, torch.Tensor):
            return x.dtype, name in self._anywhere or x.data_ptr() % 16 == 0
        if not isinstance(x, int) or name in self._whatever:
            return type(x)
        return x == 1, name in self._anywhere or x % 16 == 0
