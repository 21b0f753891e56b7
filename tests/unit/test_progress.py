"""Progress is shown only to a user who waits at a terminal."""

from __future__ import annotations

import io
import sys

import pytest

from stridelm.progress import bar, no_bars, size, terminal_bar


class Stderr(io.StringIO):
    """A stderr that may claim to be a terminal."""

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


def begin(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> Stderr:
    """Replace stderr. Called inside the test, because pytest installs its own before each."""
    fake = Stderr(terminal)
    monkeypatch.setattr(sys, "stderr", fake)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("FORCE_COLOR", "1")  # a CI sets it for coloured logs, which does not make them a terminal
    return fake


@pytest.mark.parametrize("terminal", [False, True])
def test_a_bar_is_shown_on_a_terminal_alone(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = begin(monkeypatch, terminal)
    with bar("capturing", 12, "graphs") as advance:
        for _ in range(4):
            advance(3)
    assert ("capturing" in stderr.getvalue()) == terminal
    assert ("12 of 12 graphs" in stderr.getvalue()) == terminal
    assert terminal or not stderr.getvalue()


def test_no_bar_is_shown_for_what_is_only_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = begin(monkeypatch, terminal=True)
    with no_bars(), bar("capturing", 12, "graphs") as advance:
        advance(12)
    assert not stderr.getvalue()
    with bar("capturing", 12, "graphs") as advance:
        advance(12)
    assert "capturing" in stderr.getvalue()


def test_what_is_soon_done_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even a control character is written for a total below the minimum; from the minimum on there is a bar."""
    stderr = begin(monkeypatch, True)
    with bar("loading", 2**30 - 1, "bytes", least=2**30) as advance:
        advance(2**30 - 1)
    assert not stderr.getvalue()
    with bar("loading", 2**30, "bytes", least=2**30) as advance:
        advance(2**29)
    assert "512.0 MiB of 1.0 GiB" in stderr.getvalue()


def test_an_error_ends_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cursor is restored and nothing overwrites later output. stdout is left alone throughout."""
    stderr, stdout = begin(monkeypatch, True), sys.stdout

    def fail() -> None:
        with bar("loading", 4, "graphs") as advance:
            advance(1)
            assert sys.stdout is stdout
            raise KeyError("spoilt")

    with pytest.raises(KeyError):
        fail()
    assert sys.stderr is stderr
    assert stderr.getvalue().count("\x1b[?25l") == stderr.getvalue().count("\x1b[?25h") == 1


def test_without_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that was started without one shows nothing and does not fail."""
    monkeypatch.setattr(sys, "stderr", None)
    assert terminal_bar().disable
    with bar("loading", 4, "graphs") as advance:
        advance(4)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (27 * 2**20, "27.0 MiB"),
        (15 * 2**30 + 2**29, "15.5 GiB"),
        (2**41, "2048.0 GiB"),
    ],
)
def test_sizes_as_a_person_reads_them(count: int, text: str) -> None:
    assert size(count) == text
