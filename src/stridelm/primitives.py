"""Bounds how many compiled matrix products oneDNN caches on a CPU; set before the first one runs.

There, a product is compiled anew for each number of rows, on first use, and cached with its code: up to 1,024 entries
in oneDNN's cache, and as many in torch's own on top of it. Prompts of all lengths fill both: a server under mixed
requests grew by 200 MB in ten minutes. Smaller caches recompile more, without a measurable loss: prompts of 240
lengths, read in turn, take 47.8 s with 64 entries and 48.0 s with 256.

Both read their environment when the first product runs. Values that the user has set take precedence.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

KEPT = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "LRU_CACHE_CAPACITY": "16"}
"""oneDNN's own, and torch's (ideep)."""


def settle_primitives(environment: MutableMapping[str, str] = os.environ) -> None:
    """Bound both caches, for this process and those that it starts."""
    for name, count in KEPT.items():
        environment.setdefault(name, count)
