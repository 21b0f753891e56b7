"""Launches that only compile: what a thread launches inside `compiling` is handed to an executor, which compiles it if
it is neither loaded nor in Triton's cache, and is never run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import Any, cast

import torch

VECTOR_BYTES = 16
"""Triton compiles a kernel again for addresses that are, or are not, multiples of this."""

_here = threading.local()
_one_at_a_time = threading.Lock()


def only_compiles() -> bool:
    """Whether this thread's launches only compile, so that what they would have written must not be believed."""
    return getattr(_here, "compiles", False)


@contextmanager
def compiling(executor: Executor) -> Iterator[None]:
    """Hand the kernels that this thread launches to the executor. Their arguments may be tensors without memory. Ends
    when all are compiled; a kernel that cannot be compiled raises when it is launched for real.

    Raises ImportError without Triton, or with one that cannot compile asynchronously.
    """
    from triton import AsyncCompileMode
    from triton.runtime.jit import JITFunction, KernelInterface

    launcher = KernelInterface.__getitem__
    seen: set[Any] = set()

    def getitem(kernel: Any, grid: Any) -> Callable[..., Any]:
        if not only_compiles():
            return cast("Callable[..., Any]", launcher(kernel, grid))

        def compile_only(*args: Any, **options: Any) -> None:
            key = (id(kernel), *map(_distinction, args), *((name, _distinction(options[name])) for name in options))
            if key not in seen:  # Triton's own key takes longer to compute
                seen.add(key)
                kernel.warmup(*args, grid=grid, **options)

        return compile_only

    with _one_at_a_time:
        JITFunction.__getitem__ = getitem
        _here.compiles = True
        try:
            with AsyncCompileMode(executor, ignore_errors=True):
                yield
        finally:
            _here.compiles = False
            del JITFunction.__getitem__  # it was inherited


def _distinction(argument: Any) -> Any:
    """All of an argument that can select a binary, and for numbers more than that."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % VECTOR_BYTES
    if isinstance(argument, tuple):
        return tuple(map(_distinction, argument))
    if hasattr(argument, "block_shape"):  # a tensor descriptor
        return _distinction(argument.base), *argument.shape, *argument.strides, *argument.block_shape
    return type(argument), argument
