"""Whose a failure is. Code that works for one request says so, and what fails there ends that request alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from stridelm.types import Request


class RequestFault(Exception):
    """Something failed that was done for one request and for nobody else; its cause is the error itself."""

    def __init__(self, request: Request) -> None:
        super().__init__(f"request {request.id} failed")
        self.request = request


class EngineFault(RuntimeError):
    """The engine failed, and no single request is to blame: it may be of no use any more."""


class TracerFault(Exception):
    """Whoever watches the steps failed, which is no failure of theirs; its cause is the error itself."""


@contextmanager
def on_behalf_of(request: Request) -> Iterator[None]:
    """Whatever fails inside is this request's. Raises RequestFault."""
    try:
        yield
    except RequestFault:
        raise
    except Exception as error:
        raise RequestFault(request) from error
