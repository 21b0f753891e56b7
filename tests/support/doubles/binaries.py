"""Which binaries Triton would compile for the kernels that are launched, told without a GPU."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

Binaries = dict[str, set[tuple[tuple[str, Any], ...]]]
"""File and kernel -> what is special about the arguments of each of its binaries."""


@contextmanager
def recorded(*, run: bool = True) -> Iterator[Binaries]:
    """What is launched in the interpreter meanwhile. run: False records only. Triton makes one binary for each kind of
    arguments: the values of constants and options, types, which numbers are 1, and which numbers and addresses are
    multiples of 16, except where a kernel says that it does not matter."""
    from triton.runtime.interpreter import InterpretedFunction

    found: Binaries = defaultdict(set)
    interpret = InterpretedFunction.run

    def launch(kernel: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        given = {**dict(zip(kernel.arg_names, args, strict=False)), **named}
        found[f"{kernel.fn.__module__.rpartition('.')[2]}.{kernel.fn.__name__}"].add(
            tuple((name, _kind(kernel, name, x)) for name, x in sorted(given.items()))
        )
        if run:
            interpret(kernel, *args, grid=grid, warmup=warmup, **named)

    with patch.object(InterpretedFunction, "run", launch):
        yield found


def _kind(kernel: Any, name: str, x: object) -> object:
    parameter = kernel.fn.__annotations__.get(name)
    if parameter is not None or name not in kernel.arg_names:
        return x  # a constant, or an option of the launch
    anything = name in (kernel.kwargs["do_not_specialize"] or ())
    anywhere = anything or name in (kernel.kwargs["do_not_specialize_on_alignment"] or ())
    if isinstance(x, torch.Tensor):
        return x.dtype, anywhere or x.data_ptr() % 16 == 0
    if not isinstance(x, int) or anything:
        return type(x)
    return x == 1, anywhere or x % 16 == 0
