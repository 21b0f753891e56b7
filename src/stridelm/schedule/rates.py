"""Which depths make the most tokens per second, by chances of acceptance and what steps take.

A step of R requests that verifies n draft rows, drafted to depth D, emits R + (the chances of those rows) tokens and
takes what the cost table says (schedule/step_cost.py) of R, n, D and the tokens that attention reads. Rows are chosen
in order of their chances, over all requests, so a choice is a depth D and a least chance: a request drafts as many
levels as reach it. Of all choices the one with the highest rate is the best, and depth 0 is a choice like any other.

A step that goes on with a prompt is run for the prompt's sake, and time that drafts take in it is taken from the
prompts that wait. So what drafts gain there has to be worth their own seconds, and nothing of the step's other time is
laid to them. A second is worth the tokens that the best choice will make in it once all decode whose prompts are read
or wait: a token now spares one of these. With nobody to come this is the highest rate again.

Tokens may count for more in one request than in another (schedule/urgency.py): then chances and tokens are weighted.

Legend: P places in the table of requests (schedule/known.py), R requests, D levels, T least chances.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from stridelm.schedule.acceptance import Acceptance, Readers
from stridelm.schedule.depth_loops import choices, deepest_of, pad, trim, worth
from stridelm.schedule.probes import Chosen
from stridelm.schedule.row_stairs import RowStairs
from stridelm.schedule.rows import decoded_rows
from stridelm.schedule.step_cost import StepCost
from stridelm.schedule.step_shape import StepShape
from stridelm.types import Request

LEAST = np.array([1e-9, 0.02, 0.04, 0.07, 0.1, 0.14, 0.19, 0.25, 0.32, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9])
"""Least chances that are considered."""
SURE = 2.0
"""Standard deviations: a depth that is slower by more than these is known to be."""
SLIGHT = 0.01
"""By what share a depth may be slower than another and count as just as good."""
CLEARLY = 0.02
"""By what share drafting has to be faster for it to begin: the drafter first goes over all that it did not follow, and
what steps take is not known better than this."""


class Rates:
    """Remembers nothing of what it was asked."""

    def __init__(self, cost: StepCost, acceptance: Acceptance) -> None:
        self.cost, self.acceptance = cost, acceptance
        self.stairs: RowStairs | None = None
        """None: steps are not padded."""

    def best(self, readers: Readers, context: int, *, drafts: bool, looking: float = 0.0) -> tuple[Chosen, float]:
        """The choice with the highest rate, and how many times plain decoding's that is. drafts: whether steps have
        drafted so far. looking: seconds that it takes to look at a probe."""
        count = len(readers.places_R)
        least_T, rows_TD, tokens_TD, depths_TD = self._choices(readers)
        seconds_TD = self._seconds(count, rows_TD, depths_TD, context)
        rate_TD = tokens_TD / seconds_TD
        plain_T = rate_TD[:, 0] * (1.0 if drafts else 1.0 + CLEARLY)
        place, depth = divmod(int(np.column_stack((plain_T, rate_TD[:, 1:])).argmax()), rate_TD.shape[1])
        lost_D = 1.0 - rate_TD[0] / rate_TD[place, depth]
        slower_D = np.maximum(lost_D, SLIGHT) >= SURE * self.cost.doubts(count, rows_TD[0], depths_TD[0])
        prices_D = lost_D + 2 * self.cost.switching + looking / seconds_TD[place, depth]
        prices_D[: 1 if depth else None] += self.cost.catching_up
        chosen = Chosen(count, depth, float(least_T[place]), int(rows_TD[place, depth]), prices_D, slower_D)
        return chosen, float(rate_TD[place, depth] / rate_TD[0, 0])

    def best_beside(self, readers: Readers, context: int, joining: int) -> Chosen:
        """The choice with the most tokens beyond those that its seconds are worth, if so many others are to join these
        requests. They are taken to be like these."""
        count = len(readers.places_R)
        least_T, rows_TD, tokens_TD, depths_TD = self._choices(readers, hoped=False)
        times = 1 + joining / count
        seconds_TD = self._seconds(count + joining, times * rows_TD, depths_TD, int(times * context))
        worth_of_second = float((times * tokens_TD / seconds_TD).max())
        # A step with prompts is not padded.
        gained_TD = tokens_TD - worth_of_second * self.cost.seconds(count, rows_TD, depths_TD, context)
        place, depth = divmod(int(gained_TD.argmax()), gained_TD.shape[1])
        return Chosen(count, depth, float(least_T[place]))

    def trimmed(self, requests: Sequence[Request], depths: list[int], most: int) -> list[int]:
        """These depths, without the least likely levels that do not fit into `most` rows, if steps are padded: requests
        may have come since those were chosen."""
        if self.stairs is None or (rows := decoded_rows(requests, depths)) <= most:
            return depths
        deepest = max(depths)
        room = self.stairs.down(len(requests), most, deepest)
        if room is None or rows > self.stairs.of(len(requests), deepest)[-1]:
            return depths
        readers, depths_R = self.acceptance.read(requests), np.array(depths)
        about = readers.known.requests_P, readers.known.rows_PD, readers.places_R, readers.weights_R
        trim(*about, self.acceptance.chances(readers, deepest), depths_R, rows - room)
        fitting: list[int] = depths_R.tolist()
        return fitting

    def tokens(self, readers: Readers, depths_R: np.ndarray) -> float:
        """Expected of a step with drafts of these depths."""
        if not depths_R.any():
            return float(len(depths_R))
        chances_RD = self.acceptance.chances(readers, int(depths_R.max()))
        drafted_RD = np.arange(chances_RD.shape[1]) < depths_R[:, None]
        return len(depths_R) + float(chances_RD[drafted_RD].sum())

    def padded(self, step: StepShape) -> StepShape:
        """The step, which only decodes, with the rows that it is padded to."""
        if self.stairs is None or not step.depth:
            return step
        return replace(step, rows=self.stairs.up(step.requests, step.rows, step.depth))

    def _choices(self, readers: Readers, *, hoped: bool = True) -> tuple[np.ndarray, ...]:
        """[T] least chances to consider, and with each, to each depth, [T, D + 1] a step's rows, weighted tokens and
        depth. hoped: as in `Acceptance.chances`."""
        known = readers.known
        deepest = deepest_of(known.requests_P, readers.places_R)
        chances_RD = self.acceptance.chances(readers, deepest, hoped=hoped)
        about = known.requests_P, known.rows_PD, readers.places_R, readers.weights_R
        least_T = self._thresholds(worth(*about, chances_RD), len(readers.places_R), deepest)
        return least_T, *choices(*about, chances_RD, least_T)

    def _seconds(self, requests: int, rows_TD: np.ndarray, depths_TD: np.ndarray, context: int) -> np.ndarray:
        """Of steps that only decode, whose rows may be padded. Changes rows_TD to what they are padded to."""
        if self.stairs is not None:
            pad(rows_TD, depths_TD, self.stairs.table(requests, rows_TD.shape[1] - 1))
        return self.cost.seconds(requests, rows_TD, depths_TD, context)

    def _thresholds(self, chances: np.ndarray, count: int, deepest: int) -> np.ndarray:
        """[T] least chances to consider, ascending: of the rows up to a stair all cost the same, so those that fill one
        too. chances: weighted, of all levels that may be drafted, in any order."""
        if self.stairs is None:
            return LEAST
        ordered = np.sort(chances)
        filled = self.stairs.fillings(count, deepest)
        return np.sort(np.concatenate((LEAST, ordered[len(ordered) - filled[filled < len(ordered)]])))
