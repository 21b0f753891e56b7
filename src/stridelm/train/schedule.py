"""A run's progress, and the learning rate at it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


def rate(progress: float, warmup: float, decay: float) -> float:
    """Warm-up, stable, decay: the factor on every peak learning rate at `progress` in 0..1 (Hu et al. 2024,
    arXiv 2404.06395, section 4; a linear decay to zero)."""
    if progress < warmup:
        return max(progress, 0.0) / warmup
    if progress > 1 - decay:
        return max(0.0, (1 - progress) / decay)
    return 1.0


@dataclass
class Clock:
    """Progress by steps or by seconds, whichever limits the run.

    `skipped` is the share of the stable phase that was skipped because validation had stopped improving.
    """

    steps: int | None
    seconds: float | None
    decay: float
    step: int = 0
    elapsed: float = 0.0
    skipped: float = field(default=0.0)

    @property
    def progress(self) -> float:
        if self.steps is not None:
            spent = self.step / max(1, self.steps)
        else:
            assert self.seconds is not None
            spent = self.elapsed / max(1e-9, self.seconds)
        return min(1.0, spent + self.skipped)

    @property
    def done(self) -> bool:
        return self.progress >= 1.0

    @property
    def decaying(self) -> bool:
        return self.progress >= 1 - self.decay

    def begin_decay(self) -> None:
        """Skip the rest of the stable phase."""
        self.skipped += max(0.0, (1 - self.decay) - self.progress)

    def remaining_seconds(self) -> float:
        """Estimated time to the end at the current speed."""
        if self.seconds is not None:
            return (1 - self.progress) * self.seconds
        assert self.steps is not None
        return (1 - self.progress) * self.steps * self.elapsed / max(1, self.step)

    def state(self) -> dict[str, Any]:
        """What a checkpoint stores: counters only, so that a resumed run may have another limit."""
        return {key: asdict(self)[key] for key in ("step", "elapsed", "skipped")}

    def restore(self, state: dict[str, Any]) -> None:
        self.step, self.elapsed, self.skipped = state["step"], state["elapsed"], state["skipped"]
