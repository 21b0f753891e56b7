"""Whether two ways of decoding give the same outputs, and if not, what the difference is worth."""

from __future__ import annotations

import ast
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from stridelm.bench.serving.record import Completion

CUT_LINES = 5
"""Lines of an unfinished statement that may be left out before an output that was cut is parsed."""
Pair = tuple[Completion, Completion]


@dataclass(frozen=True)
class Divergence:
    """Outputs of the same requests, side by side."""

    outputs: int
    identical: int
    unit: str
    """Of positions: tokens, or characters if one of the two does not report its tokens."""
    positions: tuple[int, ...]
    """For each output that differs, how much of it is the same before the first difference."""
    lengths: tuple[int, ...]
    """Of the first side's outputs, all of them."""

    @classmethod
    def of(cls, pairs: Sequence[Pair]) -> Divergence:
        tokens = all(each.token_ids is not None for pair in pairs for each in pair)
        contents = [tuple(each.token_ids or () if tokens else each.text for each in pair) for pair in pairs]
        places = [first_divergence(*pair) for pair in contents]
        return cls(
            outputs=len(pairs),
            identical=places.count(None),
            unit="tokens" if tokens else "characters",
            positions=tuple(place for place in places if place is not None),
            lengths=tuple(len(first) for first, _ in contents),
        )

    @property
    def median(self) -> float | None:
        """Of the positions; None if all outputs are identical."""
        return statistics.median(self.positions) if self.positions else None

    def surviving(self) -> list[tuple[int, float]]:
        """Steps of a curve: from this position on, this share of the outputs is still the same."""
        curve = [(0, 1.0)]
        for place in sorted(set(self.positions)):
            curve.append((place, 1 - sum(each <= place for each in self.positions) / self.outputs))
        return [*curve, (max(self.lengths, default=0), curve[-1][1])]


def first_divergence(one: Sequence[object], other: Sequence[object]) -> int | None:
    """Where two sequences first differ, also by one of them ending; None if they are the same."""
    shared = next((at for at, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))
    return None if shared == len(one) == len(other) else shared


def mean_loss(losses: Sequence[float | None], completions: Sequence[Completion]) -> float | None:
    """Per token, over all outputs; None if there is no token."""
    known = [(loss, each.tokens) for loss, each in zip(losses, completions, strict=True) if loss is not None]
    tokens = sum(count for _, count in known)
    return math.fsum(loss * count for loss, count in known) / tokens if tokens else None


def parse_share(prompts: Sequence[str], completions: Sequence[Completion]) -> float | None:
    """The share of outputs with which their prompts are valid Python; None without any."""
    parsed = [parses(prompt, each.text, each.finish_reason == "length") for prompt, each in zip(prompts, completions)]
    return sum(parsed) / len(parsed) if parsed else None


def parses(prompt: str, output: str, cut: bool) -> bool:
    """Whether a prompt and its continuation are valid Python. cut: the limit of tokens ended the output, so that its
    last line, and a statement that began in the lines before it, may be unfinished."""
    text = prompt + output
    if text.lstrip("\n")[:1] in (" ", "\t"):  # the prompt is the inside of a class
        text = f"if True:\n{text}"
    lines = text.split("\n")
    fewest = max(prompt.count("\n") + 1, len(lines) - 1 - CUT_LINES) if cut else len(lines)
    return any(_is_python("\n".join(lines[:count])) for count in range(len(lines), fewest - 1, -1))


def _is_python(text: str) -> bool:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # null bytes; nesting
        return False
    return True
