"""Checks on every request before a route gets it (host, caller, origin, size of the body), and the access log.

Plain ASGI, because it wraps streams too.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stridelm.server.callers import NOBODY, Keys, authorization_of
from stridelm.server.errors import ApiError, busy, too_large, unauthorised
from stridelm.server.generation import Generation
from stridelm.server.logs import ACCESS
from stridelm.server.origins import check_host, check_origin
from stridelm.server.replies import error_reply

MIB = 1 << 20
REQUEST_ID = re.compile("[!-~]{1,128}")
"""Names of requests (X-Request-Id) that are taken in, logged and sent back; others are ignored."""
LONGEST_ROUTE = 200
"""Characters of a path that are logged."""
OPEN_PATHS = ("/", "/health", "/ping", "/health_generate", "/metrics")
"""Routes that need no key, unless metrics are protected; the page itself asks for one."""


class RequestMiddleware:
    """refused: called with the status of every answer from 400 on."""

    def __init__(
        self,
        app: ASGIApp,
        keys: Keys,
        hosts: Sequence[str],
        open_paths: Sequence[str],
        max_body_mib: float,
        access_log: bool,
        refused: Callable[[int], None],
    ) -> None:
        self._app = app
        self._keys = keys
        self._hosts = [host.lower() for host in hosts]
        self._open_paths = frozenset(open_paths)
        self._max_body_mib = max_body_mib
        self._access_log = access_log
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.monotonic()
        status = 0
        state = scope.setdefault("state", {})  # where routes leave their generation
        name = Headers(scope=scope).get("x-request-id", "")
        state["request_id"] = name = name if REQUEST_ID.fullmatch(name) else ""

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if name:
                    message["headers"] = [*message["headers"], (b"x-request-id", name.encode())]
            await send(message)

        try:
            await self._pass(scope, receive, watched)
        finally:
            if status >= 400:
                self._refused(status)
            if self._access_log:
                self._log(scope, state, status, time.monotonic() - began)

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        try:
            check_host(headers, scope["http_version"], self._hosts)
            address, _ = scope.get("client") or ("", 0)
            caller = self._keys.caller(authorization_of(headers), address)
            if caller is None:
                if scope["path"] not in self._open_paths:
                    raise unauthorised()
                caller = NOBODY
            check_origin(scope["method"], headers)
            admit = scope["state"].get("admit")  # absent without a real connection
            if admit is not None and not admit(caller.tenant):
                raise busy()
        except ApiError as error:
            await error_reply(error, scope["path"])(scope, receive, send)
            return
        scope["state"] |= {"caller": caller, "tenant": caller.tenant}
        limit = self._max_body_mib * MIB
        length = headers.get("content-length", "")
        if length.isdigit() and int(length) > limit:
            await error_reply(too_large(self._max_body_mib), scope["path"])(scope, receive, send)
            return
        taken = 0

        async def counted() -> Message:
            nonlocal taken
            message = await receive()
            if message["type"] == "http.request":
                taken += len(message.get("body", b""))
                if taken > limit:
                    raise too_large(self._max_body_mib)
            return message

        await self._app(scope, counted, send)

    def _log(self, scope: Scope, state: Mapping[str, Any], status: int, seconds: float) -> None:
        generation, name = state.get("generation"), state["request_id"]
        cost = ({"request_id": name} if name else {}) | ({} if generation is None else _cost(generation))
        route = scope["path"][:LONGEST_ROUTE]
        fields = {"method": scope["method"], "route": route, "status": status, "seconds": round(seconds, 4)}
        words = "".join(f" {name}={value}" for name, value in cost.items())
        line = f"{scope['method']} {route} {status} {seconds:.3f} s{words}"
        ACCESS.info("%s", line, extra={"fields": fields | cost})


def _cost(generation: Generation) -> dict[str, Any]:
    """Totals of the samples that have ended: tokens, steps, and drafted and accepted tokens."""
    ended = generation.ended
    steps, tokens = sum(one.steps for one in ended), generation.tokens
    return {
        "drafter": ",".join(sorted({one.drafter for one in ended})) or "-",
        "acceptance": ",".join(sorted({one.acceptance for one in ended})) or "-",
        "tokens": tokens,
        "tokens_per_step": round(tokens / steps, 2) if steps else 0,
        "drafted": sum(one.drafted for one in ended),
        "accepted": sum(one.accepted for one in ended),
    }
