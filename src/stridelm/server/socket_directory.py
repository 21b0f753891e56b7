"""The directory for a server's sockets. One that was left by a server that was killed is removed by the next start."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

import zmq

PREFIX, IN_IT = "stride-", len("12345678/0123456789abcdef.out")
"""How its name begins, and the characters that come after this in a socket's address."""
LOCK = "owner.lock"


class SocketDirectory:
    """A new one, accessible only to its owner, and locked as long as this process lives. Raises ValueError if there is
    no place for it, or if sockets in it would have too long an address."""

    def __init__(self) -> None:
        try:
            temporary = tempfile.gettempdir()
            most = zmq.IPC_PATH_MAX_LEN - len(f"/{PREFIX}") - IN_IT
            if len(os.fsencode(temporary)) > most:
                raise ValueError(
                    f"the directory for temporary files, {temporary}, is too long for sockets in it to have an "
                    f"address: set TMPDIR to one of at most {most} bytes, such as /tmp"
                )
            _sweep(Path(temporary))
            self.path = tempfile.mkdtemp(prefix=PREFIX)
            self._lock = _locked(Path(self.path))
        except OSError as error:
            raise ValueError(
                f"no directory for sockets can be made ({error}): set TMPDIR to a directory that can be written, on a "
                "disk with space left"
            ) from error

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _locked(directory: Path) -> int:
    """The descriptor of the directory's new lock. Nobody sees the file before it is locked, or it could be taken for
    a dead process's."""
    unnamed = directory / f"{LOCK}.new"
    descriptor = os.open(unnamed, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    unnamed.rename(directory / LOCK)
    return descriptor


def _sweep(temporary: Path) -> None:
    """Remove directories whose processes have ended: ours, and with a lock that nobody holds."""
    for directory in temporary.glob(f"{PREFIX}*"):
        with suppress(OSError):  # not ours, no lock, a lock that is held, or another start has just removed it
            found = directory.lstat()
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
                _remove_if_left(directory)


def _remove_if_left(directory: Path) -> None:
    """Raises OSError unless its lock is free."""
    descriptor = os.open(directory / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(directory)
    finally:
        os.close(descriptor)
