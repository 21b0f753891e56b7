"""How long a step of decoding takes, by requests, rows and the depth of its deepest draft: learnt from steps that ran.

A step's time is predicted by a function whose coefficients are fitted online (least squares, older steps counting
less), times a correction for steps like it. The function knows how time grows; the corrections know the stairs, which
come from captured sizes, tiles and caches, and a mixture whose first rows are the dearest.
"""

from __future__ import annotations

import numpy as np

MEMORY = 0.995
"""Weight of a step relative to the next one's in the fit."""
LIKE = 0.2
"""Weight of the latest of the steps that are alike, in their correction."""
FEW = 2.0
"""A correction counts fully once it has seen more steps than this."""
OUTLIER = 3.0
"""A step that took more than this multiple of what was expected counts as that multiple: something else delayed it."""
RIDGE = 1e-6
FEATURES = 5


class DecodeCost:
    """Times in seconds. Not thread-safe."""

    def __init__(self) -> None:
        self._moments = np.zeros((FEATURES, FEATURES))
        self._target = np.zeros(FEATURES)
        self._weights = np.zeros(FEATURES)
        self._like: dict[tuple[int, int, int], tuple[float, float]] = {}
        """Steps that are alike -> (how many, at most 1 / LIKE; mean of measured over fitted)."""
        self._noted: list[tuple[int, int, int, float]] = []
        """Steps that are not in the fit yet."""

    def note(self, requests: int, rows: int, depth: int, seconds: float) -> None:
        """A step of so many requests and rows, whose deepest draft had this depth, took this long."""
        self._noted.append((requests, rows, depth, seconds))

    def _learn(self) -> None:
        """Take the noted steps into the fit."""
        requests, rows, depths, seconds = np.array(self._noted).T
        if self._like:
            fitted = self._predicted(requests, rows, depths)
            seconds = np.minimum(seconds, OUTLIER * fitted)
        # Relative errors count: each equation is divided by the step's time.
        features = _features(requests, rows, depths) / seconds[:, None]
        forgotten = MEMORY ** len(seconds)
        self._moments = forgotten * self._moments + features.T @ features
        self._target = forgotten * self._target + features.sum(0)
        self._fit()
        for key, ratio in zip(_keys(requests, rows, depths), (1.0 / (features @ self._weights)).tolist(), strict=True):
            count, mean = self._like.get(key, (0.0, 1.0))
            count = min(count + 1.0, 1.0 / LIKE)
            self._like[key] = count, mean + (ratio - mean) / count
        self._noted.clear()

    def seconds(self, requests: int, rows: np.ndarray, depths: np.ndarray) -> np.ndarray:
        """Predicted times of steps of so many requests, with these numbers of rows and depths: arrays of one shape.
        Some step must have been noted."""
        if self._noted:
            self._learn()
        flat = self._predicted(np.full(rows.size, requests), rows.ravel(), depths.ravel())
        return flat.reshape(rows.shape)

    def _predicted(self, requests: np.ndarray, rows: np.ndarray, depths: np.ndarray) -> np.ndarray:
        fitted = _features(requests, rows, depths) @ self._weights
        corrections = [_correction(self._like.get(key)) for key in _keys(requests, rows, depths)]
        return np.maximum(fitted * corrections, 1e-9)

    def _fit(self) -> None:
        """Least squares with weights that are not negative: a feature whose weight would be is left out."""
        used = list(range(FEATURES))
        self._weights = np.zeros(FEATURES)
        while used:
            moments = self._moments[np.ix_(used, used)]
            ridge = RIDGE * np.diag(np.diag(moments) + 1e-30)
            weights = np.linalg.solve(moments + ridge, self._target[used])
            if (weights >= 0).all():
                self._weights[used] = weights
                return
            used.pop(int(weights.argmin()))


def _features(requests: np.ndarray, rows: np.ndarray, depths: np.ndarray) -> np.ndarray:
    """What a step's time is linear in: a step, its rows, whether it drafts, the levels that are drafted one after
    another, and those times the requests."""
    return np.stack((np.ones(len(rows)), rows, depths > 0, depths, depths * requests), axis=1).astype(float)


def _keys(requests: np.ndarray, rows: np.ndarray, depths: np.ndarray) -> list[tuple[int, int, int]]:
    """Equal for steps that are alike."""
    return [(stair(int(r)), stair(int(n)), int(d)) for r, n, d in zip(requests, rows, depths, strict=True)]


def stair(count: int) -> int:
    """The same for counts that are alike: exact up to 8, then quarters of powers of two."""
    if count <= 8:
        return count
    step = 1 << (count.bit_length() - 3)
    return -(-count // step) * step


def _correction(like: tuple[float, float] | None) -> float:
    """What a prediction is multiplied by: closer to what was measured, the more steps there were."""
    if like is None:
        return 1.0
    count, mean = like
    return 1.0 + (mean - 1.0) * count / (count + FEW / count)
