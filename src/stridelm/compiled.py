"""Compiled code on disk: kept if the disk takes it, and otherwise the error or warning names the place and the remedy.

Numba goes on without a cache, so a disk that is full, over quota or read-only costs a warning. Triton loads what it
compiles from its cache, so there a start must fail.
"""

# mypy: disable-error-code="no-untyped-call,misc"
from __future__ import annotations

import errno
import inspect
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numba as nb
from numba.core.caching import FunctionCache, NullCache

logger = logging.getLogger(__name__)

REFUSALS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}
"""Errors of writes alone."""


def njit(**options: Any) -> Callable[[Any], Any]:
    """Compile with Numba on first use; cached on disk between runs, as far as the disk allows."""

    def decorate(function: Any) -> Any:
        compiled = nb.njit(**options)(function)
        try:
            compiled._cache = _Kept(function)
        except RuntimeError:  # neither beside the source nor in the home directory
            compiled._cache = _NotKept(function)
        return compiled

    return decorate


class _Kept(FunctionCache):
    """Numba's cache, of which no error reaches a caller."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except OSError as error:
            _warn(self.cache_path, str(error))
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except OSError as error:
            _warn(self.cache_path, error.strerror or str(error))


class _NotKept(NullCache):
    """A cache for a function without a directory that can be written."""

    def __init__(self, function: Any) -> None:
        self._path = str(Path(inspect.getfile(function)).parent / "__pycache__")

    def save_overload(self, sig: Any, data: Any) -> None:
        _warn(self._path, "it cannot be written, nor can the cache in the home directory")


_first = iter((True,))
"""Empty after the first warning."""


def _warn(path: str, why: str) -> None:
    if next(_first, False):
        logger.warning(
            "compiled CPU kernels cannot be kept in %s (%s), so that every start compiles them again; free some space "
            "there, make it writable, or set NUMBA_CACHE_DIR to a directory that can be written",
            *(nb.config.CACHE_DIR or path, why),
        )


@contextmanager
def naming_caches() -> Iterator[None]:
    """Raise ValueError with the directories and the remedy if the disk refuses what is compiled inside."""
    try:
        yield
    except OSError as error:
        kernels, path = str(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton/cache"), error.filename
        if error.errno not in REFUSALS and not (path and _in_line(str(path), kernels)):
            raise
        raise ValueError(
            f"the disk does not take what is compiled at the start ({error}): free some space in {kernels} and in the "
            "directory for temporary files, or set TRITON_CACHE_DIR and TMPDIR to directories that can be written"
        ) from error


def _in_line(path: str, other: str) -> bool:
    """Whether the paths are the same, or one is a directory above the other."""
    one, two = Path(path).absolute(), Path(other).absolute()
    return one.is_relative_to(two) or two.is_relative_to(one)
