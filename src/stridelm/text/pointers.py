"""Git LFS pointers: what `git clone` leaves in place of large files where Git LFS is not set up."""

from __future__ import annotations

from pathlib import Path

BEGINNING = b"version https://git-lfs.github.com/spec/"


def refuse_pointer(file: Path) -> None:
    """Raise ValueError, with the remedy, if a file is there and is a pointer to itself."""
    try:
        with file.open("rb") as opened:
            is_pointer = opened.read(len(BEGINNING)) == BEGINNING
    except OSError:
        return  # whoever reads it says why it cannot be read
    if is_pointer:
        raise ValueError(
            f"{file} is a Git LFS pointer and not the file itself: install Git LFS and run `git lfs pull` in "
            f"{file.parent}, or download the file"
        )
