"""Checks of a request's origin, as reported by browsers: pages of other sites may not use a server that their visitor
can reach.

A page can resolve its own name to 127.0.0.1 (DNS rebinding): then Host is not a name of this server. And a page can
send what a form could without a preflight: such a request has no JSON content type, or no body at all.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from stridelm.server.errors import ApiError, bad_request

LOCAL = ("localhost", "127.0.0.1", "[::1]")
WITH_BODY = ("POST", "PUT", "PATCH")
FOREIGN_SITES = ("cross-site", "same-site")
"""Values of Sec-Fetch-Site that browsers send with requests of other sites' pages."""


def default_hosts(bound: str) -> tuple[str, ...]:
    """The names of a loopback address; for other addresses any name, since the name that clients use is unknown."""
    try:
        local = ipaddress.ip_address(bound).is_loopback
    except ValueError:
        local = bound == "localhost"
    return (*LOCAL, f"[{bound}]" if ":" in bound else bound) if local else ("*",)


def check_host(headers: Headers, version: str, allowed: Sequence[str]) -> None:
    """Raise ApiError unless the request is for this server."""
    hosts = headers.getlist("host")
    if len(hosts) > 1 or (not hosts and version == "1.1"):
        raise bad_request("a request must have exactly one Host header; send one")
    if "*" in allowed or not hosts:
        return
    name = _without_port(hosts[0])
    if not any(name == one or (one.startswith("*.") and name.endswith(one[1:])) for one in allowed):
        raise ApiError(
            403,
            f"{name[:80]!r} is not a name of this server; its operator can add the name with --allowed-hosts",
            kind="permission_error",
            code="host_not_allowed",
            closes=True,
        )


def check_origin(method: str, headers: Headers) -> None:
    """Raise ApiError for a body not declared as JSON, and for a request without a body from another site's page."""
    if method not in WITH_BODY:
        return
    if headers.get("content-length", "0") != "0" or "transfer-encoding" in headers:
        media = headers.get("content-type", "").partition(";")[0].strip().lower()
        if media != "application/json" and not (media.startswith("application/") and media.endswith("+json")):
            raise ApiError(
                415,
                "the body must be declared as JSON; send the header 'Content-Type: application/json'",
                code="unsupported_media_type",
                closes=True,
            )
        return
    origin, host = headers.get("origin"), headers.get("host", "")
    foreign = origin is not None and urlsplit(origin).netloc.lower() != host.lower()
    if foreign or headers.get("sec-fetch-site") in FOREIGN_SITES:
        raise ApiError(
            403,
            "a page of another site sent this request; send it from this server's own page, or without a browser",
            kind="permission_error",
            code="cross_origin",
        )


def _without_port(host: str) -> str:
    name, colon, port = host.strip().lower().rpartition(":")
    without = name if colon and port.isdigit() else host.strip().lower()
    return without.rstrip(".")
