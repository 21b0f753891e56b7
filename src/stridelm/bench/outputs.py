"""Files that benchmarks write once all is measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Makes the file's directory. Raises ValueError if the file cannot be written inside."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}; name another file") from error


def check_outputs(paths: Iterable[Path | None]) -> None:
    """Raise ValueError, before anything is measured, if one of the files that are to be written could not be."""
    for path in filter(None, paths):
        with writing(path):
            exists = path.exists()
            path.open("a").close()
            if not exists:
                path.unlink()
