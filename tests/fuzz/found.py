"""Faults that the fuzzer finds."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
LONGEST = 3000
"""Maximum length of a message in characters."""


class Found(AssertionError):
    """A fault. `kind` names the check that detected it, so that shrinking does not switch to another fault."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message if len(message) < LONGEST else message[:LONGEST] + ' ...'}")
        self.kind = kind


def guarded(kind: str, run: Callable[[], T]) -> T:
    """Run, and treat every exception as a fault."""
    try:
        return run()
    except Found:
        raise
    except Exception as error:
        raise Found(f"{kind} {type(error).__name__}", "".join(traceback.format_exception(error)[-6:])) from error
