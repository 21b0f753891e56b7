"""Directories of weights for drafters, and what they contain.

Published heads come as safetensors or as a pickle of plain tensors, and their config.json is often that of another
architecture. So a drafter recognises its weights by tensor names and config together. No code from the directory is
run.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
from collections.abc import Callable, Iterator
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch

from stridelm.models.files import read_headers, read_tensors
from stridelm.text.pointers import refuse_pointer

logger = logging.getLogger(__name__)

PICKLES = ("*.bin", "*.pt", "*.pth")


class Given:
    """A directory that the user named, or one in the model's directory. Raises ValueError where it cannot be read."""

    def __init__(self, path: Path) -> None:
        if not path.is_dir():
            raise ValueError(f"no drafter weights at {path}: give a directory with config.json and its tensors")
        self.path = path

    @cached_property
    def config(self) -> dict[str, Any]:
        file = self.path / "config.json"
        refuse_pointer(file)
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(f"{file} cannot be read ({error}); copy it again") from error
        if not isinstance(config, dict):
            raise ValueError(f"{file} is not a JSON object; copy it again")
        return config

    @cached_property
    def headers(self) -> dict[str, torch.Tensor]:
        """Every tensor without its data, by name."""
        return dict(read_headers(self.path)) if self._is_safe else self._unpickled("meta")

    @cached_property
    def shapes(self) -> dict[str, torch.Size]:
        """Shape of every tensor, by name."""
        return {name: header.shape for name, header in self.headers.items()}

    def tensors(
        self, device: torch.device, wanted: Callable[[str], bool] = lambda name: True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The wanted tensors on the device; on the meta device, without their data."""
        if device.type == "meta":
            yield from ((name, header) for name, header in self.headers.items() if wanted(name))
        elif self._is_safe:
            yield from read_tensors(self.path, device, wanted)
        else:
            yield from ((name, tensor) for name, tensor in self._unpickled(device).items() if wanted(name))

    @property
    def _is_safe(self) -> bool:
        return any(self.path.glob("*.safetensors"))

    def _unpickled(self, device: torch.device | str) -> dict[str, torch.Tensor]:
        """Reads plain tensors only: a pickle with anything else in it is refused, and none of its code is run."""
        files = sorted(file for pattern in PICKLES for file in self.path.glob(pattern))
        if not files:
            raise ValueError(f"{self.path} has no *.safetensors, *.bin or *.pt; copy the head's weights there")
        tensors: dict[str, torch.Tensor] = {}
        for file in files:
            refuse_pointer(file)
            try:
                content = torch.load(file, map_location=device, weights_only=True)
            except (pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
                raise ValueError(
                    f"{file} is not a pickle of plain tensors; save the head's state_dict as safetensors"
                ) from error
            if not isinstance(content, dict) or not all(isinstance(t, torch.Tensor) for t in content.values()):
                raise ValueError(f"{file} holds more than plain tensors; save the head's state_dict as safetensors")
            tensors |= content
        return tensors


def given(path: Path) -> Given:
    """The directory, read only once unless its files change. Raises ValueError if it does not exist."""
    path = path.resolve()
    if not path.is_dir():
        return Given(path)
    return _given(path, max((file.stat().st_mtime_ns for file in os.scandir(path)), default=0))


@lru_cache(maxsize=64)
def _given(path: Path, changed: int) -> Given:
    return Given(path)
