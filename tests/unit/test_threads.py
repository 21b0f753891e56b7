"""Waiting threads go to sleep soon, wherever Stride computes, unless the user has set otherwise."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import psutil
import pytest

from stridelm.threads import THEIRS, WAITING, settle_waiting
from support.doubles.server import engines_of, until

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


@pytest.mark.parametrize(("given", "found"), [({}, WAITING[SPIN]), ({SPIN: "17"}, "17")], ids=["ours", "the user's"])
def test_the_servers_engine_has_it(given: dict[str, str], found: str) -> None:
    """The engine's process inherits it, and the user's own setting too. It need not get as far as serving."""
    command = [sys.executable, "-m", "stridelm.cli.main", "serve", "--port", "0"]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, env=clean(**given), stdout=quiet, stderr=quiet) as server:
        process, engines = psutil.Process(server.pid), list[psutil.Process]()

        def started() -> bool:
            assert server.poll() is None, "the server ended"
            engines[:] = engines_of(server.pid)
            return bool(engines)

        try:
            until("the engine's process is started", started)
            assert engines[0].environ()[SPIN] == found
        finally:
            for one in (process, *engines):
                one.kill()
