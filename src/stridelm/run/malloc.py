"""Keeps large temporaries mapped on a CPU, and now and then gives back what they left.

glibc gives every block over 128 KiB back to the kernel when it is freed, and the next step's first touch of each page
is a fault. For tensors of a megabyte the faults cost more than the arithmetic.
"""

from __future__ import annotations

import ctypes
import logging
import sys
from typing import Any

logger = logging.getLogger(__name__)

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -2, -3, -8  # malloc.h
ARENAS = 2
"""Heaps of a server's process. glibc makes up to eight for each core, and the holes that threads leave in one of them
are of no use to the others."""
_LARGE = 1 << 30
TIDY_S = 60.0
"""How often a server's processes return what they do not use any more. It takes about as long as a step."""


def keep_large_blocks() -> None:
    """Tell malloc to reuse freed blocks of up to a gigabyte, for the whole process. Without glibc nothing happens."""
    mallopt = _glibc("mallopt")
    if mallopt is None:
        logger.debug("no mallopt here; large temporaries are mapped anew each time")
        return
    mallopt(_MMAP_THRESHOLD, _LARGE)
    mallopt(_TRIM_THRESHOLD, _LARGE)
    mallopt(_TOP_PAD, 1 << 26)


def share_arenas() -> None:
    """Let this process's threads share a few heaps. Called before there are threads. Without glibc nothing happens."""
    mallopt = _glibc("mallopt")
    if mallopt is not None:
        mallopt(_ARENA_MAX, ARENAS)


def give_back_memory() -> None:
    """Return to the system what was freed anywhere in the heap. Without glibc nothing happens.

    Blocks that are kept for reuse are of every size, so that under a steady load the heap grows by a tenth within
    minutes, though what is in use stays as it is.
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
