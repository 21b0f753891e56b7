"""The settings of `stride bench serving`, `sweep` and `compare`. The command line is generated from these fields."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from stridelm.bench.serving.loads import Load
from stridelm.bench.serving.objective import Objective
from stridelm.bench.serving.scenarios import SCENARIOS, scenario_of
from stridelm.values import option

REPORT_HELP = "write a report into this file: .md, with its charts beside it, or .html, a single page"
SLO_HELP = "milliseconds that a request must meet for goodput: ttft=200,tpot=50,e2el=5000"
WARM_UPS = 8
"""Before a load with arrivals."""
DRAFTER_HELP = "NAME[@DEPTH][+OPTION=VALUE...][:RULE[:NUMBER]], such as ngram@4 or mtp@auto"


@dataclass(frozen=True)
class Requests:
    """What all three share: the requests, their number and order, and the state of the caches."""

    num_prompts: int = option(16, "requests of a run")
    num_warmups: int | None = option(
        None, "requests before the first run of each kind, which are dropped (default: as many as streams, or 8)"
    )
    repeats: int = option(3, "runs of each kind, in alternation with the one that it is compared with")
    max_tokens: int | None = option(None, "tokens of each output; by default the scenario's own")
    range_ratio: float = option(
        0.0,
        "share by which outputs are shorter or longer than that at most, so that not all end at once: below 1",
    )
    document_chars: int | None = option(None, "characters of a document, for long-document (default: 4000)")
    temperature: float = option(0.0, "sampling temperature")
    seed: int = option(0, "fixes the order of the requests and their arrivals; request i is sampled with it plus i")
    prefix_cache: Literal["cold", "warm", "off"] = option(
        "cold",
        "cold: flushed before every run. warm: never flushed, and every prompt was sent before. off: disabled, in "
        "process only",
    )
    backend: Literal["openai", "openai-chat", "sglang"] | None = option(
        None, "the API of the server: openai (/v1/completions), openai-chat or sglang (/generate) (default: openai)"
    )

    def __post_init__(self) -> None:
        for name, least in (("num_prompts", 1), ("num_warmups", 0), ("repeats", 1), ("max_tokens", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}; got {value}")
        if not 0 <= self.range_ratio < 1:
            raise ValueError(f"range_ratio must be a share from 0 to below 1; got {self.range_ratio}")
        if self.document_chars is not None and self.document_chars < 1:
            raise ValueError(f"document_chars must be at least 1; got {self.document_chars}")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature must be a number of at least 0; got {self.temperature}")
        if self.prefix_cache == "warm" and self.num_warmups is not None:
            raise ValueError("num_warmups would have no effect: a warm prefix cache is warmed by every prompt")
        self._check_target()

    def _check_loads(self) -> None:
        widest = max((load.max_concurrency or 1 for load in self.loads), default=1)
        if widest > self.num_prompts:
            raise ValueError(
                f"max_concurrency {widest} would have no effect on {self.num_prompts} requests; raise num_prompts"
            )

    def _check_target(self) -> None:
        urls = self.urls
        if self.backend is not None and not urls:
            raise ValueError("backend would have no effect in process; leave it out, or give url")
        if self.prefix_cache == "off" and urls:
            raise ValueError("prefix_cache off is for an engine in process; start the server without its cache instead")

    @property
    def urls(self) -> tuple[str, ...]:
        """Of the servers; none: in process."""
        raise NotImplementedError

    @property
    def loads(self) -> tuple[Load, ...]:
        raise NotImplementedError

    def warm_up(self, load: Load) -> int:
        """How many requests are made before the first run: all, if these warm the cache."""
        if self.prefix_cache == "warm":
            return self.num_prompts
        default = WARM_UPS if load.max_concurrency is None else load.max_concurrency
        return min(self.num_prompts, default if self.num_warmups is None else self.num_warmups)


@dataclass(frozen=True)
class OneLoad:
    """One scenario under one load."""

    scenario: str = option("code-completion", f"one of {', '.join(SCENARIOS)}")
    max_concurrency: int | None = option(
        None, "a closed loop of so many streams: when one request ends, the next is sent (default: 1)"
    )
    request_rate: float | None = option(None, "instead: requests per second, which arrive as a Poisson process")

    @property
    def loads(self) -> tuple[Load, ...]:
        if self.max_concurrency is None and self.request_rate is None:
            return (Load(max_concurrency=1),)
        return (Load(self.max_concurrency, self.request_rate),)


@dataclass(frozen=True)
class ServingSettings(OneLoad, Requests):
    """One scenario under one load against one target."""

    url: str | None = option(None, "a server's address; by default an engine in this process is measured")
    drafter: str | None = option(
        None, f"{DRAFTER_HELP}; over HTTP only for Stride servers; by default what the target chooses"
    )
    slo: tuple[str, ...] = option((), SLO_HELP)
    ignore_eos: bool = option(True, "continue to max_tokens after an end of text, so that every run does the same work")

    def __post_init__(self) -> None:
        super().__post_init__()
        scenario_of(self.scenario)
        self._check_loads()
        Objective.of(self.slo)

    @property
    def urls(self) -> tuple[str, ...]:
        return () if self.url is None else (self.url,)


@dataclass(frozen=True)
class SweepSettings(Requests):
    """Scenarios under loads with drafters, against one target."""

    scenarios: tuple[str, ...] = option(
        ("short-question", "code-completion", "multi-turn"), f"of {', '.join(SCENARIOS)}; all: every one"
    )
    max_concurrency: tuple[int, ...] = option((1, 4, 8), "streams of the closed loops; empty for none")
    request_rate: tuple[float, ...] = option((), "requests per second of the loads with arrivals")
    drafters: tuple[str, ...] = option(
        (), f"comma-separated {DRAFTER_HELP}; by default what the target chooses; over HTTP only for Stride servers"
    )
    url: str | None = option(None, "a server's address; by default an engine in this process is measured")
    slo: tuple[str, ...] = option((), SLO_HELP)
    ignore_eos: bool = option(True, "continue to max_tokens after an end of text, so that every run does the same work")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.scenarios:
            raise ValueError("scenarios names none; name at least one, or all")
        if "all" in self.scenarios and len(self.scenarios) > 1:
            raise ValueError("scenarios: all stands alone, for every one; leave out the others, or all")
        for name in self.names:
            scenario_of(name)
        if not self.loads:
            raise ValueError("there is no load; give max_concurrency or request_rate")
        self._check_loads()
        Objective.of(self.slo)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(SCENARIOS) if self.scenarios == ("all",) else tuple(dict.fromkeys(self.scenarios))

    @property
    def loads(self) -> tuple[Load, ...]:
        closed = [Load(max_concurrency=streams) for streams in dict.fromkeys(self.max_concurrency)]
        return (*closed, *(Load(request_rate=rate) for rate in dict.fromkeys(self.request_rate)))

    @property
    def urls(self) -> tuple[str, ...]:
        return () if self.url is None else (self.url,)


@dataclass(frozen=True)
class CompareSettings(OneLoad, Requests):
    """One scenario under one load, against two targets or two settings."""

    url: Sequence[str] = option(
        (), "a server's address; repeated: two servers are compared; by default an engine in this process"
    )
    drafters: tuple[str, ...] = option(
        (),
        f"the two settings, each {DRAFTER_HELP} or none; one is compared with none, and by default the target's own; "
        "over HTTP only for Stride servers",
    )
    loss: bool | None = option(
        None, "score both outputs by the first target's plain decoding (default: if one of the two is lossy)"
    )
    slo: tuple[str, ...] = option((), SLO_HELP)
    ignore_eos: bool = option(False, "continue to max_tokens after an end of text")

    def __post_init__(self) -> None:
        super().__post_init__()
        scenario_of(self.scenario)
        self._check_loads()
        Objective.of(self.slo)
        if len(self.url) > 2 or len(self.drafters) > 2:
            raise ValueError(f"two are compared; got {len(self.url)} of url and {len(self.drafters)} of drafters")
        if len(self.url) == 2 and len(self.drafters) == 1:
            raise ValueError("with two servers, drafters names one for each, or is left out")

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(self.url)

    @property
    def entries(self) -> tuple[str | None, str | None]:
        """How each of the two decodes; None: as its target chooses."""
        if len(self.drafters) == 2:
            return self.drafters[0], self.drafters[1]
        if len(self.url) == 2:
            return None, None
        return "none", self.drafters[0] if self.drafters else None
