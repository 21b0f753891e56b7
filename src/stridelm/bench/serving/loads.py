"""How requests arrive: a closed loop of streams, or a Poisson process."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Load:
    """Exactly one of the two. max_concurrency: streams, each of which sends its next request when its last has ended.
    request_rate: requests per second that arrive on average, whatever becomes of the others."""

    max_concurrency: int | None = None
    request_rate: float | None = None

    def __post_init__(self) -> None:
        if (self.max_concurrency is None) == (self.request_rate is None):
            raise ValueError("a load is either max_concurrency or request_rate; give one of the two")
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise ValueError(f"max_concurrency must be at least 1; got {self.max_concurrency}")
        if self.request_rate is not None and not 0 < self.request_rate < math.inf:
            raise ValueError(
                f"request_rate must be a number of requests per second above 0; got {self.request_rate}; for all at "
                "once, give max_concurrency as many streams as there are requests"
            )

    @property
    def name(self) -> str:
        if self.max_concurrency is None:
            return f"{self.request_rate:g} requests/s"
        return f"{self.max_concurrency} stream{'s' if self.max_concurrency > 1 else ''}"

    def arrivals(self, count: int, seed: int) -> list[float] | None:
        """When each of `count` requests arrives, in seconds after the first, which the seed fixes; None in a closed
        loop."""
        if self.request_rate is None:
            return None
        draw, now, times = random.Random(seed), 0.0, []
        for _ in range(count):
            times.append(now)
            now += draw.expovariate(self.request_rate)
        return times
