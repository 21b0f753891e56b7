"""How many compiled products oneDNN keeps on a CPU, settled before the first one runs.

Each number of rows that a product meets is a kernel of its own there, made when it is first met and kept with its code:
up to 1,024 of them in oneDNN's cache, and as many in torch's own on top of it. Prompts of all lengths fill both: a
server under mixed requests grew by 200 MB in ten minutes. Fewer are made anew without a loss that can be seen: prompts
of 240 lengths, read in turn, take 47.8 s with 64 and 48.0 s with 256.

Both read their environment when the first product runs. What a user's environment says holds.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

KEPT = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "LRU_CACHE_CAPACITY": "16"}
"""oneDNN's own, and torch's (ideep)."""


def settle_primitives(environment: MutableMapping[str, str] = os.environ) -> None:
    """Bound both, for this process and those that it starts."""
    for name, count in KEPT.items():
        environment.setdefault(name, count)
