"""Records how a checkpoint was made: logs and provenance."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch


class JsonLines:
    """An append-only log, one JSON object per line, flushed after each."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._stream = path.open("a", encoding="utf-8")

    def write(self, record: Mapping[str, Any]) -> None:
        self._stream.write(json.dumps(record) + "\n")
        self._stream.flush()

    def close(self) -> None:
        self._stream.close()


def hardware(device: torch.device) -> dict[str, Any]:
    """The machine in a few words."""
    facts: dict[str, Any] = {
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "device": device.type,
    }
    if device.type == "cuda":
        facts["device"] = torch.cuda.get_device_name(device)
    return facts


def versions() -> dict[str, str]:
    """The versions of Python and of the libraries that results depend on."""
    found = {"python": platform.python_version()}
    for name in ("stridelm", "torch", "triton", "transformers", "tokenizers", "numpy"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def provenance(stage: str, device: torch.device, *settings: Any, **facts: Any) -> dict[str, Any]:
    """A JSON-ready record: the stage, its settings (dataclasses), the facts, the machine, versions and
    command."""
    return {
        "stage": stage,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        # Absolute paths describe one machine's folders, which do not belong in a published record.
        "command": [Path(word).name if word.startswith("/") else word for word in sys.argv],
        "settings": {type(s).__name__: asdict(s) for s in settings if is_dataclass(s) and not isinstance(s, type)},
        **facts,
        "hardware": hardware(device),
        "versions": versions(),
    }
