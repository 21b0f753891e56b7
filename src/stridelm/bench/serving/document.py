"""A report before it has a format: text, tables and charts, which render.py turns into one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """columns: (heading, whether its values are numbers). rows: the texts of each."""

    title: str
    columns: Sequence[tuple[str, bool]]
    rows: Sequence[Sequence[str]]

    def __post_init__(self) -> None:
        assert all(len(row) == len(self.columns) for row in self.rows)


@dataclass(frozen=True)
class Document:
    title: str
    about: Sequence[tuple[str, str]]
    """What was measured, how and where: name and value."""
    tables: Sequence[Table]
    notes: Sequence[str]
    """What the columns mean, and warnings."""
