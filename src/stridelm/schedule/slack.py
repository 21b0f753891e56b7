"""How long the next step may still be unplanned, while the device is busy with the last.

A step that is launched as soon as the one before has landed waits on the device for as long as that one's successor
runs, and a request that arrives meanwhile is not in it: its first token comes a whole step later. So a caller that may
get more requests waits for them until the device will be idle soon. Once one has arrived it waits no longer: launching
prompts takes the host a while, and that while had better be the rest of the step that runs.
"""

from __future__ import annotations

SHORTEST = 1e-3
"""Seconds. Callers wait this long at a time; less is not worth waiting for."""
EARLY, EARLY_SHARE = 1e-3, 0.1
"""A launch is done so many seconds, and such a share of the step before it, earlier than that is expected to end."""
FADING = 0.98
"""What a launch took is expected of the next ones, too, and this share of it of each later one."""


class LaunchTime:
    """How long before the device is idle the next step has to be planned. Times in seconds."""

    def __init__(self) -> None:
        self._decodes = self._prompts = 0.0

    def note(self, seconds: float, *, prompts: bool) -> None:
        """Planning and launching a step took the host so long. prompts: whether it had prompt rows; such a step is
        launched in parts."""
        if prompts:
            self._prompts = max(seconds, FADING * self._prompts)
        else:
            self._decodes = max(seconds, FADING * self._decodes)

    def left(self, now: float, began: float, step: float, *, prompts: bool) -> float:
        """Time until the next step has to be planned; 0 if that is now, or soon. began: when the device began the last
        step that was launched. step: how long it is expected to take. prompts: whether the next is known to have prompt
        rows."""
        launch = self._prompts if prompts else self._decodes
        left = began + (1 - EARLY_SHARE) * step - EARLY - launch - now
        return left if left >= SHORTEST else 0.0
