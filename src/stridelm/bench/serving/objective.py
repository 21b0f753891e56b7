"""Goodput counts the requests that meet an objective: limits of the times that one request takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from stridelm.bench.serving.record import Completion


@dataclass(frozen=True)
class Objective:
    """What a request must meet to count for goodput, in milliseconds; None: any time."""

    ttft: float | None = None
    tpot: float | None = None
    e2el: float | None = None

    @classmethod
    def of(cls, entries: Sequence[str]) -> Objective | None:
        """From NAME=MS; None if there is none. Raises ValueError for anything else."""
        limits: dict[str, float] = {}
        for entry in entries:
            name, _, text = entry.partition("=")
            if name == "itl":
                raise ValueError(f"slo {entry!r}: a request counts by ttft, tpot and e2el, as in vLLM; give tpot")
            try:
                limit = float(text)
            except ValueError:
                limit = math.nan
            if name not in cls.__dataclass_fields__ or name in limits or not 0 < limit < math.inf:
                raise ValueError(f"slo {entry!r} cannot be read; write ttft=MS,tpot=MS,e2el=MS, each at most once")
            limits[name] = limit
        return cls(**limits) if limits else None

    def met(self, completion: Completion) -> bool:
        """A request of one token meets any tpot, as in vLLM."""
        times = (completion.ttft, completion.tpot or 0.0, completion.latency)
        limits = (self.ttft, self.tpot, self.e2el)
        return all(limit is None or 1e3 * time <= limit for time, limit in zip(times, limits))
