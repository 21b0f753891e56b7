"""How long a step takes that only decodes: by its requests, their rows, the depth of its deepest draft, and the tokens
that attention reads.

Steps are alike that have about as many requests and rows, and the same depth. What like steps took is remembered, and
what they take after more tokens is that and the tokens' own time, whose price is learnt from how the time of like steps
changes with them. A step unlike any before is predicted by a function of the rest, whose coefficients are fitted online
(least squares, older steps counting less). The function knows how time grows; like steps know the stairs, which come
from captured sizes, tiles and caches, and a mixture whose first rows are the dearest. They are remembered as times and
not as ratios to the function, since that goes on changing while they are not seen.

Times are those of a machine at its usual speed: what slows all steps down for a while, such as other work on the
machine, is told apart from what makes one kind of them slower, so that depths remain comparable. A step that comes
after one of another depth, or after one with prompts, may take longer, since caches hold what the other one needed. By
how much is learnt from the step after it, and left out of what its kind takes: otherwise depths that are only tried now
and then would look dear. Prompts leave less in the caches than decodes do, and a step that drafts needs more of what
is there, so each is learnt apart.

The loops are compiled, since they run between steps.

Legend: N steps, F features.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

import math

import numpy as np

from stridelm.compiled import njit
from stridelm.schedule.counts import class_of
from stridelm.schedule.step_shape import StepShape

MEMORY = 0.995
"""Weight of a step relative to the next one's in the fit."""
FASTER, APART = 0.01, 0.0006
"""By how much the doubt about the machine's speed, and about what steps of one kind take relative to it, grows with
each step: as shares of the variance of one step's time."""
FEW = 2.0
"""Like steps count for all once there are more than this."""
SURE = 9.0
"""A price counts for nothing if its standard deviation is more than a third of it."""
NARROW = 256.0**2
"""What the price is learnt from counts for less if the squares of the tokens' differences sum up to less than this:
times of like steps change by chance, and with few tokens of difference each would seem to take long."""
MOST = 10.0
"""Like steps that are counted."""
OUTLIER = 3.0
"""A step that took more than this multiple of what was expected counts as that multiple: something else delayed it."""
LATE = 1.25
"""The same, and for one that took less, too, where what like steps take is known: one delay must not make a depth look
dear for as long as it is not tried again, and depths that are tried often must not look cheap because only their delays
are left out. If such steps do take longer now, a few of them tell."""
KNOWN, SEEN = 0.25, 0.7
"""It is known if the doubt is less than this, as it is after some six of them; after two it is less than that."""
FAR, UNKNOWN = 3.0, 100.0
"""Where little is known, nothing but a delay makes a step much longer than the one or two before, and of one that is
much shorter those before were delayed: it counts alone. Much is this many standard deviations of one step's time, and
LATE at least. UNKNOWN: doubt after which one step tells all."""
LAZY = 64
"""Steps that are taken into the fit at once, at most."""
RIDGE, OF_REQUESTS = 1e-6, 3e-3
"""What holds coefficients down, and more so that of requests: where only one number of them was seen, what they take is
taken to be the step's own."""
USUAL, STEP_MEMORY = 0.05**2, 0.99
"""What that variance is taken to be at first, and the weight of a step relative to the next one's in it."""
AFTER_DECODES, AFTER_PROMPTS = 1, 2
"""What a step comes after, if after one of another kind."""
SWITCH_MEMORY = 0.97
"""Weight of a step that came after one of another kind, relative to the next such one, in what that adds."""
TOLD = 3
"""Steps after one of another kind before it is known how much longer they take for that."""
SWEEPS = 100
"""Over the coefficients, at each fit; each fit starts from the last one."""
FEATURES = 6
STAIRS = (40, 64, 17)
"""Classes of requests, of rows and of depths that are told apart."""
ALIKE = np.dtype([(name, np.float64) for name in ("count", "seconds", "context", "doubt", "latest")])
"""Of steps that are alike. count: how many, at most MOST. seconds, context: means, the seconds at speed 1. doubt: about
these seconds, when the last of them was noted. latest: its number."""
MACHINE = np.dtype([(name, np.float64) for name in ("factor", "doubt", "steps", "switched", "after", "variance")])
"""Of the machine's speed. factor: by which steps take longer just now. doubt: about it. steps: how many were noted.
switched: logarithm of the factor by which the latest step took longer, if it came after one of another kind and its own
is known. after: what that one was. variance: of the logarithm of one step's time."""
SWITCH = np.dtype([(name, np.float64) for name in ("count", "longer")])
"""Of steps that come after one of another kind. count: how many told. longer: mean logarithm of the factor by which
they take longer."""


class DecodeTimes:
    """Times in seconds. Steps are predicted from their requests, rows, depth and context: the columns of steps_N4."""

    def __init__(self) -> None:
        self._moments_FF = np.zeros((FEATURES, FEATURES))
        self._target_F = np.zeros(FEATURES)
        self._weights_F = np.zeros(FEATURES)
        self._alike = np.zeros(STAIRS, dtype=ALIKE)
        self._machine = np.array([(1.0, 1.0, 0.0, np.nan, 0.0, USUAL)], dtype=MACHINE)
        self._switches = np.zeros((2, AFTER_PROMPTS + 1), dtype=SWITCH)
        """By whether such a step drafts, and what it comes after."""
        self._price = np.zeros((2, 4))
        """What the price of a token that is read is computed from, by whether a step drafts: how many steps, and sums
        over them of tokens times tokens, tokens times seconds and seconds times seconds, each as a difference to the
        mean of like steps."""
        self._noted: list[tuple[int, int, int, int, float, int]] = []
        """Steps that are not in the fit yet, and what each came after, if it was of another kind."""

    def __bool__(self) -> bool:
        """Whether any step has been noted."""
        return bool(self._noted or self._weights_F.any())

    @property
    def switching(self) -> float:
        """By what share a step takes longer that comes after one of another depth."""
        return math.expm1(self._switches["longer"][:, AFTER_DECODES].max())

    @property
    def knows_switching(self) -> bool:
        """Whether it is known by what share a plain step takes longer that comes after one that drafts."""
        return bool(self._switches["count"][0, AFTER_DECODES] >= TOLD)

    def note(self, step: StepShape, seconds: float, switched: int) -> None:
        """A step took this long. switched: what it came after, if that was of another kind; 0 if not."""
        self._noted.append((step.requests, step.rows, step.depth, step.context, seconds, switched))
        if len(self._noted) >= LAZY:
            self._learn()

    def of(self, steps_N4: np.ndarray) -> np.ndarray:
        """[N] predicted. Some step must have been noted."""
        self._learn()
        return _predicted(steps_N4, self._weights_F, self._alike, self._price, self._machine)

    def doubts(self, steps_N4: np.ndarray) -> np.ndarray:
        """[N] standard deviations of what is known of these, as shares of their times; without what is not known of
        the machine's speed, which they have in common."""
        self._learn()
        return _doubts(steps_N4, self._alike, self._machine)

    def _learn(self) -> None:
        """Take noted steps into the fit."""
        if self._noted:
            known = self._weights_F, self._alike, self._price, self._machine
            _learn(np.array(self._noted), self._moments_FF, self._target_F, *known, self._switches)
            self._noted.clear()


@njit()
def _place(step):
    """The same for steps that are alike."""
    requests, rows, depth = int(step[0]), int(step[1]), int(step[2])
    return min(class_of(requests), STAIRS[0] - 1), min(class_of(rows), STAIRS[1] - 1), min(depth, STAIRS[2] - 1)


@njit()
def _features(step):
    """What a step's time, but for the tokens read, is linear in: a step, its requests, its rows, whether it drafts, the
    levels that are drafted one after another, and those times the requests."""
    requests, rows, depth = step[0], step[1], step[2]
    return np.array([1.0, requests, rows, 1.0 if depth > 0 else 0.0, depth, depth * requests])


@njit()
def _each(price, depth):
    """Seconds of a token that is read by a step of this depth. A card reads it once for all rows, a processor once for
    each, so that it is dearer if the step drafts; but until such steps tell otherwise it is taken to be the same."""
    drafts = int(depth > 0)
    return _slope(price[drafts], _slope(price[1 - drafts], 0.0))


@njit()
def _slope(price, usual):
    """The regression's, between what is usual and itself: as far as the difference may be chance, it is not counted."""
    steps, squares, products, rest = price
    rest += usual * (usual * squares - 2.0 * products)
    products -= usual * squares
    if not products:
        return usual
    squares += NARROW
    more = products / squares
    doubt = max(0.0, rest - more * products) / (steps * squares)  # variance of the slope
    return max(0.0, usual + more * max(0.0, 1.0 - SURE * doubt / more**2))


@njit()
def _predicted(steps_N4, weights_F, alike, price, machine):
    seconds_N, speed = np.empty(len(steps_N4)), machine[0]
    plain, drafting = _each(price, 0), _each(price, 1)
    for n in range(len(steps_N4)):
        mean, each = alike[_place(steps_N4[n])], drafting if steps_N4[n, 2] > 0 else plain
        fitted = (_features(steps_N4[n]) * weights_F).sum() + each * steps_N4[n, 3]
        remembered = mean.seconds + each * (steps_N4[n, 3] - mean.context)
        share = mean.count**2 / (mean.count**2 + FEW)
        seconds_N[n] = max(1e-9, speed.factor * (fitted + share * (remembered - fitted)))
    return seconds_N


@njit()
def _doubt(mean, speed):
    """About the mean of a kind that was seen, as a share of the variance of one step's time: grown since."""
    return mean.doubt + APART * (speed.steps - mean.latest)


@njit()
def _doubts(steps_N4, alike, machine):
    doubts_N, speed = np.empty(len(steps_N4)), machine[0]
    for n in range(len(steps_N4)):
        mean = alike[_place(steps_N4[n])]
        doubts_N[n] = math.sqrt(speed.variance * (_doubt(mean, speed) if mean.count else 1.0))
    return doubts_N


@njit()
def _learn(steps_N6, moments_FF, target_F, weights_F, alike, price, machine, switches):
    """Take steps into the fit, the means of those that are like them, the price of tokens, and the machine's speed."""
    if weights_F.any():
        expected_N = _predicted(steps_N6[:, :4], weights_F, alike, price, machine)
        for n in range(len(steps_N6)):
            if alike[_place(steps_N6[n])].count:  # what is expected of others may be far off
                steps_N6[n, 4] = min(steps_N6[n, 4], OUTLIER * expected_N[n])
    for n in range(len(steps_N6)):
        context, seconds = steps_N6[n, 3], _remember(steps_N6[n], alike, price, machine[0], switches)
        # Relative errors count: each equation is divided by the step's time.
        rest = max(0.1 * seconds, seconds - _each(price, steps_N6[n, 2]) * context)
        features_F = _features(steps_N6[n]) / rest
        for f in range(FEATURES):
            target_F[f] = MEMORY * target_F[f] + features_F[f]
            for g in range(FEATURES):
                moments_FF[f, g] = MEMORY * moments_FF[f, g] + features_F[f] * features_F[g]
    _fit(moments_FF, target_F, weights_F)


@njit()
def _remember(step, alike, price, speed, switches):
    """Take a step into what like steps take, the price of tokens, and the machine's speed. Returns its seconds at
    speed 1, without what is taken to be a delay.

    By how much it took longer than was expected is shared between the speed and what its kind takes, as in a Kalman
    filter of their logarithms, whose doubts are taken to be independent of each other: a kind that was not seen for
    long is to blame itself, one that runs all the time is not.
    """
    context, after = step[3], int(step[5])
    mean, switch = alike[_place(step)], switches[int(step[2] > 0), after]
    speed.steps += 1.0
    speed.doubt += FASTER
    usual, speed.switched = speed.switched, np.nan  # of the step before
    if not mean.count:
        seconds = step[4] / speed.factor / math.exp(switch.longer)
        mean.count, mean.seconds, mean.context = 1.0, seconds, context
        mean.doubt, mean.latest = 1.0, speed.steps
        return seconds
    doubt = _doubt(mean, speed)
    more, each = context - mean.context, _each(price, step[2])
    expected = max(0.1 * mean.seconds, mean.seconds + each * more)
    longer = math.log(step[4] / (speed.factor * expected))
    if after:
        speed.switched, speed.after = longer, after
        longer -= switch.longer
    elif not math.isnan(usual):
        switch = switches[int(step[2] > 0), int(speed.after)]
        switch.count += 1.0
        more_so = min(max(usual - longer, -1.0), 1.0) - switch.longer
        switch.longer = max(0.0, switch.longer + more_so * max(1.0 - SWITCH_MEMORY, 1.0 / (1.0 + switch.count)))
        other = switches[int(step[2] <= 0), int(speed.after)]
        if not other.count:
            other.longer = switch.longer
    if doubt < KNOWN:
        speed.variance = STEP_MEMORY * speed.variance + (1.0 - STEP_MEMORY) * min(longer**2, 1.0)
        longer = min(max(longer, -math.log(LATE)), math.log(LATE))
    else:
        far = max(math.log(LATE), FAR * math.sqrt(speed.variance))
        if longer < -far:
            doubt = UNKNOWN
        elif doubt < SEEN:
            longer = min(longer, far)
    seconds = expected * math.exp(longer)
    told = price[int(step[2] > 0)]
    told[:] = MEMORY * told + np.array([1.0, more**2, more * (seconds - mean.seconds), (seconds - mean.seconds) ** 2])
    whole = 1.0 + doubt + speed.doubt
    speed.factor *= math.exp(speed.doubt / whole * longer)
    latest = doubt / whole
    mean.count = min(mean.count + 1.0, MOST)
    mean.seconds *= math.exp(latest * longer)
    mean.context += latest * more
    mean.seconds += latest * each * more
    speed.doubt -= speed.doubt**2 / whole
    mean.doubt, mean.latest = doubt - doubt**2 / whole, speed.steps
    return seconds


@njit()
def _fit(moments_FF, target_F, weights_F):
    """Least squares with weights that are not negative, by coordinate descent from the weights there are."""
    for _ in range(SWEEPS):
        for f in range(FEATURES):
            rest = target_F[f]
            for g in range(FEATURES):
                if g != f:
                    rest -= moments_FF[f, g] * weights_F[g]
            ridge = OF_REQUESTS if f == 1 else RIDGE
            weights_F[f] = max(0.0, rest / (moments_FF[f, f] * (1.0 + ridge) + 1e-30))
