"""What a policy decided about the requests of a step, and by what.

Legend: R requests, D levels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stridelm.schedule.acceptance import Acceptance
from stridelm.schedule.depth_figures import Pick
from stridelm.schedule.probes import DEEPEST, Chosen
from stridelm.types import Request


@dataclass
class Decided:
    """What each of these requests drafts."""

    requests: list[Request]
    depths: Sequence[int]
    wanted: Sequence[int]
    """What they would draft if rows that do not fit were not taken from them."""
    chosen: Chosen = DEEPEST
    """The choice for as many."""
    own: bool = True
    """Whether it settled their depths when it was made, or when they came; otherwise they follow it in this step."""
    hoped: bool = True
    """Whether what is little known was hoped to be better."""
    probe: int | None = None
    """The depth that is probed, if one is."""
    repeats: int = 0
    """Steps for which the same can be said of them, if nothing is written and no prompt is read."""

    def is_for(self, requests: Sequence[Request]) -> bool:
        """Whether the same can be said again, of these requests."""
        return self.repeats > 0 and self.requests == requests

    @property
    def rests(self) -> bool:
        return self.repeats > 0 and not any(self.depths)

    def picks(self, acceptance: Acceptance, deepest: int) -> list[Pick]:
        """By what these were told what to draft: by what was known when their depths were settled, or is now."""
        readers, chosen = acceptance.read(self.requests), self.chosen
        now = acceptance.allowed(readers, chosen.depth, chosen.least, hoped=self.hoped)
        known, picks = readers.known, []
        for r, place in enumerate(readers.places_R):
            most, least, chances_D = chosen.depth, now.least_R[r], now.chances_RD[r]
            if self.own and self.probe is None and known.requests_P[place]["adaptive"]:
                most, least = known.requests_P[place]["most"], known.requests_P[place]["least"]
                chances_D = known.chances_PD[place] if most else chances_D
            chances = chances_D[:deepest].tolist()
            picks.append(Pick(self.wanted[r], self.probe is not None, min(int(most), deepest), float(least), chances))
        return picks
