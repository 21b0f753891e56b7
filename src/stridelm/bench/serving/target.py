"""What a benchmark measures: an engine in this process, or a server at an address. Both answer the same requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from stridelm.bench.serving.loads import Load
from stridelm.bench.serving.record import Completion, Run
from stridelm.bench.serving.scenarios import Prompt


@dataclass(frozen=True)
class Ask:
    """One request."""

    prompt: Prompt
    max_tokens: int
    temperature: float
    ignore_eos: bool
    seed: int


@dataclass(frozen=True)
class Way:
    """One way of decoding at a target, with what its rule promises."""

    label: str
    """Of the tables; lossy ones are starred."""
    speculation: Any
    """As the target takes it; None: nothing is said, so that its default applies."""
    lossless: bool | None
    """Whether the output has plain decoding's distribution; None if it is not known."""
    repeats: bool
    """Whether the output is, token for token, plain decoding's."""
    simulated: bool = False
    """Acceptance is drawn at random: the tokens are not the model's."""
    drafter: str | None = None
    """None: nothing drafts, or it is not known what does."""
    adaptive: bool = False
    """Depths are chosen at every step."""


class Target(Protocol):
    @property
    def name(self) -> str:
        """Of the tables: "in process", or an address."""

    @property
    def about(self) -> dict[str, str]:
        """What is known of its model and device, by name."""

    def plain(self) -> Way | None:
        """Decoding without drafts; None if a request cannot choose it."""

    def way(self, entry: str | None) -> Way:
        """An entry of `--drafters`, or the target's default. Raises ValueError for one that the target refuses."""

    def check(self, asks: Sequence[Ask]) -> None:
        """Raise ValueError, before anything is timed, if an output is to go on to more tokens than the context has room
        for; not if the target does not say how long that is."""

    def run(self, asks: Sequence[Ask], load: Load, arrivals: Sequence[float] | None, way: Way) -> Run:
        """Make all requests. Raises ValueError if one of them can never be served."""

    def flush(self) -> None:
        """Drop cached prefixes. Raises ValueError if the target cannot."""

    def losses(self, asks: Sequence[Ask], completions: Sequence[Completion]) -> list[float | None]:
        """For each completion, the mean negative log-probability of its tokens under the model, in nats: what plain
        decoding would have thought of them. None if it has no tokens. Raises ValueError if the target cannot."""
