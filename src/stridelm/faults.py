"""Which request a failure belongs to. Code that serves one request marks itself, and a failure there ends that request
alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from stridelm.types import Request


class RequestFault(Exception):
    """Work done for a single request failed; `__cause__` is the original error."""

    def __init__(self, request: Request) -> None:
        super().__init__(f"request {request.id} failed")
        self.request = request


class EngineFault(RuntimeError):
    """The engine failed, and no single request is to blame: it may no longer be usable."""


class TracerFault(Exception):
    """The observer of the steps failed, not the steps themselves; `__cause__` is the original error."""


@contextmanager
def on_behalf_of(request: Request) -> Iterator[None]:
    """Attribute any failure inside to this request. Raises RequestFault."""
    try:
        yield
    except RequestFault:
        raise
    except Exception as error:
        raise RequestFault(request) from error
