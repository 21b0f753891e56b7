"""Keeps large temporaries mapped on a CPU, and returns unused memory from time to time.

glibc returns every block over 128 KiB to the kernel when it is freed, and the next step takes a page fault on first
touch of each page. For tensors of a megabyte the faults cost more than the arithmetic.
"""

from __future__ import annotations

import ctypes
import logging
import sys
from typing import Any

logger = logging.getLogger(__name__)

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -2, -3, -8  # malloc.h
ARENAS = 2
"""Heaps of a server process. glibc creates up to eight per core, and free space in one of them cannot be used by the
others."""
_LARGE = 1 << 30
TIDY_S = 60.0
"""Interval, in seconds, at which a server's processes return unused memory. It takes about as long as a step."""


def keep_large_blocks() -> None:
    """Tell malloc to reuse freed blocks of up to a gigabyte, for the whole process. A no-op without glibc."""
    mallopt = _glibc("mallopt")
    if mallopt is None:
        logger.debug("mallopt is not available; large temporaries are mapped anew each time")
        return
    mallopt(_MMAP_THRESHOLD, _LARGE)
    mallopt(_TRIM_THRESHOLD, _LARGE)
    mallopt(_TOP_PAD, 1 << 26)


def share_arenas() -> None:
    """Let this process's threads share a few heaps. Call before starting threads. A no-op without glibc."""
    mallopt = _glibc("mallopt")
    if mallopt is not None:
        mallopt(_ARENA_MAX, ARENAS)


def give_back_memory() -> None:
    """Return freed memory anywhere in the heap to the system. A no-op without glibc.

    Blocks kept for reuse have all sizes, so that under a steady load the heap grows by a tenth within minutes although
    the memory in use stays constant.
    """
    trim = _glibc("malloc_trim")
    if trim is not None:
        trim(0)


def _glibc(name: str) -> Any:
    """A function of malloc.h; None if this is not glibc."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        return getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError):
        return None
