"""Counts the GPU kernels that Triton compiles in this process, so that metrics show when a request waits for one, and
logs which they are at the level of debugging."""

from __future__ import annotations

import logging
import threading
from typing import Any

logger = logging.getLogger(__name__)

_compiled = 0
_lock = threading.Lock()  # kernels are compiled in several threads (engine/start.py)
_is_watching = False


def watch() -> None:
    """Count from now on. A kernel found in Triton's cache on disk is loaded, not compiled, and not counted."""
    global _is_watching
    if _is_watching:
        return
    from triton import knobs

    before = knobs.compilation.listener

    def listen(*, cache_hit: bool, **details: Any) -> None:
        global _compiled
        if not cache_hit:
            with _lock:
                _compiled += 1
            source = details.get("src")
            what = (getattr(source, each, None) for each in ("name", "signature", "constants"))
            logger.debug("compiled %s: %s, %s", *what)
        if before is not None:
            before(cache_hit=cache_hit, **details)

    knobs.compilation.listener = listen
    _is_watching = True


def count() -> int:
    """Kernels compiled since `watch` was first called."""
    return _compiled
