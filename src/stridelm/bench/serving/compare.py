"""Two targets, or two settings of one: which is faster, and whether their outputs are the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from stridelm.bench.serving.cells import OnRun, Side, alternate, asks_of, check_lengths
from stridelm.bench.serving.figures import Figures, Ratio, pace_ratio, speed_ratio
from stridelm.bench.serving.objective import Objective
from stridelm.bench.serving.quality import Divergence, mean_loss, parse_share
from stridelm.bench.serving.record import Completion, Run
from stridelm.bench.serving.scenarios import scenario_of
from stridelm.bench.serving.settings import CompareSettings


@dataclass(frozen=True)
class Contender:
    """One of the two."""

    target: str
    label: str
    lossless: bool | None
    simulated: bool
    figures: Figures
    rates: tuple[float, ...]
    """Tokens per second of each run."""
    loss: float | None
    """Mean negative log-probability of its output tokens under the first target's model, in nats per token."""
    parse_share: float | None
    """Of its outputs, those that are valid Python with their prompts; None if prompts are not Python."""

    @property
    def name(self) -> str:
        return f"{self.target}, {self.label}"


@dataclass(frozen=True)
class Comparison:
    first: Contender
    second: Contender
    speed: Ratio | None
    """Tokens per second, the second over the first."""
    pace: Ratio | None
    """How many times as fast a request's tokens come."""
    divergence: Divergence
    """Of the first run of each."""
    promised: bool
    """Whether both promise the same outputs, token for token."""

    @property
    def contenders(self) -> tuple[Contender, Contender]:
        return self.first, self.second

    @property
    def broken(self) -> bool:
        """Whether a promise was not kept."""
        return self.promised and self.divergence.identical < self.divergence.outputs

    def to_json(self) -> dict[str, Any]:
        pair = {"speed": self.speed, "pace": self.pace, "divergence": self.divergence}
        return {name: None if each is None else asdict(each) for name, each in pair.items()}

    def rows(self) -> list[dict[str, Any]]:
        """Flat except for percentiles."""
        rows = [asdict(each) for each in self.contenders]
        return [{**row, **row.pop("figures")} for row in rows]


def compare(sides: tuple[Side, Side], settings: CompareSettings, on_run: OnRun = lambda what: None) -> Comparison:
    """Raises ValueError for what cannot be run or, if losses were asked for, scored."""
    scenario = scenario_of(settings.scenario)
    check_lengths([scenario.name], settings)
    asks = asks_of(scenario.name, settings, settings.ignore_eos)
    for side in sides:
        side.target.check(asks)
    [load] = settings.loads
    lossy = any(side.way.lossless is False for side in sides)
    scored = lossy if settings.loss is None else settings.loss
    if scored:  # raises if it cannot be done
        sides[0].target.losses([], [])
    first, second = alternate(sides, asks, load, settings, on_run, f"{scenario.name}, {load.name}")
    answered = [
        (ask, one, other)
        for ask, one, other in zip(asks, first[0].completions, second[0].completions, strict=True)
        if one is not None and other is not None
    ]
    pairs = [(one, other) for _, one, other in answered]
    shared = [ask for ask, _, _ in answered]
    objective = Objective.of(settings.slo)
    python = scenario.python and settings.backend != "openai-chat"

    def contender(side: Side, runs: Sequence[Run], outputs: Sequence[Completion]) -> Contender:
        return Contender(
            side.target.name,
            side.way.label,
            side.way.lossless,
            side.way.simulated,
            Figures.of(runs, objective),
            tuple(run.tokens_per_s for run in runs),
            mean_loss(sides[0].target.losses(shared, outputs), outputs) if scored else None,
            parse_share([ask.prompt.text for ask in shared], outputs) if python else None,
        )

    return Comparison(
        contender(sides[0], first, [one for one, _ in pairs]),
        contender(sides[1], second, [other for _, other in pairs]),
        speed_ratio(second, first),
        pace_ratio(second, first),
        Divergence.of(pairs),
        promised=all(side.way.repeats for side in sides) and sides[0].target is sides[1].target,
    )
