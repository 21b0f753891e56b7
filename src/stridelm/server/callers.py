"""The caller of a request: authenticated by a key, identified by an id that reveals nothing of the key, with the
permissions of its role.

Callers take turns, and share everything that is limited, by tenant: that is the key, or without keys the client's
address. A client may not do what affects everyone: flush the cache, end another's requests, go ahead of everyone else.
Where no keys are configured, every caller is an operator.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.requests import Request


@dataclass(frozen=True)
class Caller:
    tenant: str = ""
    """Identifies the key for the lifetime of the process; where there are no keys, the client's address."""
    operator: bool = True
    private: bool = False
    """Whether it shares no cached state with other tenants: only keys tell whose it is."""


EVERYBODY = Caller()
NOBODY = Caller(operator=False)
"""A caller without a key, at a route that needs none, on a server that has keys."""


class Keys:
    """The keys of clients and operators; a key in both lists is an operator's. salt: the same in all processes in which
    a key is to be the same tenant; by default a new one."""

    def __init__(self, clients: Sequence[str], operators: Sequence[str], salt: bytes | None = None) -> None:
        self._salt = secrets.token_bytes(16) if salt is None else salt
        known = dict.fromkeys(clients, False) | dict.fromkeys(operators, True)
        self._known = [(self._digest(key.encode()), operator) for key, operator in known.items()]

    def __bool__(self) -> bool:
        return bool(self._known)

    def caller(self, authorization: str, address: str = "") -> Caller | None:
        """The caller with the key in this header, at this IP address; None for an unknown key. Every key is compared,
        each in constant time, so that the duration reveals nothing."""
        if not self._known:
            return Caller(network_of(address))
        scheme, _, token = authorization.partition(" ")
        presented = self._digest(token.strip().encode() if scheme.lower() == "bearer" else b"")
        matches = [
            Caller(digest[:6].hex(), operator, private=True)
            for digest, operator in self._known
            if hmac.compare_digest(presented, digest)
        ]
        return matches[0] if matches else None

    def _digest(self, key: bytes) -> bytes:
        return hmac.new(self._salt, key, hashlib.sha256).digest()


def authorization_of(headers: Headers) -> str:
    """The header with a request's key: Authorization, or else x-api-key, which Anthropic's clients send."""
    key = headers.get("x-api-key")
    return headers.get("authorization") or (f"Bearer {key}" if key else "")


def network_of(address: str) -> str:
    """The addresses that one client has: of IPv6 it usually has 2**64, all with the same first half."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:  # not an address, as under a test client
        return address
    if isinstance(ip, ipaddress.IPv4Address):
        return address
    return str(ip.ipv4_mapped or ipaddress.IPv6Address(int(ip) >> 64 << 64))


def caller_of(request: Request) -> Caller:
    """The caller that the middleware found."""
    caller: Caller = request.state.caller
    return caller
