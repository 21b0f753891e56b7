"""How long a step of decoding takes, by requests, rows, the depth of its deepest draft and the tokens that attention
reads: learnt from steps that ran.

Steps are alike if they have about as many requests and rows, and the same depth. What like steps took is remembered,
and what they take after more tokens is that and the tokens' own time, whose price is learnt from how the time of like
steps changes with them. A step unlike any before is predicted by a function of the rest, whose coefficients are fitted
online (least squares, older steps counting less). The function knows how time grows; like steps know the stairs, which
come from captured sizes, tiles and caches, and a mixture whose first rows are the dearest. They are remembered as times
and not as ratios to the function, since that goes on changing while they are not seen.

The loops are compiled, since they run between steps.

Legend: N steps, F features.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

import numba as nb
import numpy as np

MEMORY = 0.995
"""Weight of a step relative to the next one's in the fit."""
LIKE = 0.2
"""Weight of the latest of the steps that are alike, in their mean."""
FEW = 2.0
"""Like steps count for all once there are more than this."""
SURE = 9.0
"""A price counts for nothing if its standard deviation is more than a third of it."""
MOST = 10.0
"""Like steps that are counted."""
OUTLIER = 3.0
"""A step that took more than this multiple of what was expected counts as that multiple: something else delayed it."""
RIDGE = 1e-6
SWEEPS = 100
"""Over the coefficients, at each fit; each fit starts from the last one."""
FEATURES = 5
STAIRS = (40, 64, 17)
"""Classes of requests, of rows and of depths that are told apart."""
NEAR = 4
"""Stairs: a step tells of steps with up to twice or half as many requests."""


class DecodeCost:
    """Times in seconds. Not thread-safe."""

    def __init__(self) -> None:
        self._moments_FF = np.zeros((FEATURES, FEATURES))
        self._target_F = np.zeros(FEATURES)
        self._weights_F = np.zeros(FEATURES)
        self._alike = np.zeros((*STAIRS, 3))
        """Of steps that are alike: how many, at most MOST; means of their seconds and of the tokens read."""
        self._price = np.zeros(4)
        """What the price of a token that is read is computed from: how many steps, and sums over them of tokens times
        tokens, tokens times seconds and seconds times seconds, each as a difference to the mean of like steps."""
        self._noted: list[tuple[int, int, int, int, float]] = []
        """Steps that are not in the fit yet."""
        self._tried: dict[int, set[int]] = {}
        """Class of requests -> depths tried with about as many."""

    def note(self, requests: int, rows: int, depth: int, context: int, seconds: float, tried: int) -> None:
        """A step of so many requests and rows, whose deepest draft had this depth, took this long. context: tokens
        before all of its requests' rows together. tried: depth of the deepest draft whose depth was chosen."""
        self._noted.append((requests, rows, depth, context, seconds))
        place = _number(requests)
        if tried not in self._tried.get(place, ()):
            for near in range(place - NEAR, place + NEAR + 1):
                self._tried.setdefault(near, set()).add(tried)

    def untried(self, requests: int, deepest: int) -> int | None:
        """The largest depth that was not tried with about so many requests; None if each was."""
        tried = self._tried.get(_number(requests), ())
        return next((depth for depth in range(deepest, -1, -1) if depth not in tried), None)

    @property
    def known(self) -> bool:
        """Whether any step has been noted."""
        return bool(self._noted or self._weights_F.any())

    def one(self, requests: int, rows: int, depth: int, context: int) -> float:
        """Predicted time of one step. Some step must have been noted."""
        return float(self.seconds(requests, np.array([rows]), np.array([depth]), context)[0])

    def seconds(self, requests: int, rows: np.ndarray, depths: np.ndarray, context: int) -> np.ndarray:
        """Predicted times of steps of so many requests after so many tokens, with these numbers of rows and depths:
        arrays of one shape. Some step must have been noted."""
        if self._noted:
            _learn(np.array(self._noted), self._moments_FF, self._target_F, self._weights_F, self._alike, self._price)
            self._noted.clear()
        steps = np.empty((rows.size, 4))
        steps[:, 0], steps[:, 1], steps[:, 2], steps[:, 3] = requests, rows.ravel(), depths.ravel(), context
        return _predicted(steps, self._weights_F, self._alike, self._price).reshape(rows.shape)


@nb.njit(cache=True)
def stair(count):
    """The same for counts that are alike: exact up to 8, then quarters of powers of two."""
    if count <= 8:
        return count
    step = 1
    while 8 * step <= count:
        step *= 2
    return (count + step - 1) // step * step


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
    """What a step's time, but for the tokens read, is linear in: a step, its rows, whether it drafts, the levels that
    are drafted one after another, and those times the requests."""
    requests, rows, depth = step[0], step[1], step[2]
    return np.array([1.0, rows, 1.0 if depth > 0 else 0.0, depth, depth * requests])


@nb.njit(cache=True)
def _each(price):
    """Seconds of a token that is read: the regression's slope, less as far as it may be chance."""
    steps, squares, products, rest = price
    if products <= 0.0:
        return 0.0
    slope = products / squares
    doubt = max(0.0, rest - slope * products) / (steps * squares)  # variance of the slope
    return slope * max(0.0, 1.0 - SURE * doubt / slope**2)


@nb.njit(cache=True)
def _predicted(steps_N4, weights_F, alike, price):
    seconds_N = np.empty(len(steps_N4))
    each = _each(price)
    for n in range(len(steps_N4)):
        count, seconds, context = alike[_place(steps_N4[n])]
        fitted = (_features(steps_N4[n]) * weights_F).sum() + each * steps_N4[n, 3]
        remembered = seconds + each * (steps_N4[n, 3] - context)
        share = count**2 / (count**2 + FEW)
        seconds_N[n] = max(1e-9, fitted + share * (remembered - fitted))
    return seconds_N


@nb.njit(cache=True)
def _learn(steps_N5, moments_FF, target_F, weights_F, alike, price):
    """Take steps into the fit, the means of those that are like them, and the price of tokens."""
    if weights_F.any():
        expected_N = _predicted(steps_N5, weights_F, alike, price)
        for n in range(len(steps_N5)):
            steps_N5[n, 4] = min(steps_N5[n, 4], OUTLIER * expected_N[n])
    for n in range(len(steps_N5)):
        context, seconds = steps_N5[n, 3], steps_N5[n, 4]
        mean = alike[_place(steps_N5[n])]
        if mean[0]:
            more = context - mean[2]
            longer = seconds - mean[1]
            price[:] = MEMORY * price + np.array([1.0, more * more, more * longer, longer * longer])
        mean[0] = min(mean[0] + 1.0, MOST)
        latest = max(LIKE, 1.0 / mean[0])
        mean[1] += latest * (seconds - mean[1])
        mean[2] += latest * (context - mean[2])
        # Relative errors count: each equation is divided by the step's time.
        rest = max(0.1 * seconds, seconds - _each(price) * context)
        features_F = _features(steps_N5[n]) / rest
        for f in range(FEATURES):
            target_F[f] = MEMORY * target_F[f] + features_F[f]
            for g in range(FEATURES):
                moments_FF[f, g] = MEMORY * moments_FF[f, g] + features_F[f] * features_F[g]
    _fit(moments_FF, target_F, weights_F)


@nb.njit(cache=True)
def _fit(moments_FF, target_F, weights_F):
    """Least squares with weights that are not negative, by coordinate descent from the weights there are."""
    for _ in range(SWEEPS):
        for f in range(FEATURES):
            rest = target_F[f]
            for g in range(FEATURES):
                if g != f:
                    rest -= moments_FF[f, g] * weights_F[g]
            weights_F[f] = max(0.0, rest / (moments_FF[f, f] * (1.0 + RIDGE) + 1e-30))
