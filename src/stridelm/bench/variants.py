"""What `--drafters` says, taken apart: a drafter with a depth, an acceptance rule and the rule's number.

    NAME[@DEPTH][:RULE[:NUMBER]]        mask    ngram@8    mask:trust    mask@3:trust:0.9    ngram@4:synthetic:2.5

The number is the confidence of trusted windows, and the tokens a step of simulated acceptance.

An entry without @DEPTH stands for one variant at each of the depths asked for.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from stridelm.draft import DRAFTERS
from stridelm.draft.base import Target
from stridelm.draft.settle import settle
from stridelm.params import Speculation
from stridelm.verify import RULES

FORM = re.compile(r"(?P<name>[^@:]+)(?:@(?P<depth>\d+))?(?::(?P<rule>[^@:]+)(?::(?P<number>[^@:]+))?)?")
SYNTAX = "NAME[@DEPTH][:RULE[:NUMBER]], such as ngram@8, mask@3:trust:0.9 or ngram@4:synthetic:2.5"


@dataclass(frozen=True)
class Variant:
    """One way of decoding, with nothing left open."""

    speculation: Speculation
    lossless: bool
    """Whether the rule promises the distribution of what plain decoding would say."""

    @property
    def drafter(self) -> str:
        return self.speculation.drafter or "none"

    @property
    def acceptance(self) -> str:
        return self.speculation.acceptance or "exact"

    @property
    def simulated(self) -> bool:
        """Whether the number of accepted tokens is drawn."""
        return RULES.get(self.acceptance).simulated

    def repeats(self, temperature: float) -> bool:
        """Whether it promises what plain decoding says, not the distribution of it alone."""
        return self.lossless and (temperature == 0 or RULES.get(self.acceptance).coupled)

    @property
    def drafts(self) -> bool:
        """False for plain decoding, under whatever name it was asked for."""
        return self.drafter != "none" and self.speculation.depth != 0

    @property
    def label(self) -> str:
        """The entry that would ask for exactly this; lossy ones are starred."""
        if not self.drafts:
            return "plain"
        text = f"{self.drafter}@{self.speculation.depth}"
        if self.acceptance != "exact":
            text += f":{self.speculation.rule}"
        if self.speculation.confidence is not None:
            text += f":{self.speculation.confidence:g}"
        return text if self.lossless else text + "*"


def read_variants(entries: Sequence[str], depths: Sequence[int], target: Target) -> list[Variant]:
    """The drafting variants of `--drafters` and `--depth`, each once, in the order given. Plain decoding is
    not among them: it runs in any case. No entry stands for every drafter that the model can run.

    Raises ValueError for an entry that cannot be read or that this model cannot run.
    """
    entries = entries or runnable(target)
    found = [variant for entry in entries for variant in _of_entry(entry, depths, target)]
    return list(dict.fromkeys(variant for variant in found if variant.drafts))


def plain(target: Target) -> Variant:
    return _settled(Speculation(drafter="none"), target)


def runnable(target: Target) -> list[str]:
    """Drafters that can serve this model."""
    return [name for name in DRAFTERS if DRAFTERS.get(name).why_not(target) is None]


def _of_entry(entry: str, depths: Sequence[int], target: Target) -> list[Variant]:
    match = FORM.fullmatch(entry.strip())
    if match is None:
        raise ValueError(f"drafter {entry!r} cannot be read; write {SYNTAX}")
    name, rule = match["name"], match["rule"]
    base = Speculation.of({"drafter": name, "acceptance": rule, **_number(entry, rule, match["number"])})
    if match["depth"] is not None:
        return [_settled(Speculation.of({"depth": int(match["depth"])}).over(base), target)]
    # A drafter that takes no depth runs once, whatever depths the others are to run at.
    if not depths or (name in DRAFTERS and DRAFTERS.get(name).default_depth == 0):
        return [_settled(base, target)]
    return [_settled(Speculation(depth=depth).over(base), target) for depth in depths]


def _number(entry: str, rule: str, text: str | None) -> dict[str, float]:
    """The option that the number behind a rule sets."""
    if text is None:
        return {}
    option = "acceptance_length" if RULES.get(rule).simulated else "confidence"
    try:
        return {option: float(text)}
    except ValueError as error:
        raise ValueError(f"{option} {text!r} in {entry!r} is not a number; write {SYNTAX}") from error


def _settled(speculation: Speculation, target: Target) -> Variant:
    settled = settle(speculation, target)
    assert settled.acceptance is not None
    return Variant(settled, RULES.get(settled.acceptance).lossless)
