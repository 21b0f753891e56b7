"""Parses `--drafters`: a drafter with a depth and options, an acceptance rule and the rule's number.

    NAME[@DEPTH][+OPTION=VALUE...][:RULE[:NUMBER]]

    mask    ngram@8    mtp@auto    mask@3:trust:0.9    ngram@4:synthetic:2.5
    eagle@5+draft_topk=4+num_draft_tokens=16    mtp@3+draft_sample_method=greedy:rejection

OPTION is any option of a drafter or rule, except those with their own place; VALUE is read as an integer, else as a
number, else as text. NUMBER is the confidence of trusted windows, or the tokens per step of simulated acceptance.

DEPTH is a number, or `auto` for depths that are chosen at every step. An entry without @DEPTH stands for one variant at
each depth in `--depth`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stridelm.draft import DRAFTERS
from stridelm.draft.base import TargetInfo
from stridelm.draft.settle import settle
from stridelm.options import known
from stridelm.params import Speculation
from stridelm.verify import RULES

FORM = re.compile(
    r"(?P<name>[^@+:]+)(?:@(?P<depth>\d+|auto))?(?P<options>(?:\+[^@+:=]+=[^@+:]+)*)"
    r"(?::(?P<rule>[^@+:]+)(?::(?P<number>[^@+:]+))?)?"
)
SYNTAX = (
    "NAME[@DEPTH][+OPTION=VALUE...][:RULE[:NUMBER]], such as ngram@8, mtp@auto, eagle@5+draft_topk=4, "
    "mask@3:trust:0.9 or ngram@4:synthetic:2.5"
)
PLACED = ("drafter", "depth", "acceptance", "acceptance_length", "confidence")
"""The fields of Speculation that have their own place in an entry."""


@dataclass(frozen=True)
class Variant:
    """One way of decoding, with all settings resolved."""

    speculation: Speculation
    lossless: bool
    """Whether the rule promises the distribution of plain decoding's output."""

    @property
    def drafter(self) -> str:
        return self.speculation.drafter or "none"

    @property
    def acceptance(self) -> str:
        return self.speculation.acceptance or "exact"

    @property
    def simulated(self) -> bool:
        """Whether the number of accepted tokens is drawn at random."""
        return RULES.get(self.acceptance).simulated

    def repeats(self, temperature: float) -> bool:
        """Whether it promises plain decoding's very output, and not only its distribution."""
        return self.lossless and (temperature == 0 or RULES.get(self.acceptance).coupled)

    @property
    def drafts(self) -> bool:
        """False for plain decoding, however it was requested."""
        return self.drafter != "none" and self.speculation.depth != 0

    @property
    def label(self) -> str:
        """The entry that gives exactly this variant; lossy ones are starred."""
        if not self.drafts:
            return "plain"
        given = self.speculation.given
        text = f"{self.drafter}@{given['depth']}"
        read = (*RULES.options(self.acceptance).names(), *DRAFTERS.options(self.drafter).names())
        text += "".join(f"+{name}={_shown(given[name])}" for name in read if name in given and name not in PLACED)
        if self.acceptance != "exact":
            text += f":{self.speculation.rule}"
        if "confidence" in given:
            text += f":{given['confidence']:g}"
        return text if self.lossless else text + "*"


def read_variants(entries: Sequence[str], depths: Sequence[int], target: TargetInfo) -> list[Variant]:
    """The drafting variants of `--drafters` and `--depth`, each once, in the order given. Plain decoding is not among
    them: it always runs. Without entries, every drafter that the model can run.

    Raises ValueError for an entry that cannot be parsed or that this model cannot run.
    """
    entries = entries or runnable(target)
    found = [variant for entry in entries for variant in _of_entry(entry, depths, target)]
    return list(dict.fromkeys(variant for variant in found if variant.drafts))


def plain(target: TargetInfo) -> Variant:
    return _settled(Speculation(drafter="none"), target)


def runnable(target: TargetInfo) -> list[str]:
    """Drafters that can serve this model."""
    return [name for name in DRAFTERS if DRAFTERS.get(name).why_not(target) is None]


def read_entry(entry: str) -> Speculation:
    """What an entry says, with the rest left open. Raises ValueError if it cannot be parsed."""
    match = FORM.fullmatch(entry.strip())
    if match is None:
        raise ValueError(f"drafter {entry!r} cannot be read; write {SYNTAX}")
    rule = match["rule"]
    options = _options(entry, match["options"]) | _number(entry, rule, match["number"])
    depth = match["depth"] if match["depth"] in (None, "auto") else int(match["depth"])
    return Speculation.of({"drafter": match["name"], "acceptance": rule, "depth": depth, **options})


def read_variant(entry: str, target: TargetInfo) -> Variant:
    """One entry, which may also be plain decoding. Raises ValueError for an entry that cannot be parsed or that this
    model cannot run."""
    return _settled(read_entry(entry), target)


def _of_entry(entry: str, depths: Sequence[int], target: TargetInfo) -> list[Variant]:
    asked = read_entry(entry)
    # A drafter without a depth runs once, whatever depths the others run at.
    assert asked.drafter is not None
    without = asked.drafter in DRAFTERS and DRAFTERS.get(asked.drafter).default_depth == 0
    if "depth" in asked.given or not depths or without:
        return [_settled(asked, target)]
    return [_settled(Speculation(depth=depth).over(asked), target) for depth in depths]


def _options(entry: str, text: str) -> dict[str, Any]:
    """The options after plus signs. Raises ValueError for one that is not allowed here or is given twice."""
    options: dict[str, Any] = {}
    for part in text.split("+")[1:]:
        name, _, value = part.partition("=")
        if name in PLACED:
            raise ValueError(f"{name} is not an option in {entry!r}, it has its own place; write {SYNTAX}")
        if name not in known():
            free = ", ".join(name for name in known() if name not in PLACED)
            raise ValueError(f"unknown option {name!r} in {entry!r}; known: {free}")
        if name in options:
            raise ValueError(f"{name} is given twice in {entry!r}; leave one out")
        options[name] = _value(value)
    return options


def _value(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _shown(value: Any) -> str:
    """The text of a value; a tree is put in brackets, because `--drafters` is not split at commas inside them."""
    return str(list(value)).replace(" ", "") if isinstance(value, tuple) else str(value)


def _number(entry: str, rule: str, text: str | None) -> dict[str, float]:
    """The option that the number after a rule sets."""
    if text is None:
        return {}
    option = "acceptance_length" if RULES.get(rule).simulated else "confidence"
    try:
        return {option: float(text)}
    except ValueError as error:
        raise ValueError(f"{option} {text!r} in {entry!r} is not a number; write {SYNTAX}") from error


def _settled(speculation: Speculation, target: TargetInfo) -> Variant:
    settled = settle(speculation, target)
    assert settled.acceptance is not None
    return Variant(settled, RULES.get(settled.acceptance).lossless)
