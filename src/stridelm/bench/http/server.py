"""A server that is measured: its address, its model, and what it tells about itself."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, Request, build_opener

DIRECT = build_opener(ProxyHandler({}))
"""The streams use no proxy either."""
ASK_S = 10.0
REASONS = ("application/json", "text/plain")
"""Content types in which servers of models say why they refuse; others are pages for people."""
REMEDY = "is a server with OpenAI's API running there?"
KEY = "OPENAI_API_KEY"
"""The environment variable with the key, as for OpenAI's own client. A key is never an option, which would be stored
with the results."""


@dataclass(frozen=True)
class Server:
    """A server that responds."""

    name: str
    host: str
    port: int
    prefix: str
    """What comes before the routes in their paths."""
    model: str
    """The name of the model that is asked for."""
    owner: str = ""
    """Who its list of models says owns the model: stride, vllm, sglang."""
    secure: bool = False
    headers: dict[str, str] = field(default_factory=dict, repr=False)

    @classmethod
    def at(cls, url: str, name: str | None = None, model: str | None = None) -> Server:
        """url: with or without /v1 at its end. model: the first that is listed if None. Raises ValueError unless a
        server of models responds there."""
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or parts.hostname is None:
            raise ValueError(f"{url} is not the address of a server; write http://host:port")
        secure = parts.scheme == "https"
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        key = os.environ.get(KEY)
        headers = {"authorization": f"Bearer {key}"} if key else {}
        port = parts.port or (443 if secure else 80)
        server = cls(name or parts.netloc, parts.hostname, port, prefix, "", "", secure, headers)
        try:
            status, kind, text = server._answer("/v1/models", None, ASK_S)
        except (OSError, ValueError) as error:
            raise ValueError(f"{url} does not list its models ({error}); {REMEDY}") from error
        try:
            owners = {each["id"]: each.get("owned_by") or "" for each in json.loads(text)["data"]}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{url} does not list its models (/v1/models was answered with status {status} and {kind}, which is no "
                f"such list); {REMEDY}"
            ) from error
        if not owners or (model is not None and model not in owners):
            raise ValueError(f"{url} has no model {model or ''!r}; it serves {', '.join(owners) or 'none'}")
        chosen = model or next(iter(owners))
        return replace(server, model=chosen, owner=owners[chosen])

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def path(self, route: str) -> str:
        return self.prefix + route

    def ask(self, route: str, body: Any = None, timeout: float = ASK_S) -> Any:
        """The answer's JSON, or its text if it is none. body: posted as JSON; None: GET.

        Raises ConnectionError, which names the server's own reason, unless the answer's status is 200.
        """
        text = self._answer(route, body, timeout)[2]
        try:
            return json.loads(text)
        except ValueError:
            return text

    def _answer(self, route: str, body: Any, timeout: float) -> tuple[int, str, str]:
        """Status, content type and text; as for `ask`."""
        url = f"{'https' if self.secure else 'http'}://{self.authority}{self.path(route)}"
        data = None if body is None else json.dumps(body).encode()
        request = Request(url, data, {"content-type": "application/json", **self.headers})
        try:
            with DIRECT.open(request, timeout=timeout) as answer:
                return answer.status, answer.headers.get_content_type(), answer.read().decode()
        except HTTPError as error:
            kind = error.headers.get_content_type()
            said = f" and {kind}"
            if kind in REASONS:
                said = f": {' '.join(error.read().decode(errors='replace').split())[:500]}"
            raise ConnectionError(f"{route} was answered with status {error.code}{said}") from error
        except URLError as error:
            raise ConnectionError(f"{url} does not respond: {error.reason}") from error
