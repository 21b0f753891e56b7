"""Keeps large temporaries mapped on a CPU.

glibc gives every block over 128 KiB back to the kernel when it is freed, and the next step's first touch of each page
is a fault. For tensors of a megabyte the faults cost more than the arithmetic.
"""

from __future__ import annotations

import ctypes
import logging
import sys

logger = logging.getLogger(__name__)

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # malloc.h
_LARGE = 1 << 30


def keep_large_blocks() -> None:
    """Tell malloc to reuse freed blocks of up to a gigabyte, for the whole process. Without glibc nothing happens."""
    if not sys.platform.startswith("linux"):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        logger.debug("no mallopt here; large temporaries are mapped anew each time")
        return
    mallopt(_MMAP_THRESHOLD, _LARGE)
    mallopt(_TRIM_THRESHOLD, _LARGE)
    mallopt(_TOP_PAD, 1 << 26)
