"""How long a step takes: by the requests that decode in it, their rows, the depth of its deepest draft, the tokens that
attention reads, and its prompt rows. Learnt from all steps that ran, and used by everybody who asks.

Of steps that only decode, those are alike that have about as many requests and rows, and the same depth. What like
steps took is remembered, and what they take after more tokens is that and the tokens' own time, whose price is learnt
from how the time of like steps changes with them. A step unlike any before is predicted by a function of the rest,
whose coefficients are fitted online (least squares, older steps counting less). The function knows how time grows; like
steps know the stairs, which come from captured sizes, tiles and caches, and a mixture whose first rows are the dearest.
They are remembered as times and not as ratios to the function, since that goes on changing while they are not seen.
Times are those of a machine at its usual speed: what slows all steps down for a while, such as other work on the
machine, is told apart from what makes one kind of them slower, so that depths remain comparable. A step that comes
after one of another depth, or after one with prompts, may take longer, since caches hold what the other one needed. By
how much is learnt from the step after it, and left out of what its kind takes: otherwise depths that are only tried now
and then would look dear.

Prompt rows have a price of their own: a step with them takes what its decodes would take alone, and a line over its
prompt rows, which is fitted to the last few steps that had any. They are kept as they were measured, so that the line
follows what decodes are known to take by now. As long as no step of decodes was measured, their rows count as prompt
rows.

A step in which drafters catch up with earlier ones says nothing of any other, but what that took.

The loops are compiled, since they run between steps.

Legend: N steps, F features, Q steps with prompt rows.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

import math
from collections import deque

import numba as nb
import numpy as np

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
KNOWN = 0.25
"""It is known if the doubt is less than this."""
LAZY = 64
"""Steps that are taken into the fit at once, at most."""
PROMPT_STEPS, PROMPT_MEMORY = 32, 0.95
"""Steps with prompt rows that are kept, and the weight of one relative to the next one's."""
FEW_PROMPTS = 4
"""Of them, before anything counts as an outlier."""
SPREAD = 0.1
"""Steps whose prompt rows deviate by less than this share of their mean say nothing of a base."""
CHEAPEST = 0.1
"""A prompt row takes at least this share of what rows take on average."""
RIDGE, OF_REQUESTS = 1e-6, 3e-3
"""What holds coefficients down, and more so that of requests: where only one number of them was seen, what they take is
taken to be the step's own."""
USUAL, STEP_MEMORY = 0.05**2, 0.99
"""What that variance is taken to be at first, and the weight of a step relative to the next one's in it."""
SWITCH_MEMORY = 0.97
"""Weight of a step that came after one of another kind, relative to the next such one, in what that adds."""
BEHIND_MEMORY, LONGEST = 0.9, 8.0
"""Weight of a step in which drafters caught up relative to the next such one, and most steps that this is taken to be
worth: something else may have delayed it."""
SWEEPS = 100
"""Over the coefficients, at each fit; each fit starts from the last one."""
FEATURES = 6
STAIRS = (40, 64, 17)
"""Classes of requests, of rows and of depths that are told apart."""
NEAR = 4
"""Stairs: a step tells of steps with up to twice or half as many requests."""
ALIKE = np.dtype([(name, np.float64) for name in ("count", "seconds", "context", "doubt", "latest")])
"""Of steps that are alike. count: how many, at most MOST. seconds, context: means, the seconds at speed 1. doubt: about
these seconds, when the last of them was noted. latest: its number."""
MACHINE = np.dtype([(name, np.float64) for name in ("factor", "doubt", "steps", "switching", "switched", "variance")])
"""Of the machine's speed. factor: by which steps take longer just now. doubt: about it. steps: how many were noted.
switching: logarithm of the factor by which those take longer that come after one of another kind. switched: of that by
which the latest step did, if it was such a one and of a known kind. variance: of the logarithm of one step's time."""


class StepCost:
    """Times in seconds. Not thread-safe."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all steps."""
        self._moments_FF = np.zeros((FEATURES, FEATURES))
        self._target_F = np.zeros(FEATURES)
        self._weights_F = np.zeros(FEATURES)
        self._alike = np.zeros(STAIRS, dtype=ALIKE)
        self._machine = np.array([(1.0, 1.0, 0.0, 0.0, np.nan, USUAL)], dtype=MACHINE)
        self._price = np.zeros(4)
        """What the price of a token that is read is computed from: how many steps, and sums over them of tokens times
        tokens, tokens times seconds and seconds times seconds, each as a difference to the mean of like steps."""
        self._noted: list[tuple[int, int, int, int, float, bool]] = []
        """Steps that are not in the fit yet, and whether each came after one of another kind."""
        self._latest: tuple[int, bool] | None = None
        """The latest step's depth, and whether it had prompt rows."""
        self._begun: dict[int, set[int]] = {}
        """Class of requests -> depths that a step had with about as many."""
        self._tried: dict[int, set[int]] = {}
        """The same for depths that were measured."""
        self._prompts: deque[tuple[int, int, int, int, int, float]] = deque(maxlen=PROMPT_STEPS)
        """The last steps with prompt rows."""
        self._behind = 1.0
        """Mean of what catching up took, in steps of as many requests that draft nothing."""
        self._line: tuple[float, float, float] | None = None
        """Seconds that any prompt rows add to a step, that each adds, and that each row of decodes takes if nothing is
        known of them. None: to be fitted."""

    def note(self, step: StepShape, seconds: float, tried: int | None = None) -> None:
        """A step took this long. tried: depth of the deepest draft whose depth was chosen, if any was.

        The first step that tries a depth, with about so many requests, says nothing: what it needs is loaded then.
        """
        if step.behind:
            self._caught_up(step, seconds)
            return
        kind = step.depth, step.prompt > 0
        switched, self._latest = self._latest not in (None, kind), kind
        if tried is not None and not _add(self._begun, step.requests, tried):
            return
        if step.prompt:
            if len(self._prompts) >= FEW_PROMPTS:
                seconds = min(seconds, OUTLIER * self.one(step))
            self._prompts.append((step.requests, step.rows, step.depth, step.context, step.prompt, seconds))
            self._line = None
        else:
            if not self.knows_decodes:
                self._line = None
            self._noted.append((step.requests, step.rows, step.depth, step.context, seconds, switched))
            if len(self._noted) >= LAZY:
                self._learn()
        if tried is not None:
            _add(self._tried, step.requests, tried)

    def untried(self, requests: int, deepest: int) -> int | None:
        """The largest depth that was not measured with about so many requests; None if each was."""
        tried = self._tried.get(_number(requests), ())
        return next((depth for depth in range(deepest, -1, -1) if depth not in tried), None)

    @property
    def knows_decodes(self) -> bool:
        """Whether any step without prompt rows has been noted."""
        return bool(self._noted or self._weights_F.any())

    @property
    def switching(self) -> float:
        """By what share a step takes longer that comes after one of another kind."""
        return math.expm1(self._machine[0]["switching"])

    @property
    def catching_up(self) -> float:
        """What it takes drafters to catch up with what they left to a later step, in steps that draft nothing."""
        return max(1.0, self._behind)

    @property
    def knows_prompts(self) -> bool:
        """Whether any step with prompt rows has been noted."""
        return bool(self._prompts)

    def one(self, step: StepShape) -> float:
        """Predicted time of a step. Some step of its kind must have been noted."""
        decodes = self._decodes(step)
        if not step.prompt:
            return decodes
        base, each, _ = self._fitted()
        return decodes + base + each * step.prompt

    def prompt_rows(self, beside: StepShape, seconds: float) -> int:
        """The most prompt rows with which a step with these decodes is expected to take at most this long."""
        base, each, _ = self._fitted()
        return max(0, int((seconds - self._decodes(beside) - base) / each))

    def seconds(self, requests: int, rows: np.ndarray, depths: np.ndarray, context: int) -> np.ndarray:
        """Predicted times of steps of so many requests after so many tokens, with these numbers of rows and depths:
        arrays of one shape. Some step without prompt rows must have been noted."""
        self._learn()
        steps = np.empty((rows.size, 4))
        steps[:, 0], steps[:, 1], steps[:, 2], steps[:, 3] = requests, rows.ravel(), depths.ravel(), context
        return _predicted(steps, *self._known).reshape(rows.shape)

    def doubts(self, requests: int, rows: np.ndarray, depths: np.ndarray) -> np.ndarray:
        """Standard deviations of what is known of such steps' times, as shares of these; without what is not known of
        the machine's speed, which they have in common."""
        self._learn()
        steps = np.zeros((len(rows), 4))
        steps[:, 0], steps[:, 1], steps[:, 2] = requests, rows, depths
        return _doubts(steps, self._alike, self._machine)

    def _caught_up(self, step: StepShape, seconds: float) -> None:
        if step.requests and self.knows_decodes and (self.knows_prompts or not step.prompt):
            plain = self._decodes(StepShape(step.requests, step.requests, 0, step.context))
            took = min(max(0.0, seconds - self.one(step)) / plain, LONGEST)
            self._behind += (1.0 - BEHIND_MEMORY) * (took - self._behind)

    def _decodes(self, step: StepShape) -> float:
        """Of the step without its prompt rows."""
        if not self.knows_decodes:
            return self._fitted()[2] * step.rows
        self._learn()
        steps = np.array([[step.requests, step.rows, step.depth, step.context]], dtype=np.float64)
        return float(_predicted(steps, *self._known)[0])

    @property
    def _known(self) -> tuple[np.ndarray, ...]:
        """Of steps that only decode."""
        return self._weights_F, self._alike, self._price, self._machine

    def _learn(self) -> None:
        """Take noted steps into the fit."""
        if self._noted:
            _learn(np.array(self._noted), self._moments_FF, self._target_F, *self._known)
            self._noted.clear()

    def _fitted(self) -> tuple[float, float, float]:
        if self._line is None:
            self._learn()
            steps_Q6 = np.array(self._prompts, dtype=np.float64)
            base, each = _fit_line(steps_Q6, *self._known)
            self._line = base, each, 0.0 if self.knows_decodes else each
        return self._line


def _add(depths: dict[int, set[int]], requests: int, depth: int) -> bool:
    """Note a depth for steps with about so many requests. Returns whether it was there before."""
    place = _number(requests)
    if depth in depths.get(place, ()):
        return True
    for near in range(place - NEAR, place + NEAR + 1):
        depths.setdefault(near, set()).add(depth)
    return False


@nb.njit(cache=True)
def stair(count):
    """The same for counts that are alike: exact up to 8, then quarters of powers of two."""
    if count <= 8:
        return count
    step = 1
    while 8 * step <= count:
        step *= 2
    return (count + step - 1) // step * step


def middle(count: int) -> float:
    """The mean of all counts that are like this one."""
    alike = 1 if count <= 8 else 1 << max(0, (count - 1).bit_length() - 3)
    return stair(count) - (alike - 1) / 2


@nb.njit(cache=True)
def _number(count):
    """Of a stair, from 0."""
    size, doubled = stair(count), 0
    while size >= 16:
        size, doubled = size // 2, doubled + 1
    return size if size <= 8 and not doubled else 8 + 4 * doubled + (size - 8) // 2


@nb.njit(cache=True)
def _place(step):
    """The same for steps that are alike."""
    requests, rows, depth = int(step[0]), int(step[1]), int(step[2])
    return min(_number(requests), STAIRS[0] - 1), min(_number(rows), STAIRS[1] - 1), min(depth, STAIRS[2] - 1)


@nb.njit(cache=True)
def _features(step):
    """What a step's time, but for the tokens read, is linear in: a step, its requests, its rows, whether it drafts, the
    levels that are drafted one after another, and those times the requests."""
    requests, rows, depth = step[0], step[1], step[2]
    return np.array([1.0, requests, rows, 1.0 if depth > 0 else 0.0, depth, depth * requests])


@nb.njit(cache=True)
def _each(price):
    """Seconds of a token that is read: the regression's slope, less as far as it may be chance."""
    steps, squares, products, rest = price
    if products <= 0.0:
        return 0.0
    squares += NARROW
    slope = products / squares
    doubt = max(0.0, rest - slope * products) / (steps * squares)  # variance of the slope
    return slope * max(0.0, 1.0 - SURE * doubt / slope**2)


@nb.njit(cache=True)
def _predicted(steps_N4, weights_F, alike, price, machine):
    seconds_N, speed = np.empty(len(steps_N4)), machine[0]
    each = _each(price)
    for n in range(len(steps_N4)):
        mean = alike[_place(steps_N4[n])]
        fitted = (_features(steps_N4[n]) * weights_F).sum() + each * steps_N4[n, 3]
        remembered = mean.seconds + each * (steps_N4[n, 3] - mean.context)
        share = mean.count**2 / (mean.count**2 + FEW)
        seconds_N[n] = max(1e-9, speed.factor * (fitted + share * (remembered - fitted)))
    return seconds_N


@nb.njit(cache=True)
def _doubt(mean, speed):
    """About the mean of a kind that was seen, as a share of the variance of one step's time: grown since."""
    return mean.doubt + APART * (speed.steps - mean.latest)


@nb.njit(cache=True)
def _doubts(steps_N4, alike, machine):
    doubts_N, speed = np.empty(len(steps_N4)), machine[0]
    for n in range(len(steps_N4)):
        mean = alike[_place(steps_N4[n])]
        doubts_N[n] = math.sqrt(speed.variance * (_doubt(mean, speed) if mean.count else 1.0))
    return doubts_N


@nb.njit(cache=True)
def _learn(steps_N6, moments_FF, target_F, weights_F, alike, price, machine):
    """Take steps into the fit, the means of those that are like them, the price of tokens, and the machine's speed."""
    if weights_F.any():
        expected_N = _predicted(steps_N6[:, :4], weights_F, alike, price, machine)
        for n in range(len(steps_N6)):
            if alike[_place(steps_N6[n])].count:  # what is expected of others may be far off
                steps_N6[n, 4] = min(steps_N6[n, 4], OUTLIER * expected_N[n])
    for n in range(len(steps_N6)):
        context, seconds = steps_N6[n, 3], _remember(steps_N6[n], alike, price, machine[0])
        # Relative errors count: each equation is divided by the step's time.
        rest = max(0.1 * seconds, seconds - _each(price) * context)
        features_F = _features(steps_N6[n]) / rest
        for f in range(FEATURES):
            target_F[f] = MEMORY * target_F[f] + features_F[f]
            for g in range(FEATURES):
                moments_FF[f, g] = MEMORY * moments_FF[f, g] + features_F[f] * features_F[g]
    _fit(moments_FF, target_F, weights_F)


@nb.njit(cache=True)
def _remember(step, alike, price, speed):
    """Take a step into what like steps take, the price of tokens, and the machine's speed. Returns its seconds at
    speed 1, without what is taken to be a delay.

    By how much it took longer than was expected is shared between the speed and what its kind takes, as in a Kalman
    filter of their logarithms, whose doubts are taken to be independent of each other: a kind that was not seen for
    long is to blame itself, one that runs all the time is not.
    """
    context = step[3]
    mean = alike[_place(step)]
    speed.steps += 1.0
    speed.doubt += FASTER
    usual, speed.switched = speed.switched, np.nan  # of the step before
    if not mean.count:
        seconds = step[4] / speed.factor / (math.exp(speed.switching) if step[5] else 1.0)
        mean.count, mean.seconds, mean.context = 1.0, seconds, context
        mean.doubt, mean.latest = 1.0, speed.steps
        return seconds
    doubt = _doubt(mean, speed)
    more = context - mean.context
    expected = max(0.1 * mean.seconds, mean.seconds + _each(price) * more)
    longer = math.log(step[4] / (speed.factor * expected))
    if step[5]:
        speed.switched = longer
        longer -= speed.switching
    elif not math.isnan(usual):
        speed.switching = max(
            0.0, SWITCH_MEMORY * speed.switching + (1.0 - SWITCH_MEMORY) * min(max(usual - longer, -1.0), 1.0)
        )
    if doubt < KNOWN:
        speed.variance = STEP_MEMORY * speed.variance + (1.0 - STEP_MEMORY) * min(longer**2, 1.0)
        longer = min(max(longer, -math.log(LATE)), math.log(LATE))
    seconds = expected * math.exp(longer)
    price[:] = MEMORY * price + np.array([1.0, more**2, more * (seconds - mean.seconds), (seconds - mean.seconds) ** 2])
    whole = 1.0 + doubt + speed.doubt
    speed.factor *= math.exp(speed.doubt / whole * longer)
    latest = doubt / whole
    mean.count = min(mean.count + 1.0, MOST)
    mean.seconds *= math.exp(latest * longer)
    mean.context += latest * more
    mean.seconds += latest * _each(price) * more
    speed.doubt -= speed.doubt**2 / whole
    mean.doubt, mean.latest = doubt - doubt**2 / whole, speed.steps
    return seconds


@nb.njit(cache=True)
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


@nb.njit(cache=True)
def _fit_line(steps_Q6, weights_F, alike, price, machine):
    """(seconds that any prompt rows add to a step, seconds that each adds): least squares of relative errors, and
    neither below zero. steps_Q6: requests, rows, depth, context, prompt rows, seconds."""
    known = weights_F.any()
    decodes_Q = (
        _predicted(steps_Q6[:, :4].copy(), weights_F, alike, price, machine) if known else np.zeros(len(steps_Q6))
    )
    total, x, y, xx, xy, rows, took = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    for q in range(len(steps_Q6)):
        prompt, seconds = steps_Q6[q, 4], steps_Q6[q, 5]
        more = prompt if known else prompt + steps_Q6[q, 1]
        weight = PROMPT_MEMORY ** (len(steps_Q6) - 1 - q) / seconds**2
        longer = seconds - decodes_Q[q]
        total, x, y = total + weight, x + weight * more, y + weight * longer
        xx, xy = xx + weight * more * more, xy + weight * more * longer
        rows, took = rows + weight * (prompt + steps_Q6[q, 1]), took + weight * seconds
    x, y, xx, xy = x / total, y / total, xx / total, xy / total
    cheapest = CHEAPEST * took / rows
    spread = xx - x * x
    each = (xy - x * y) / spread if spread > (SPREAD * x) ** 2 else 0.0
    base = y - each * x
    if each < cheapest or base < 0.0:  # all that they add is taken to be the rows' own
        return 0.0, max(cheapest, xy / xx)
    return base, each
