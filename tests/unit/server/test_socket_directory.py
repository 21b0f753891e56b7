"""A start removes the sockets' directories of servers that were killed, and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from stridelm.server.socket_directory import LOCK, PREFIX, SocketDirectory

OWNER = (
    "import sys, time; from stridelm.server.socket_directory import SocketDirectory;"
    "print(SocketDirectory().path, flush=True); sys.stdin.read()"
)


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where temporary files are, at a short address."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        monkeypatch.setenv("TMPDIR", directory)
        monkeypatch.setattr(tempfile, "tempdir", None)
        yield Path(directory)


def owner() -> tuple[subprocess.Popen[str], Path]:
    """Another process with a directory of its own."""
    process = subprocess.Popen([sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def killed(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()


def test_a_killed_servers_is_removed(temporary: Path) -> None:
    """Whatever it has left in it; and a living server's stays until that is killed too."""
    (first, dead), (second, living) = owner(), owner()
    (dead / "0123456789abcdef.in").touch()
    killed(first)
    assert dead.is_dir() and living.is_dir()
    mine = SocketDirectory()
    assert not dead.exists() and (living / LOCK).exists() and Path(mine.path).is_dir()
    killed(second)
    SocketDirectory().remove()
    assert not living.exists() and Path(mine.path).is_dir(), "this process lives"
    mine.remove()
    assert not any(temporary.iterdir())


def test_what_is_not_a_servers_stays(temporary: Path) -> None:
    """No file, no directory without a lock, and nothing to which a link points."""
    (temporary / f"{PREFIX}file").touch()
    (temporary / f"{PREFIX}empty").mkdir()
    elsewhere = temporary / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / LOCK).touch()
    (temporary / f"{PREFIX}link").symlink_to(elsewhere)
    linked = temporary / f"{PREFIX}linked"
    linked.mkdir()
    (linked / LOCK).symlink_to(elsewhere / LOCK)
    before = set(temporary.rglob("*"))
    SocketDirectory().remove()
    assert set(temporary.rglob("*")) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file another user's")
def test_other_users_stay(temporary: Path) -> None:
    """Even if root could remove it."""
    process, theirs = owner()
    killed(process)
    os.chown(theirs, 65534, 65534)
    SocketDirectory().remove()
    assert theirs.exists()


def test_many_starts_at_once(temporary: Path) -> None:
    """Servers that start together beside many leftovers all keep their own directory, and none is left over."""
    owners = [owner() for _ in range(6)]
    for process, _ in owners:
        killed(process)
    with ThreadPoolExecutor(16) as pool:
        mine = list(pool.map(lambda _: SocketDirectory(), range(64)))
    assert {Path(one.path) for one in mine} == set(temporary.iterdir())
    assert all((Path(one.path) / LOCK).is_file() for one in mine)
    for one in mine:
        one.remove()


def test_no_place(monkeypatch: pytest.MonkeyPatch, temporary: Path) -> None:
    """The error names the variable that says where it could be."""
    monkeypatch.setattr(tempfile, "tempdir", str(temporary / "nowhere"))
    with pytest.raises(ValueError, match=r"nowhere.*TMPDIR"):
        SocketDirectory()
