"""Ends a process when its parent does, whatever it is doing: compiling a grammar, or a step that hangs."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def end_with(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends; exit if the parent is gone already."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(1)
