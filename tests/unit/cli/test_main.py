"""The command line's entry point: exit codes, one-line errors, and a response without importing torch."""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
from typing import Any

import pytest

from stridelm.cli import main as entry_point

HELP = """
import sys
from stridelm.cli.main import main
try:
    main(sys.argv[1:])
finally:
    assert "torch" not in sys.modules
"""


class FakeCommand:
    """A subcommand that raises the given exception or returns the given code."""

    def __init__(self, outcome: Any) -> None:
        self.outcome = outcome

    def add_parser(self, subparsers: Any) -> None:
        subparsers.add_parser("inspect").add_argument("--depth", type=int)

    def run(self, args: argparse.Namespace) -> int:
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome(args)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts a FakeCommand in place of `inspect`."""
    real = importlib.import_module

    def install(outcome: Any) -> None:
        fake = FakeCommand(outcome)
        names = {"stridelm.cli.inspect": fake}
        monkeypatch.setattr(importlib, "import_module", lambda name: names.get(name) or real(name))

    return install


def test_runs_the_subcommand(command: Any) -> None:
    command(lambda args: args.depth)
    assert entry_point.main(["inspect", "--depth", "7"]) == 7


def test_a_value_error_is_one_line_and_exit_code_2(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    command(ValueError("no model at x:\n  give a directory"))
    assert entry_point.main(["inspect"]) == 2
    assert capsys.readouterr().err == "stride: error: no model at x: give a directory\n"


def test_interrupt_is_130(command: Any) -> None:
    command(KeyboardInterrupt())
    assert entry_point.main(["inspect"]) == 130


def test_a_fault_of_ours_keeps_its_traceback(command: Any) -> None:
    command(AssertionError("ledger"))
    with pytest.raises(AssertionError):
        entry_point.main(["inspect"])


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "COMMAND"),
        (["nonsense"], "nonsense"),
        (["inspect", "--depht", "3"], "--depht"),
        (["inspect", "--dep", "3"], "--dep"),
        (["inspect", "--depth", "x"], "invalid int value"),
    ],
)
def test_misuse_is_exit_code_2(argv: list[str], says: str, command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Abbreviations are errors too: they would change meaning when an option is added."""
    command(lambda args: 0)
    with pytest.raises(SystemExit) as exit_:
        entry_point.main(argv)
    assert exit_.value.code == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["--help"], ["--version"], ["nonsense"]])
def test_answers_without_torch(argv: list[str]) -> None:
    run = subprocess.run([sys.executable, "-c", HELP, *argv], capture_output=True, text=True, check=False)
    assert "AssertionError" not in run.stderr
    assert run.returncode == (2 if argv == ["nonsense"] else 0), run.stderr


@pytest.mark.parametrize("name", sorted(entry_point.COMMANDS))
def test_help_of_each_subcommand(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        entry_point.main([name, "--help"])
    assert exit_.value.code == 0
    assert f"stride {name}" in capsys.readouterr().out


@pytest.mark.parametrize("name", sorted(entry_point.COMMANDS))
def test_help_of_a_subcommand_needs_no_torch(name: str) -> None:
    run = subprocess.run([sys.executable, "-c", HELP, name, "--help"], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
