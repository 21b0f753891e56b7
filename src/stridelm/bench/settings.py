"""The settings of benchmarks. The command line is generated from these fields."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from stridelm.values import option

JSON_HELP = "append this run to a file (.jsonl), as one line of JSON: settings, figures, and last the environment"
"""Help of --json, which every benchmark has."""


@dataclass(frozen=True)
class Workload:
    """Which drafters run, and which prompts they complete."""

    drafters: tuple[str, ...] = option(
        (),
        "comma-separated NAME[@DEPTH][+OPTION=VALUE...][:RULE[:NUMBER]], such as mtp@3+draft_topk=2 or mtp@auto; by "
        "default every drafter that the model can run",
    )
    depth: tuple[int, ...] = option((), "depths for entries without @DEPTH; by default each drafter's own")
    prompts: str | None = option(None, "file or directory of prompts; by default the shipped held-out Python")
    num_prompts: int | None = option(None, "use only the first N prompts")
    max_tokens: int = option(128, "maximum tokens of each completion")
    seed: int = option(0, "prompt i is sampled with this seed plus i")

    def __post_init__(self) -> None:
        for name in ("max_tokens", "num_prompts"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1; got {value}")


@dataclass(frozen=True)
class LatencySettings(Workload):
    """Settings of the latency benchmark."""

    batch: tuple[int, ...] = option((1,), "concurrent streams: when one request ends, the next begins")
    repeats: int = option(3, "runs of each kind, plain decoding and drafters in turn; the median is reported")
    num_prompts: int | None = option(8, "use only the first N prompts; none for all")
    temperature: float = option(0.0, "sampling temperature")
    ignore_eos: bool = option(True, "continue to max_tokens after an end of text, so that every run does the same work")
    prefix_cache: Literal["off", "cold"] = option("off", "off, or cold: enabled, and emptied before every run")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.batch or min(self.batch) < 1:
            raise ValueError(f"batch must name stream counts of at least 1; got {list(self.batch)}")
        if self.repeats < 1:
            raise ValueError(f"repeats must be at least 1; got {self.repeats}")


@dataclass(frozen=True)
class AcceptanceSettings(Workload):
    """Settings of the acceptance benchmark. Nothing is timed, so any number of streams gives the same figures."""

    temperature: tuple[float, ...] = option((0.0, 1.0), "sampling temperatures")
    batch: int = option(8, "concurrent streams")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.temperature or not all(math.isfinite(t) and t >= 0 for t in self.temperature):
            raise ValueError(f"temperature must name numbers of at least 0; got {list(self.temperature)}")
        if self.batch < 1:
            raise ValueError(f"batch must be at least 1; got {self.batch}")
