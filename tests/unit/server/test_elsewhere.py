"""Requests for routes and methods that do not exist are told what does, and what to use instead."""

from __future__ import annotations

import pytest

from stridelm.server.elsewhere import INSTEAD
from support.doubles.server import Served


def refused(served: Served, method: str, path: str, status: int) -> str:
    """The message of the error."""
    with served.http() as client:
        answer = client.request(method, path)
    assert answer.status_code == status, answer.text
    return str(answer.json()["error"]["message"])


def routes(served: Served) -> dict[str, list[str]]:
    """The server's own document: path -> methods."""
    with served.http() as client:
        paths = client.get("/openapi.json").json()["paths"]
    return {path: [method.upper() for method in methods] for path, methods in paths.items()}


def test_a_route_that_does_not_exist(served: Served) -> None:
    """Every route of the document is listed. A long path is cut, the list is not."""
    for path in ("/nothing", "/" + "x" * 3000):
        message = refused(served, "GET", path, 404)
        assert message.startswith(f"there is no route GET {path[:80]}. Routes: ")
        listed = message.partition("Routes: ")[2].replace(",", "").replace(";", "").split()
        assert set(listed) >= routes(served).keys() | {"GET", "POST"} and "[...]" not in message


@pytest.mark.parametrize("paths", INSTEAD)
def test_what_other_servers_have(served: Served, paths: str) -> None:
    """What to use instead is said for their routes and all below them. None of those below is one of ours."""
    for path in paths.split():
        assert not any(ours.startswith(f"{path}/") for ours in routes(served))
        for asked in {path, f"{path}/x"} - routes(served).keys():
            assert f": {INSTEAD[paths]}. Routes: " in refused(served, "POST", asked, 404)


@pytest.mark.parametrize(
    ("asked", "near"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/models", "/v1/models"),
        ("/v1/v1/completions", "/v1/completions"),
        ("/v1/health", "/health"),
    ],
)
def test_a_wrong_base_url(served: Served, asked: str, near: str) -> None:
    assert f": use {near}. Routes: " in refused(served, "POST", asked, 404)


def test_a_wrong_method(served: Served) -> None:
    """The error and its header name those that the route takes."""
    for path, methods in routes(served).items():
        if "{" in path:
            continue
        with served.http() as client:
            answer = client.request("DELETE", path)
        allowed = ", ".join(sorted(methods))
        assert answer.status_code == 405 and answer.headers["allow"] == allowed, path
        assert answer.json()["error"]["message"] == f"{path} does not take DELETE; use {allowed}"
