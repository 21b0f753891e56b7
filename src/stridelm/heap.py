"""Keeps garbage collections short in processes that run for long."""

from __future__ import annotations

import gc


def freeze_heap() -> None:
    """Collect what is garbage now, and spare later collections what is left: all that was imported and loaded.

    A full collection that scans that takes a tenth of a second, and on a GPU, with hundreds of graphs and kernels, up
    to half a second, in the middle of a step. For processes that keep what they have loaded until they end: none of it
    is freed any more where it refers to itself, as an engine and its parts do.
    """
    gc.collect()
    gc.freeze()
