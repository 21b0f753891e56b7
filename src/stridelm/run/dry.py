"""A device that does nothing: inside `dry`, this thread's tensors on a GPU have shapes and addresses but no memory, and
the host computes as always. What it reads from the device is zeros.

Nothing reaches the device, so that values which no kernel wrote cannot hurt: an index out of bounds, which would end
every later step on a GPU, is never followed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from stridelm.run.graphs import GraphPool

T = TypeVar("T")

aten = torch.ops.aten
READ = {aten.item.default: 0, aten._local_scalar_dense.default: 0, aten.equal.default: False}
"""Operations that return a value to the host, and what they return."""


@contextmanager
def dry() -> Iterator[None]:
    with FakeTensorMode(), _Split(), _Addresses():
        yield


class _Split(TorchDispatchMode):
    """Sends what concerns the device to the mode below, FakeTensorMode, and runs the rest."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {name: value for name, value in (kwargs or {}).items() if name != "pin_memory"}
        if not any(map(_is_remote, (*args, *kwargs.values()))):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if func in READ:
            return READ[func]
        if _only_writes(func):
            return args[0] if _is_remote(args[0]) else _zeroed(args[0])
        args = [_without_memory(each) for each in args]
        result = func(*args, **{name: _without_memory(each) for name, each in kwargs.items()})
        if not isinstance(result, FakeTensor) or result.device.type != "cpu":
            return result
        with unset_fake_temporarily():  # a copy to the host
            return torch.zeros(result.shape, dtype=result.dtype)


def _zeroed(x: torch.Tensor) -> torch.Tensor:
    """A tensor on the host into which the device would have copied."""
    with unset_fake_temporarily():
        return x.zero_()


@cache
def _only_writes(func: Any) -> bool:
    """Whether an operation changes the values of its first argument, and nothing else."""
    return str(func._schema.name).endswith("_") and torch.Tag.inplace_view not in func.tags


class _Addresses(TorchFunctionMode):
    """Gives tensors without memory the addresses that they would have if the allocator's first were 0."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.data_ptr and isinstance(args[0], FakeTensor):
            return args[0].storage_offset() * args[0].element_size()
        return func(*args, **(kwargs or {}))


def _is_remote(argument: object) -> bool:
    if isinstance(argument, torch.Tensor):
        return isinstance(argument, FakeTensor) or argument.is_cuda
    if isinstance(argument, list | tuple):
        return any(map(_is_remote, argument))
    return isinstance(argument, torch.device) and argument.type == "cuda"


def _without_memory(argument: Any) -> Any:
    if isinstance(argument, list | tuple):
        return [_without_memory(each) for each in argument]
    if not isinstance(argument, torch.Tensor) or isinstance(argument, FakeTensor):
        return argument
    return torch.empty_strided(argument.shape, argument.stride(), dtype=argument.dtype, device=argument.device)


class DryPool(GraphPool):
    """Captures nothing: a body runs once, and its graph replays nothing."""

    def __init__(self) -> None:
        self.budget, self.spent, self.graphs = 1, 0, 0

    def capture(self, body: Callable[[], T], inputs: int = 0) -> tuple[Any, T]:
        self.graphs += 1
        return _Nothing(), body()

    def seconds(self, graph: Any) -> float:
        return 0.0

    def borrow(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


class _Nothing:
    def replay(self) -> None:
        pass
