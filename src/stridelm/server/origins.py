"""Where a request comes from, as far as a browser tells: pages of other sites may not use a server that their visitor
can reach.

A page can resolve its own name to 127.0.0.1 (DNS rebinding): then Host is not a name of this server. And a page can
send what a form could, without asking first: such a request has no JSON content type, or no body at all.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from stridelm.server.errors import ApiError, bad_request

LOCAL = ("localhost", "127.0.0.1", "[::1]")
WITH_BODY = ("POST", "PUT", "PATCH")
ABROAD = ("cross-site", "same-site")
"""What browsers say in Sec-Fetch-Site of requests that another site's page made."""


def default_hosts(bound: str) -> tuple[str, ...]:
    """At a loopback address its names; elsewhere any, since nobody here knows what the server is called outside."""
    try:
        local = ipaddress.ip_address(bound).is_loopback
    except ValueError:
        local = bound == "localhost"
    return (*LOCAL, f"[{bound}]" if ":" in bound else bound) if local else ("*",)


def check_host(headers: Headers, version: str, allowed: Sequence[str]) -> None:
    """Raise ApiError unless the request is for this server."""
    given = headers.getlist("host")
    if len(given) > 1 or (not given and version == "1.1"):
        raise bad_request("a request has one Host header; send one")
    if "*" in allowed or not given:
        return
    name = _without_port(given[0])
    if not any(name == one or (one.startswith("*.") and name.endswith(one[1:])) for one in allowed):
        raise ApiError(
            403,
            f"this server is not called {name[:80]!r}; whoever runs it may add the name with --allowed-hosts",
            kind="permission_error",
            code="host_not_allowed",
            closes=True,
        )


def check_origin(method: str, headers: Headers) -> None:
    """Raise ApiError for a body that is not JSON, and for another site's page that sends none."""
    if method not in WITH_BODY:
        return
    if headers.get("content-length", "0") != "0" or "transfer-encoding" in headers:
        media = headers.get("content-type", "").partition(";")[0].strip().lower()
        if media != "application/json" and not (media.startswith("application/") and media.endswith("+json")):
            raise ApiError(
                415,
                "the body must be JSON and say so; send the header 'Content-Type: application/json'",
                code="unsupported_media_type",
                closes=True,
            )
        return
    origin, host = headers.get("origin"), headers.get("host", "")
    foreign = origin is not None and urlsplit(origin).netloc.lower() != host.lower()
    if foreign or headers.get("sec-fetch-site") in ABROAD:
        raise ApiError(
            403,
            "a page of another site asked for this; ask from this server's own, or from no page",
            kind="permission_error",
            code="cross_origin",
        )


def _without_port(host: str) -> str:
    name, colon, port = host.strip().lower().rpartition(":")
    found = name if colon and port.isdigit() else host.strip().lower()
    return found.rstrip(".")
