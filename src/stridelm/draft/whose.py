"""Finds out which drafter a directory of weights belongs to: each drafter recognises its own."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

from stridelm.draft import DRAFTERS
from stridelm.draft.base import TargetInfo
from stridelm.draft.given import given

logger = logging.getLogger(__name__)

CHOOSES = "hybrid"
"""What "auto" is where it can run: it chooses between lookup and the best of the others, request by request."""
PREFERENCE = ("mtp", "eagle", "frozen_kv", "medusa", "model", "mask", "ngram", "none")
"""What "auto" tries otherwise, best first, after drafters whose weights were named or found in the model's directory;
also the order of the latter. Heads come before small models, which need a whole forward pass of their own per token."""
BESIDE = "drafters"
"""Folder in a checkpoint for heads that were made for it, one directory each."""


def in_order(target: TargetInfo) -> Iterator[str]:
    """The installed drafters that "auto" tries, best first."""
    return (name for name in dict.fromkeys((CHOOSES, *target.heads, *PREFERENCE)) if name in DRAFTERS)


def heads_of(model: Path, named: Sequence[str]) -> dict[str, Path]:
    """Drafter -> the directory of its weights: those that the user named, then those in the model's directory, best
    first.

    Raises ValueError for a named directory that no drafter recognises, or for two that belong to one drafter.
    """
    heads: dict[str, Path] = {}
    for path in map(Path, named):
        name = whose(path)
        if name is None:
            raise ValueError(
                f"no drafter recognises {path} as its weights; drafters that have weights of their own: "
                f"{', '.join(n for n in DRAFTERS if DRAFTERS.get(n).takes)}"
            )
        if name in heads:
            raise ValueError(f"{heads[name]} and {path} are both weights for drafter {name!r}; give one of them")
        heads[name] = path
    found = [(whose(file.parent), file.parent) for file in sorted((model / BESIDE).glob("*/config.json"))]
    for name, path in sorted(((name, path) for name, path in found if name), key=lambda each: _rank(each[0])):
        if heads.setdefault(name, path) != path:
            logger.info("drafter %s: %s, not %s", name, heads[name], path)
    return heads


def _rank(drafter: str) -> int:
    return PREFERENCE.index(drafter) if drafter in PREFERENCE else len(PREFERENCE)


def whose(path: Path) -> str | None:
    """The drafter that recognises the directory; None if none does."""
    found = given(path)
    return next((name for name in DRAFTERS if DRAFTERS.get(name).recognises(found)), None)
