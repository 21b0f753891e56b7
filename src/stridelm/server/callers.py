"""Who asks: known by a key, told apart by an id that says nothing of it, and allowed what its role is.

A client may not do what is felt by all: forget the cache, end what is another's, go before everybody. Where no keys are
configured everybody is an operator.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.requests import Request


@dataclass(frozen=True)
class Caller:
    tenant: str = ""
    """Stands for the key, for as long as the process lives; empty where there are no keys."""
    operator: bool = True


EVERYBODY = Caller()
NOBODY = Caller(operator=False)
"""Who shows no key where none is needed, at a server that has keys."""


class Keys:
    """Those of clients and of operators; one that is in both lists is an operator's."""

    def __init__(self, clients: Sequence[str], operators: Sequence[str]) -> None:
        self._salt = secrets.token_bytes(16)
        known = dict.fromkeys(clients, False) | dict.fromkeys(operators, True)
        self._known = [(self._digest(key.encode()), operator) for key, operator in known.items()]

    def __bool__(self) -> bool:
        return bool(self._known)

    def caller(self, authorization: str) -> Caller | None:
        """Whose key the header bears. All are compared, each in constant time: how long it takes tells nothing."""
        if not self._known:
            return EVERYBODY
        kind, _, given = authorization.partition(" ")
        presented = self._digest(given.strip().encode() if kind.lower() == "bearer" else b"")
        found = [
            Caller(digest[:6].hex(), operator)
            for digest, operator in self._known
            if hmac.compare_digest(presented, digest)
        ]
        return found[0] if found else None

    def _digest(self, key: bytes) -> bytes:
        return hmac.new(self._salt, key, hashlib.sha256).digest()


def caller_of(request: Request) -> Caller:
    """As the border found it."""
    caller: Caller = request.state.caller
    return caller
