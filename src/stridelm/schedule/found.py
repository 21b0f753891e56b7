"""Depths of drafts that are looked up before a step is planned (`Drafter.found`).

There what was found tells most of what it is worth: after a match of eight tokens nearly every guess is accepted, after
one of two every second. So the chance of each level to be reached and accepted is learnt for each drafter and class of
evidence, over all requests. A request for which nothing was found has no rows, and its step takes no longer than plain
decoding's.

Rows are drafted as long as they bring more than the tokens that their time would bring otherwise: their price. With t
the time of R requests' plain step, p what a row adds to it, and, per request and step, n rows drafted and a accepted,

    rate = R (1 + a) / (t + p R n), at least R / t,  price of a row = p rate

With these prices tokens over time are the most (Dinkelbach 1967): they grow with the rate that they bring about. What
takes which time the cost table says (schedule/step_cost.py). Of many requests any number of rows come together, and p
is a mean; one alone has the rows of its own draft, so there each depth has the price of its steps.

Limits follow from price and chances, and stand for some steps. A level that is too dear is not learnt about, nor what
steps of another depth take, so now and then a step ignores the limits, up to one depth after another.

A step with a few draft rows takes longer than its rows say: it is of another kind. So what a step would draft is left
out if all of it together brings less than the additional time would bring otherwise. Looking takes time, too, which no
kind of step shows: where drafts have hardly brought more than that, nobody looks for a while, unless all requests are
others by then, or more or fewer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np

from stridelm.schedule.counts import middle
from stridelm.schedule.depth_figures import Choice, DepthFigures, Pick
from stridelm.schedule.probes import are_about_as_many
from stridelm.schedule.rows import decoded_rows, first_row
from stridelm.schedule.step_cost import StepCost
from stridelm.schedule.step_shape import StepShape, shape_of
from stridelm.schedule.urgency import keep_pace, weight
from stridelm.types import Found, Request, Span

PAUSE = 32
"""Steps for which limits stand."""
SOON, PROBE, SELDOM = 8, 64, 512
"""Steps after which one ignores the limits: SOON if the last such step had more accepted than was expected; otherwise
PROBE if it changed them, and twice as many each time that they stay as they are, up to SELDOM."""
LONG, RARELY = 64, 4
"""Once nothing was found before so many steps, drafters look before every RARELY-th."""
MORE = 1.0
"""Levels that are more than expected."""
MEMORY = 200.0
"""Most checks of a level that are remembered: texts change."""
FIRST, WORTH = 2 / 3, 2.0
"""What a first level's chance is taken to be before any check, and a later one's that of the level before it; and for
how many checks this counts."""
HOPE = 0.5
"""Standard deviations by which what is little known is hoped to be better."""
OLD = 288.0
"""What the means of earlier steps count for beside the latest, in requests of a step."""
LITTLE, ENOUGH = 0.03, 256
"""Tokens that drafts bring beyond the price of their steps, per request and step: with fewer it is not worth looking
for them. And over how many requests, counted in every step, that is judged at least."""
FEW_ROWS = 4.0
"""Draft rows of a step that drafts, before there was one."""

Evidence = tuple[str | None, int]
"""A drafter, and what it says of what it found."""


@dataclass
class Levels:
    """Drafts of one class of evidence."""

    right: list[float] = field(default_factory=list)
    """Of each level, how often it was accepted, older ones counting less."""
    checks: list[float] = field(default_factory=list)
    """And how often it was checked: all before it were accepted."""

    def learn(self, depth: int, accepted: int) -> None:
        """Of `depth` levels the first `accepted` were accepted."""
        missing = depth - len(self.right)
        self.right += [0.0] * missing
        self.checks += [0.0] * missing
        for level in range(min(accepted + 1, depth)):
            kept = min(1.0, MEMORY / (self.checks[level] + 1.0))
            self.right[level] = kept * (self.right[level] + (level < accepted))
            self.checks[level] = kept * (self.checks[level] + 1.0)

    def chances(self, depth: int, hope: float = HOPE) -> list[float]:
        """Of each level to be reached and accepted. Falls from level to level."""
        found, chance, mean = [], 1.0, FIRST
        for level in range(depth):
            seen = level < len(self.right)
            checks = (self.checks[level] if seen else 0.0) + WORTH
            mean = ((self.right[level] if seen else 0.0) + WORTH * mean) / checks
            chance *= min(1.0, mean + hope * (mean * (1.0 - mean) / checks) ** 0.5)
            found.append(chance)
        return found


class FoundDrafts:
    """Chooses depths of requests whose drafters have looked, and of those beside them that draft nothing. It asks the
    host for as little as it can: a plain step takes a millisecond where this is used."""

    def __init__(self, cost: StepCost, figures: DepthFigures) -> None:
        """cost: what steps take; those that land are noted there. figures: to be counted in."""
        self.cost, self.figures = cost, figures
        self._levels: dict[Evidence, Levels] = {}
        self._limits: dict[Evidence, int] = {}
        """Most levels that are worth their rows. Evidence that is not here is new."""
        self._prices = [0.0]
        """Of a draft of 0, 1, .. levels, in tokens."""
        self._worth: dict[Evidence, list[float]] = {}
        """Tokens that 0, 1, .. levels are expected to bring."""
        self._charges: list[float] = []
        """Tokens that the time of 0, 1, .. draft rows of a step would bring otherwise."""
        self._charged = 0
        """For how many requests these are."""
        self._landed: list[tuple[Sequence[Span], list[Found | None], Sequence[int], float]] = []
        """Steps that were not looked at yet: what was found for each span, its accepted levels, and seconds."""
        self._accepted = self._drafted = 0.0
        """Mean per request and step."""
        self._rows, self._depth = FEW_ROWS, 1.0
        """Mean of steps that drafted."""
        self._unprobed, self._interval = 0, PROBE
        """Steps since limits were ignored, and after how many they are."""
        self._probed = 0
        """How often they were."""
        self._steps = self._empty = 0
        """Steps that have landed, and the last of those before which drafters had looked and found nothing."""
        self._until, self._rest = 0, PROBE
        """How many steps have to have landed before anybody looks again, and for how many nobody will the next time."""
        self._resting: set[Request] = set()
        """Those for whom nobody looks until then."""
        self._brought = self._looked = 0.0
        """Tokens beyond the price of their steps, and requests of steps, since that was judged."""
        self._rested = self._has_fixed = False
        """Of the latest plan: whether nobody had looked, and whether any request has a depth of its own."""

    @staticmethod
    def serves(requests: Sequence[Request]) -> bool:
        """Whether these are such requests."""
        of_found = all(request.looks_ahead or len(request.rows_by_depth) == 1 for request in requests)
        return of_found and any(request.looks_ahead for request in requests)

    @property
    def rests(self) -> bool:
        """Whether nobody need look: whatever may be found is not worth its rows, and it is no time to try; or it was
        hardly worth looking; or nothing was found for long, and it is tried every few steps."""
        if self._has_fixed:
            return False
        if self._steps < self._until:
            return True
        if self._empty >= LONG and self._steps % RARELY:
            return True
        return bool(self._limits) and not self._probes and not any(self._limits.values())

    def depths(self, requests: Sequence[Request], *, further: bool = False) -> list[int]:
        """further: a plan has asked for others before."""
        if not further:
            self._rested, self._has_fixed = self.rests, False
        self._has_fixed |= any(not request.adaptive and len(request.rows_by_depth) > 1 for request in requests)
        return self._depths(requests)

    def _depths(self, requests: Sequence[Request]) -> list[int]:
        if self._rested:
            return [0 if request.adaptive else len(request.rows_by_depth) - 1 for request in requests]
        weights = _weights(requests)
        depths = [self._depth_of(request, each) for request, each in zip(requests, weights, strict=True)]
        if self._has_fixed or min(weights) < 1.0 or not self._loses(requests, depths):
            return depths
        # Where nobody has looked there is room for what may be found.
        return [depth if request.found is None else 0 for request, depth in zip(requests, depths, strict=True)]

    def _loses(self, requests: Sequence[Request], depths: Sequence[int]) -> bool:
        """Whether all that was found and is to be drafted brings less than its step costs."""
        if self._probes or not self._knows_charges(len(requests)):
            return False
        worth, rows = 0.0, 0
        for request, depth in zip(requests, depths, strict=True):
            if depth and request.found is not None:
                known = self._worth.get(_evidence(request, request.found))
                if known is None:  # it is tried
                    return False
                worth, rows = worth + known[min(depth, len(known) - 1)], rows + depth
        return worth < self._charge(rows)

    def _knows_charges(self, requests: int) -> bool:
        return bool(self._charges) and are_about_as_many(requests, self._charged)

    def _charge(self, rows: int) -> float:
        return self._charges[min(rows, len(self._charges) - 1)]

    def landed(self, spans: Sequence[Span], accepted: Sequence[int], seconds: float) -> None:
        found = [None if self._rested else span.request.found for span in spans]
        self._steps += 1
        if self._steps < self._until and not self._are_resting(spans):
            self._until, self._rest, self._resting = 0, PROBE, set()
        if not self._rested:
            self._empty = 0 if any(each is not None and each.levels for each in found) else self._empty + 1
        self._landed.append((spans, found, accepted, seconds))
        if self._probes and any(span.depth for span in spans):
            more = sum(accepted) > self._expected(spans, found) + MORE
            limits = dict(self._limits)
            self.settle()
            self._probed, self._unprobed = self._probed + 1, 0
            seldomer = PROBE if limits != self._limits else min(max(PROBE, 2 * self._interval), SELDOM)
            self._interval = SOON if more else seldomer
        else:
            self._unprobed += 1
            if len(self._landed) >= PAUSE:
                self.settle()

    def _are_resting(self, spans: Sequence[Span]) -> bool:
        """Whether these are about as many as those for whom nobody looks, and some of them."""
        same = are_about_as_many(len(spans), len(self._resting))
        return same and any(span.request in self._resting for span in spans)

    def settle(self) -> None:
        """Look at all steps that have landed, and set limits anew."""
        if not self._landed:
            return
        self._compare()
        requests = accepted = drafted = drafting = asked = depths = 0
        latest: StepShape | None = None
        for spans, found, levels, seconds in self._landed:
            rows, before = 0, accepted
            for span, of_span, right in zip(spans, found, levels, strict=True):
                if span.depth and of_span is not None:
                    self._levels.setdefault(_evidence(span.request, of_span), Levels()).learn(span.depth, right)
                    rows, accepted = rows + span.depth, accepted + right
            shape = shape_of(spans)
            latest = shape if shape.requests else latest
            if self._knows_charges(len(spans)) and not shape.prompt and any(each is not None for each in found):
                self._looked += len(spans)
                self._brought += accepted - before - self._charge(rows)
            self.cost.note(shape, seconds, None if shape.prompt else shape.depth)
            _keep_paces(spans, levels, seconds)
            requests, drafted = requests + sum(span.decides for span in spans), drafted + rows
            drafting, depths = drafting + bool(rows), depths + shape.depth
            asked += len(spans) if rows else 0
            chosen = [span.depth for span in spans if span.decides and span.request.adaptive]
            often = np.bincount(np.array(chosen, dtype=np.int64)).tolist()
            self.figures.count(often, rows, sum(each.levels for each in found if each is not None))
        if self._looked >= ENOUGH:
            self._judge()
        self._landed.clear()
        share = requests / (requests + OLD)
        self._accepted += share * (accepted / max(1, requests) - self._accepted)
        self._drafted += share * (drafted / max(1, requests) - self._drafted)
        if drafting:
            share = asked / (asked + OLD)
            self._rows += share * (drafted / drafting - self._rows)
            self._depth += share * (depths / drafting - self._depth)
        if latest is not None and self.cost.knows_decodes:
            self._set_limits(latest)

    def _judge(self) -> None:
        """Whether to go on looking."""
        if self._brought >= LITTLE * self._looked or self._empty >= LONG:  # then it is done every few steps
            self._rest = PROBE
        else:
            spans = self._landed[-1][0]
            self._until, self._resting = self._steps + self._rest, {span.request for span in spans}
            self._rest = min(2 * self._rest, SELDOM)
        self._brought = self._looked = 0.0

    def explain(self, requests: Sequence[Request], prompt: int) -> Choice:
        depths, context = self._depths(requests), sum(map(first_row, requests))
        step = StepShape(len(requests), decoded_rows(requests, depths), max(depths), context, prompt)
        known = self.cost.knows_prompts if prompt else self.cost.knows_decodes
        each = self._prices[-1] / max(1, len(self._prices) - 1)
        drafts = any(depth for request, depth in zip(requests, depths, strict=True) if request.found is not None)
        picks = []
        for request, depth, counts_for in zip(requests, depths, _weights(requests), strict=True):
            most = None if depth or drafts else 0
            probes = self._probes and not self._rested
            picks.append(Pick(depth, probes, most, each / counts_for, self._chances_of(request)))
        return Choice(picks, self.cost.one(step) if known else None)

    @property
    def _probes(self) -> bool:
        """Whether the next step ignores the limits."""
        return self._unprobed >= self._interval

    def _depth_of(self, request: Request, weight: float) -> int:
        levels, found = len(request.rows_by_depth) - 1, request.found
        if found is None or not request.adaptive:
            return levels
        if not found.levels:
            return 0
        if self._probes:  # the deepest first
            return min(found.levels, levels - self._probed % levels)
        if weight < 1.0:
            return self._limit(self._chances_of(request)[: found.levels], weight)
        return min(found.levels, self._limits.get(_evidence(request, found), levels))

    def _chances_of(self, request: Request) -> list[float]:
        found = Found(0, 0) if request.found is None else request.found
        return self._known(request, found).chances(len(request.rows_by_depth) - 1)

    def _known(self, request: Request, found: Found) -> Levels:
        return self._levels.get(_evidence(request, found), Levels())

    def _compare(self) -> None:
        """What was predicted of the first of these steps that only decoded, with what came of it."""
        for spans, found, levels, seconds in self._landed:
            shape = shape_of(spans)
            if shape.prompt or shape.behind or not self.cost.knows_decodes:
                continue
            expected = len(spans) + self._expected(spans, found)
            self.figures.compare((self.cost.one(shape), seconds), (expected, len(spans) + sum(levels)))
            return

    def _expected(self, spans: Sequence[Span], found: Sequence[Found | None]) -> float:
        """Levels of these drafts to be accepted."""
        expected = 0.0
        for span, of_span in zip(spans, found, strict=True):
            if span.depth and of_span is not None:
                expected += sum(self._known(span.request, of_span).chances(span.depth, hope=0.0))
        return expected

    def _set_limits(self, like: StepShape) -> None:
        """By what steps take, for about as many requests as decoded in this one."""
        count, deepest = like.requests, max([len(levels.right) for levels in self._levels.values()], default=1)
        some = max(1.0, middle(count + round(self._rows)) - count)  # what is known is the mean of steps that are alike
        rows = np.array([0, some, *range(1, deepest + 1)])
        depths = np.array([0, round(self._depth), *range(1, deepest + 1)])
        plain, drafting, *alone = self.cost.seconds(count, count + rows, depths, like.context).tolist()
        each = max(0.0, drafting - plain) / some
        whole = plain + each * count * self._drafted
        rate = max(count / plain, count * (1.0 + self._accepted) / whole)
        seconds = [each * depth for depth in range(deepest + 1)] if count > 1 else [0.0, *(s - plain for s in alone)]
        self._prices = [rate * each for each in seconds]
        self.figures.gain = (1.0 + self._accepted) * plain / whole
        for evidence, levels in self._levels.items():
            chances = levels.chances(len(levels.right))
            self._limits[evidence], self._worth[evidence] = self._limit(chances), list(accumulate(chances, initial=0.0))
        self._charges, self._charged = self._prices, count
        if count > 1:
            drafts = np.arange(count * deepest + 1)
            depths = np.where(drafts, round(self._depth), 0)
            self._charges = (rate * (self.cost.seconds(count, count + drafts, depths, like.context) - plain)).tolist()

    def _limit(self, chances: Sequence[float], weight: float = 1.0) -> int:
        """How many of these levels bring the most tokens beyond their price. weight: what each counts for."""
        worth = [weight * right - price for right, price in zip(accumulate(chances, initial=0.0), self._prices)]
        return worth.index(max(worth))


def _evidence(request: Request, found: Found) -> Evidence:
    return request.speculation.drafter, found.evidence


def _keep_paces(spans: Sequence[Span], accepted: Sequence[int], seconds: float) -> None:
    for span, levels in zip(spans, accepted, strict=True):
        if span.decides and span.request.params.target_tps is not None:
            keep_pace(span.request, 1 + levels, seconds)


def _weights(requests: Sequence[Request]) -> list[float]:
    """What their tokens count for, 1 for those that count most."""
    if not any(request.priority or request.params.target_tps is not None for request in requests):
        return [1.0] * len(requests)
    found = list(map(weight, requests))
    return [each / max(found) for each in found]
