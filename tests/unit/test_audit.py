"""The audit of dependencies distinguishes "none vulnerable" from "the advisories could not be reached"."""

from __future__ import annotations

import importlib.util
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

spec = importlib.util.spec_from_file_location("audit", Path(__file__).parents[2] / "tools" / "audit.py")
assert spec is not None and spec.loader is not None
audit = importlib.util.module_from_spec(spec)
spec.loader.exec_module(audit)


class Service(BaseHTTPRequestHandler):
    """Its path says what it answers."""

    def do_GET(self) -> None:
        _, kind, *_ = self.path.split("/")
        body = {"whole": b'{"vulnerabilities": []}', "files": b'{"urls": []}', "page": b"<html>"}.get(kind, b"")
        self.send_response(200 if body else 404)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def service() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Service) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_what_stride_runs_on() -> None:
    """Its dependencies and theirs, but nothing that is only used to develop it."""
    versions = audit.installed("stridelm")
    assert {"torch", "sympy", "mpmath", "numba", "llvmlite"} <= set(versions)
    assert not {"pytest", "ruff", "schemathesis"} & set(versions)
    assert "+" not in versions["torch"]


@pytest.mark.parametrize(
    ("kind", "word"), [("whole", None), ("files", "list any"), ("page", "Expecting"), ("x", "404")]
)
def test_whether_advisories_can_be_had(
    service: str, kind: str, word: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "ADVISORIES", f"{service}/{kind}")
    why = audit.silence("torch", "2.13.0")
    assert why is None if word is None else word in why


def test_nobody_listens(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It reports that in one line, and does not fail."""
    monkeypatch.setattr(audit, "ADVISORIES", "http://127.0.0.1:1")
    assert audit.main() == 0
    said = capsys.readouterr().out
    assert said.startswith("NOT AUDITED") and said.count("\n") == 1


def test_a_vulnerability_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """So does an audit that could not finish: the exit code is pip-audit's."""
    monkeypatch.setattr(audit, "silence", lambda *_: None)
    asked: list[str] = []

    def run(command: list[str]) -> subprocess.CompletedProcess[str]:
        asked.extend(Path(command[-1]).read_text(encoding="utf-8").splitlines())
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(subprocess, "run", run)
    assert audit.main() == 1
    assert f"torch=={audit.installed('stridelm')['torch']}" in asked
    assert not any(line.startswith("stridelm") for line in asked)
