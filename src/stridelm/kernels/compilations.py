"""Counts the GPU kernels that Triton compiles in this process, so that metrics show when a request waits for one."""

from __future__ import annotations

from typing import Any

_compiled = 0
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
        _compiled += not cache_hit
        if before is not None:
            before(cache_hit=cache_hit, **details)

    knobs.compilation.listener = listen
    _is_watching = True


def count() -> int:
    """Kernels compiled since `watch` was first called."""
    return _compiled
