"""How long OpenMP threads on a CPU spin before they sleep; set before torch is imported.

torch and the CPU kernels divide their work among OpenMP threads. Those that finish first spin for milliseconds while
they wait for the others, because on an otherwise idle machine nothing is faster. If another process wants the core, the
spinning takes time from the very threads that are waited for, and generation drops to a tenth or less. Spinning for
about as long as the gap between two products, and then sleeping, costs a few percent on an idle machine and keeps a
busy one at its share (docs/decisions/0014-threads-sleep-soon.md has the figures).

OpenMP reads its environment when its library is loaded, that is, together with torch, so this runs when the package is
imported. If the user's environment configures waiting, it takes precedence.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, MutableMapping

logger = logging.getLogger(__name__)

TRIES = 10_000
"""Spins before a thread sleeps: about 0.5 ms, at a pause of 40 to 140 cycles each. GNU's default is 300,000."""
WAITING = {"GOMP_SPINCOUNT": str(TRIES), "KMP_BLOCKTIME": "0"}
"""For GNU's OpenMP, used by torch's wheels and Numba's threads, and for Intel's and LLVM's (milliseconds), used by
other builds."""
THEIRS = ("OMP_WAIT_POLICY", *WAITING)
"""Variables by which a user chooses how threads wait; if one is set, nothing is changed."""


def settle_waiting(
    environment: MutableMapping[str, str] = os.environ, loaded: Mapping[str, object] = sys.modules
) -> None:
    """Make threads of this process, and of those that it starts, sleep soon. `loaded`: modules imported so far."""
    if any(name in environment for name in THEIRS):
        return
    if "torch" in loaded:
        logger.debug(
            "torch was imported before stridelm, so its threads spin for OpenMP's default time, which is slow on a "
            "busy machine; import stridelm first, or set GOMP_SPINCOUNT=%d",
            TRIES,
        )
        return
    environment.update(WAITING)
