"""A note in Triton's cache that an engine became ready with it, so that nothing is looked for again that is there."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

import torch

NAME = "stride-ready"


class ReadyMark:
    """One note. It lies where the kernels lie, also when they are baked into an image."""

    def __init__(self, what: str, device: torch.device) -> None:
        """what: all that the kernels depend on besides the device, Triton and Stride themselves. Raises OSError
        if the cache cannot be written."""
        import triton
        from triton.runtime.cache import get_cache_manager

        properties = torch.cuda.get_device_properties(device)
        parts = (what, str(properties), triton.__version__, torch.__version__, _source())
        self._cache = get_cache_manager(hashlib.sha256("\n".join(parts).encode()).hexdigest())

    @property
    def is_set(self) -> bool:
        return self._cache.get_file(NAME) is not None

    def set(self) -> None:
        """Raises OSError if the cache cannot be written."""
        self._cache.put("", NAME, binary=False)


@cache
def _source() -> str:
    """A hash of the package: how a kernel is launched may be decided anywhere in it."""
    package = Path(__file__).parents[1]
    files = sorted(package.rglob("*.py"))
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()
