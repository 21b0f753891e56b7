"""Waiting threads go to sleep soon, wherever Stride computes, unless the user has set otherwise."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stridelm.threads import THEIRS, WAITING, settle_waiting
from support.doubles.server import serving

SPIN = "GOMP_SPINCOUNT"
SAYS = f"""
import os, sys
{{first}}
import stridelm
assert ("torch" in sys.modules) == bool({{first!r}}), "importing the package imports no torch"
import torch
print(os.environ.get("{SPIN}"))
"""


def clean(**more: str) -> dict[str, str]:
    """This process's environment without what Stride has set."""
    return {**{name: value for name, value in os.environ.items() if name not in THEIRS}, **more}


def says(first: str = "", **environment: str) -> str:
    command = [sys.executable, "-c", SAYS.format(first=first)]
    done = subprocess.run(command, env=clean(**environment), capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_it_is_settled_before_torch_is_there() -> None:
    """Importing the package first is enough; after torch is imported it is too late, and nothing is changed."""
    assert says() == WAITING[SPIN]
    assert says("import torch") == "None"


@pytest.mark.parametrize("name", THEIRS)
def test_the_users_own_choice_holds(name: str) -> None:
    """In any spelling; nothing is added to it."""
    environment = {name: "7"}
    settle_waiting(environment, {})
    assert environment == {name: "7"}


def test_openmp_hears_it() -> None:
    """The library's own report when torch loads it shows that it was set in time."""
    program = "import stridelm, torch"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=clean(OMP_DISPLAY_ENV="VERBOSE"),
        capture_output=True,
        text=True,
        check=True,
    )
    if SPIN not in done.stderr:
        pytest.skip("this torch's OpenMP is not GNU's")
    assert f"{SPIN} = '{WAITING[SPIN]}'" in done.stderr


def test_too_late_is_said_once_to_who_looks_closely(caplog: pytest.LogCaptureFixture) -> None:
    environment: dict[str, str] = {}
    with caplog.at_level(logging.DEBUG, "stridelm.threads"):
        settle_waiting(environment, {"torch": object()})
    assert environment == {} and len(caplog.records) == 1 and caplog.records[0].levelno == logging.DEBUG
    assert SPIN in caplog.text


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="reads /proc")
def test_the_servers_engine_has_it(tmp_path: Path) -> None:
    """The engine's process inherits it, and the user's own setting too."""
    for given, found in (({}, WAITING[SPIN]), ({SPIN: "17"}, "17")):
        folder = tmp_path / found
        folder.mkdir()
        with pytest.MonkeyPatch.context() as patch:
            for name in THEIRS:
                patch.delenv(name, raising=False)
            with serving(folder, environment=given) as served:
                (child,) = (
                    Path(f"/proc/{served.process.pid}/task/{served.process.pid}/children").read_text().split()[:1]
                )
                lines = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
                assert f"{SPIN}={found}".encode() in lines
                served.stop()
