"""The settings of `stride simulate`. The command line is generated from these fields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from stridelm.bench.serving.loads import Load
from stridelm.bench.serving.objective import Objective
from stridelm.bench.serving.settings import SLO_HELP, WARM_UPS
from stridelm.values import option, settle_number

FEWEST, PER_STREAM = 64, 4
"""Requests of a run: at least so many, and so many for each stream."""
PROMPT_TOKENS, MAX_TOKENS = 128, 128
"""Of a request, if the table has none."""


@dataclass(frozen=True)
class SimulationSettings:
    """Loads and ways of decoding, on cards of which a table says what their steps take."""

    drafters: tuple[str, ...] = option(
        (),
        "comma-separated NAME@DEPTH or NAME@auto, such as mtp@3,mtp@auto, of the table's drafters; plain decoding is "
        "always beside them (default: each at its usual depth, and auto)",
    )
    max_concurrency: tuple[int, ...] = option((1, 4, 8), "streams of the closed loops, over all cards; empty for none")
    request_rate: tuple[float, ...] = option((), "requests per second of the loads with arrivals, over all cards")
    cards: int = option(1, "cards that share a load")
    routing: Literal["least-outstanding", "round-robin"] | None = option(
        None, "the card that a request is sent to (default: least-outstanding)"
    )
    acceptance: tuple[str, ...] = option(
        (),
        "kinds of requests, in equal shares: tokens per step at the deepest draft (1.2,2.0,3.5), a chance for every "
        "level (0.8), or one for each level (0.8/0.7/0.5); by default what the table's requests had",
    )
    num_prompts: int | None = option(None, f"requests of a run (default: {PER_STREAM} per stream, at least {FEWEST})")
    num_warmups: int | None = option(
        None, f"requests before the first run, which are dropped (default: as many as streams, or {WARM_UPS})"
    )
    repeats: int = option(3, "runs of each kind, each with another luck")
    prompt_tokens: int | None = option(None, f"of each prompt; by default the table's requests', or {PROMPT_TOKENS}")
    max_tokens: int | None = option(None, f"of each output; by default the table's requests', or {MAX_TOKENS}")
    seed: int = option(0, "fixes arrivals and what is accepted; run i has it plus i")
    slo: tuple[str, ...] = option((), SLO_HELP)
    max_num_seqs: int | None = option(
        None, "requests that a card runs at once (default: as many as the table's points have)"
    )
    max_num_batched_tokens: int | None = option(None, "rows of a step (default: the recorded engine's)")
    num_pages: int | None = option(None, "pages of KV of a card (default: the recorded engine's)")
    itl_target_ms: float | None = option(None, "as of an engine (default: the recorded engine's)")
    noise: float = option(
        0.0, "how far off the clock is that policies go by: 1 as on two cores of a shared server, 0 not at all"
    )

    def __post_init__(self) -> None:
        for name in (
            "num_prompts",
            "prompt_tokens",
            "max_tokens",
            "max_num_seqs",
            "max_num_batched_tokens",
            "num_pages",
        ):
            settle_number(self, name, 1, 2**31 - 1, whole=True, optional=True)
        for name in ("cards", "repeats"):
            settle_number(self, name, 1, 2**31 - 1, whole=True)
        settle_number(self, "num_warmups", 0, 2**31 - 1, whole=True, optional=True)
        settle_number(self, "itl_target_ms", 0.0, 1e6, optional=True)
        settle_number(self, "noise", 0.0, 10.0)
        if not self.loads:
            raise ValueError("there is no load; give max_concurrency or request_rate")
        if self.routing is not None and self.cards == 1:
            raise ValueError("routing would have no effect on one card; leave it out, or raise cards")
        widest = max((load.max_concurrency or 1 for load in self.loads), default=1)
        if self.num_prompts is not None and widest > self.num_prompts:
            raise ValueError(
                f"max_concurrency {widest} would have no effect on {self.num_prompts} requests; raise num_prompts"
            )
        Objective.of(self.slo)

    @property
    def loads(self) -> tuple[Load, ...]:
        closed = [Load(max_concurrency=streams) for streams in dict.fromkeys(self.max_concurrency)]
        return (*closed, *(Load(request_rate=rate) for rate in dict.fromkeys(self.request_rate)))

    def count(self, load: Load) -> int:
        """Requests of a run."""
        return self.num_prompts or max(FEWEST, PER_STREAM * (load.max_concurrency or 0))

    def warm_up(self, load: Load) -> int:
        """Requests before the first run."""
        default = WARM_UPS if load.max_concurrency is None else load.max_concurrency
        return min(self.count(load), default if self.num_warmups is None else self.num_warmups)
