"""The settings of `stride bench cost`. The command line is generated from these fields."""

from __future__ import annotations

from dataclasses import dataclass

from stridelm.bench.serving.scenarios import SCENARIOS, scenario_of
from stridelm.values import option


@dataclass(frozen=True)
class CostSettings:
    """The steps to be measured: of so many requests, at every depth, in contexts of these lengths."""

    drafters: tuple[str, ...] = option(
        ("auto",), "names of drafters; plain decoding is always measured too; auto: the best one available"
    )
    depth: int | None = option(None, "the deepest draft to be measured (default: the drafter's usual depth)")
    acceptance: str = option("exact", "rule of the drafts; with random weights, such as synthetic:2.5")
    max_concurrency: tuple[int, ...] = option((1, 2, 4, 8, 16), "requests of a step")
    contexts: tuple[int, ...] = option((64, 512), "tokens that each request has before the steps that are measured")
    rounds: int = option(4, "how often each kind of step is run, for several steps each time, in changing order")
    scenario: str = option("code-completion", f"whose requests the table describes, one of {', '.join(SCENARIOS)}")
    num_prompts: int = option(16, "requests of the scenario")
    max_tokens: int | None = option(None, "tokens of each output; by default the scenario's own")
    seed: int = option(0, "fixes the order of the scenario's requests, as in the other benchmarks")

    def __post_init__(self) -> None:
        for name in ("depth", "rounds", "num_prompts", "max_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1; got {value}")
        for name in ("max_concurrency", "contexts"):
            values = getattr(self, name)
            if not values or min(values) < 1:
                raise ValueError(f"{name} must name numbers of at least 1; got {list(values)}")
        if not self.drafters:
            raise ValueError("drafters names none; name one, or auto")
        for name in self.drafters:
            if set(name) & set("@+:"):
                raise ValueError(
                    f"drafter {name!r}: costs are recorded of drafters by name, such as ngram; depth and acceptance "
                    "are apart"
                )
        scenario_of(self.scenario)
