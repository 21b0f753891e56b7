"""How long threads on a CPU wait for one another by trying, settled before torch is there.

torch and the CPU's kernels share their work over OpenMP's threads. Whoever is done first waits for the others by trying
again and again, for milliseconds, because on a machine of one's own nothing is faster. Where another process wants the
core those turns are taken from the very threads that are waited for, and generation falls to a tenth and less. Trying
for about the time that lies between two products, and then sleeping, costs a machine of one's own some hundredths,
and a busy one its share (docs/decisions/0014-threads-sleep-soon.md has the figures).

OpenMP reads its environment when its library is loaded, which is when torch is. So this runs when the package is
imported. What a user's environment says of waiting holds.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, MutableMapping

logger = logging.getLogger(__name__)

TRIES = 10_000
"""Before a thread sleeps: some 0.5 ms, with a pause of 40 to 140 cycles between two. GNU's default is 300,000."""
WAITING = {"GOMP_SPINCOUNT": str(TRIES), "KMP_BLOCKTIME": "0"}
"""GNU's OpenMP, which torch's wheels and Numba's threads use, and Intel's and LLVM's (milliseconds), which other builds
do."""
THEIRS = ("OMP_WAIT_POLICY", *WAITING)
"""Whoever sets one of these has chosen."""


def settle_waiting(
    environment: MutableMapping[str, str] = os.environ, loaded: Mapping[str, object] = sys.modules
) -> None:
    """Have the threads of this process, and of those that it starts, sleep soon. `loaded`: modules imported so far."""
    if any(name in environment for name in THEIRS):
        return
    if "torch" in loaded:
        logger.debug(
            "torch was imported before stridelm: its threads wait as OpenMP's default is, which a busy machine pays "
            "for; import stridelm first, or set GOMP_SPINCOUNT=%d",
            TRIES,
        )
        return
    environment.update(WAITING)
