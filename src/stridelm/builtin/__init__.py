"""The model that ships with the package: a small decoder for Python source, trained with `stride train`."""

from __future__ import annotations

from pathlib import Path


def builtin_path() -> Path:
    """Directory of the built-in checkpoint. Raises ValueError if the installation lacks it."""
    path = Path(__file__).parent / "model"
    if not (path / "config.json").is_file():
        raise ValueError("this installation has no built-in model; name a model, or reinstall stridelm")
    return path
