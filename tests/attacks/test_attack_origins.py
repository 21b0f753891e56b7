"""Web pages of other origins, opened in a browser that runs on the same machine as the server."""

from __future__ import annotations

import pytest

from attacks.raw import address_of, connect, rest, status
from stridelm.server.origins import default_hosts
from support.doubles.server import Served, serving, settle

KINDS = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", None, "json")
ROUTES = ("/v1/completions", "/v1/chat/completions", "/generate", "/abort_request", "/tokenize")
GENERATE = '{"prompt": "x", "max_tokens": 1}'


@pytest.fixture
def local(stormed: Served) -> Served:
    """Listens on a loopback address, and nothing runs."""
    settle(stormed)
    return stormed


def test_default_hosts() -> None:
    """A loopback address allows only its own names; any other address allows any name."""
    assert set(default_hosts("127.0.0.2")) == {"localhost", "127.0.0.1", "[::1]", "127.0.0.2"}
    assert default_hosts("0.0.0.0") == default_hosts("example.org") == default_hosts("::") == ("*",)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("localhost", 200),
        ("LOCALHOST:8000", 200),
        ("127.0.0.1:1", 200),
        ("[::1]:8000", 200),
        ("attacker.example", 403),
        ("attacker.example:8000", 403),
        ("localhost.attacker.example", 403),
        ("127.0.0.1.nip.io", 403),
        ("", 403),
    ],
)
def test_host_names(local: Served, host: str, expected: int) -> None:
    """A foreign name that resolves to this machine is refused (DNS rebinding)."""
    with connect(address_of(local.url)) as connection:
        connection.sendall(f"GET /health HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n".encode())
        assert status(rest(connection)) == expected


def test_allowed_hosts(tmp_path: pytest.TempPathFactory) -> None:
    with serving(tmp_path, "--allowed-hosts", "*.example.org", "--allowed-hosts", "own") as served:  # type: ignore[arg-type]
        for host, expected in (("a.example.org:80", 200), ("own", 200), ("example.com", 403), ("localhost", 403)):
            with served.http(headers={"host": host}) as client:
                assert client.get("/health").status_code == expected


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", None, "json"]
)
@pytest.mark.parametrize(
    "route", ["/v1/completions", "/v1/chat/completions", "/generate", "/abort_request", "/tokenize"]
)
def test_content_types_of_forms(local: Served, kind: str | None, route: str) -> None:
    """They run nothing: a browser sends them without a CORS preflight."""
    before = settle(local)["stride_engine_steps_total"]
    with local.http(headers={} if kind is None else {"content-type": kind}) as client:
        answer = client.post(route, content=GENERATE)
        assert answer.status_code == 415 and "application/json" in answer.json()["error"]["message"]
    assert settle(local)["stride_engine_steps_total"] == before


@pytest.mark.parametrize("kind", ["application/json", "application/json; charset=utf-8", "Application/JSON"])
def test_json_is_accepted(local: Served, kind: str) -> None:
    with local.http(headers={"content-type": kind}) as client:
        assert client.post("/v1/completions", content=GENERATE).status_code == 200


def test_requests_without_a_body(local: Served) -> None:
    """Neither a link nor a page of another origin can flush the cache; a tool and the server's own page can."""
    foreign = {"origin": "https://attacker.example"}
    with local.http() as client:
        assert client.get("/flush_cache").status_code == 405
        assert client.post("/flush_cache", headers=foreign).status_code == 403
        assert client.post("/flush_cache", headers={"origin": "null"}).status_code == 403
        assert client.post("/flush_cache", headers={"sec-fetch-site": "cross-site"}).status_code == 403
        assert client.post("/flush_cache", headers={"origin": local.url}).status_code == 200
        assert client.post("/flush_cache").status_code == 200


def test_no_cors_headers(local: Served) -> None:
    """A CORS preflight gets no permission."""
    preflight = {"origin": "https://attacker.example", "access-control-request-method": "POST"}
    with local.http() as client:
        answers = [client.options("/v1/completions", headers=preflight), client.get("/v1/models", headers=preflight)]
    assert not any(name.startswith("access-control") for answer in answers for name in answer.headers)
    assert answers[0].status_code == 405
