"""What a fuzzer finds."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
LONGEST = 3000
"""Characters of a message."""


class Found(AssertionError):
    """A fault. `kind` says which check saw it, so that shrinking does not slip from one fault to another."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message if len(message) < LONGEST else message[:LONGEST] + ' ...'}")
        self.kind = kind


def guarded(kind: str, run: Callable[[], T]) -> T:
    """Run, and take every exception for a fault."""
    try:
        return run()
    except Found:
        raise
    except Exception as error:
        raise Found(f"{kind} {type(error).__name__}", "".join(traceback.format_exception(error)[-6:])) from error
