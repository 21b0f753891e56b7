"""A disk that takes no compiled code stops nothing that can go on without it; what cannot names the remedy."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import stridelm
from stridelm import LLM
from stridelm.compiled import naming_caches
from stridelm.engine import start

PACKAGE = Path(stridelm.__path__[0])
PROGRAM = """
from stridelm.compiled import njit

@njit()
def one(x):
    return x + 1

@njit()
def two(x):
    return 2 * one(x)

print(two(20))
"""


def run(directory: Path, cache: Path | None, limit: int | None = None) -> subprocess.CompletedProcess[str]:
    """The program, with a cache given or with none outside its own directory, and with files of limited size."""
    (directory / "program.py").write_text(PROGRAM, encoding="utf-8")
    where = {"XDG_CACHE_HOME": "/dev/null/cache"} if cache is None else {"NUMBA_CACHE_DIR": str(cache)}
    environment = {name: text for name, text in os.environ.items() if name != "NUMBA_CACHE_DIR"} | where
    environment["PYTHONPATH"] = os.pathsep.join([str(PACKAGE.parent), str(directory)])

    def limited() -> None:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    command = [sys.executable, "-B", "-c", "import program"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, preexec_fn=limited)


def assert_warned_once(ran: subprocess.CompletedProcess[str], path: Path) -> None:
    assert (ran.returncode, ran.stdout) == (0, "42\n"), ran.stderr
    assert ran.stderr.count("compiled CPU kernels cannot be kept") == 1, ran.stderr
    assert str(path) in ran.stderr and "set NUMBA_CACHE_DIR" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_kernels_run_where_files_cannot_be_written_in_full(tmp_path: Path) -> None:
    """What is compiled runs although the cache takes the first bytes of a file alone."""
    assert_warned_once(run(tmp_path, tmp_path / "cache", limit=64), tmp_path / "cache")


def test_kernels_run_without_a_directory_for_them(tmp_path: Path) -> None:
    """The same where no directory can be made, neither beside the source nor in the home directory."""
    (tmp_path / "__pycache__").touch()
    assert_warned_once(run(tmp_path, None), tmp_path / "__pycache__")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(disk)], capture_output=True)
    if made.returncode:
        pytest.skip("this user may not mount a file system")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_kernels_run_on_a_full_disk(small_disk: Path, tmp_path: Path) -> None:
    """The same on a disk without space."""
    assert_warned_once(run(tmp_path, small_disk), small_disk)


def test_a_cache_that_works_is_used(tmp_path: Path) -> None:
    """Without a warning, what was compiled is found again."""
    written = []
    for _ in range(2):
        ran = run(tmp_path, tmp_path / "cache")
        assert (ran.returncode, ran.stdout, ran.stderr) == (0, "42\n", "")
        written.append({path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.nbc")})
    assert len(written[0]) == 2 and written[0] == written[1]


def test_no_other_code_is_cached() -> None:
    """Everything that is cached is cached this way."""
    assert not [path for path in PACKAGE.rglob("*.py") if "cache=True" in path.read_text(encoding="utf-8")]


def test_a_start_says_which_disk_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start that cannot write what it compiles names the directory and the variables."""

    def engine(*_: Any) -> None:
        with open("/dev/full", "wb", buffering=0) as file:
            file.write(b"kernel")

    monkeypatch.setenv("TRITON_CACHE_DIR", "/opt/kernels")
    monkeypatch.setattr(start, "Engine", engine)
    with pytest.raises(ValueError, match=r"No space left.*free some space in /opt/kernels.*set TRITON_CACHE_DIR"):
        LLM()


def test_a_place_that_triton_cannot_use_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The same where Triton's directory cannot be made."""
    caches = pytest.importorskip("triton.runtime.cache")
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(ValueError, match="set TRITON_CACHE_DIR"), naming_caches():
        caches.FileCacheManager("0" * 64)


def test_other_errors_stay_as_they_are(tmp_path: Path) -> None:
    """A file that is missing has nothing to do with compiled code."""
    with pytest.raises(FileNotFoundError), naming_caches():
        (tmp_path / "model.safetensors").read_bytes()
