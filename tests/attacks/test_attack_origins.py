"""Pages of other sites that a visitor's browser runs beside a server on the same machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from attacks.raw import address_of, connect, rest, status
from stridelm.server.origins import default_hosts
from support.doubles.server import Served, serving, settle

KINDS = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", None, "json")
ROUTES = ("/v1/completions", "/v1/chat/completions", "/generate", "/abort_request", "/tokenize")
GENERATE = '{"prompt": "x", "max_tokens": 1}'


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("local")) as served:
        yield served
        settle(served)


def test_default_hosts() -> None:
    """Where nobody else can listen its own names; elsewhere any."""
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
def test_another_name(local: Served, host: str, expected: int) -> None:
    """A name that was made to mean this machine is not this server's (DNS rebinding)."""
    with connect(address_of(local.url)) as connection:
        connection.sendall(f"GET /health HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n".encode())
        assert status(rest(connection)) == expected


def test_names_that_are_allowed(tmp_path: pytest.TempPathFactory) -> None:
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
def test_what_a_form_can_send(local: Served, kind: str | None, route: str) -> None:
    """Runs nothing: a browser sends it without asking whether it may."""
    before = settle(local)["stride_engine_steps_total"]
    with local.http(headers={} if kind is None else {"content-type": kind}) as client:
        answer = client.post(route, content=GENERATE)
        assert answer.status_code == 415 and "application/json" in answer.json()["error"]["message"]
    assert settle(local)["stride_engine_steps_total"] == before


@pytest.mark.parametrize("kind", ["application/json", "application/json; charset=utf-8", "Application/JSON"])
def test_json_is_taken(local: Served, kind: str) -> None:
    with local.http(headers={"content-type": kind}) as client:
        assert client.post("/v1/completions", content=GENERATE).status_code == 200


def test_what_needs_no_body(local: Served) -> None:
    """Neither a link nor a page of another site can flush the cache; a tool and the server's own page can."""
    abroad = {"origin": "https://attacker.example"}
    with local.http() as client:
        assert client.get("/flush_cache").status_code == 405
        assert client.post("/flush_cache", headers=abroad).status_code == 403
        assert client.post("/flush_cache", headers={"origin": "null"}).status_code == 403
        assert client.post("/flush_cache", headers={"sec-fetch-site": "cross-site"}).status_code == 403
        assert client.post("/flush_cache", headers={"origin": local.url}).status_code == 200
        assert client.post("/flush_cache").status_code == 200


def test_no_other_page_may_read(local: Served) -> None:
    """There is no answer to a browser's question whether it may."""
    asked = {"origin": "https://attacker.example", "access-control-request-method": "POST"}
    with local.http() as client:
        answers = [client.options("/v1/completions", headers=asked), client.get("/v1/models", headers=asked)]
    assert not any(name.startswith("access-control") for answer in answers for name in answer.headers)
    assert answers[0].status_code == 405
