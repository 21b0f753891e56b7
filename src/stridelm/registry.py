"""One small registry. Names map to `module:attribute`, imported on first use, so that listing the entries imports none
of them."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Registry(Generic[T]):
    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, str | T] = {}

    def add(self, name: str, target: str | T) -> None:
        """Register `target`, an object or a lazy "package.module:attribute"."""
        assert name not in self._entries, f"{self.kind} {name!r} is registered twice"
        self._entries[name] = target

    def remove(self, name: str) -> None:
        del self._entries[name]

    def get(self, name: str) -> T:
        """The entry called `name`. Raises ValueError naming the known ones."""
        if not isinstance(name, str) or name not in self._entries:
            known = ", ".join(sorted(self._entries))
            raise ValueError(f"unknown {self.kind} {name!r}; choose one of: {known}")
        entry: Any = self._entries[name]
        if isinstance(entry, str):
            module, _, attribute = entry.partition(":")
            entry = getattr(importlib.import_module(module), attribute)
            self._entries[name] = entry
        return entry

    def place(self, name: str) -> int:
        """How many entries were registered before it; later additions do not change it."""
        return list(self._entries).index(name)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._entries))
