"""How long steps take on the device, and when they ended.

The host learns that a step has ended when it reads its verdict, and it may be busy until later: launching a prompt's
step kernel by kernel takes as long as the device needs for hundreds of rows. Measured between two readings, such a step
seems to be over in no time, and the one before to take twice as long. So steps are timed by marks that the device
passes.
"""

from __future__ import annotations

import time

from stridelm.upload import Mark


class StepClock:
    """Of the last step that was read. Times in seconds."""

    def __init__(self) -> None:
        self.ended = 0.0
        """By time.perf_counter(); later than true by no more than the host was late."""
        self._last: Mark | None = None

    def wait_for(self, end: Mark) -> None:
        """Wait for the end of a step, the next one after the last."""
        was_late = end.has_passed
        end.wait()
        now = time.perf_counter()
        # The clocks of host and device drift: they are compared anew whenever the host was there in time.
        if was_late and self._last is not None:
            now = min(now, self.ended + end.since(self._last))
        self.ended, self._last = now, end
