"""Rows as products take them: dense, or already quantised by the kernel that made them.

A product that quantises its rows says in which form (`RowForm`); what makes the rows may then hand over `QuantisedRows`
instead of a tensor, with the same numbers, one launch earlier.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

import torch


class RowForm(Enum):
    """Which of a row's numbers, in eight bits (plain_fp8.py), share a scale, and what scales may be."""

    BLOCKS = "blocks"
    """Every 128 columns."""
    POWERS = "powers"
    """The same, and scales are powers of two."""
    WHOLE = "whole"
    """All of them."""

    @property
    def by_block(self) -> bool:
        return self is not RowForm.WHOLE


@dataclass(frozen=True, eq=False)  # hashed by identity: the compiler hashes what it traces
class QuantisedRows:
    """Rows that were rounded to `dtype` and then quantised. Legend: N rows, I width, S scales of a row."""

    q_NI: torch.Tensor
    """In e4m3."""
    scales_SN: torch.Tensor
    """float32."""
    dtype: torch.dtype
    """Of the rows, and so of products with them."""
    form: RowForm
    dense_NI: torch.Tensor | None = None
    """The rows before they were quantised, where some readers take them as they are."""

    @property
    def shape(self) -> torch.Size:
        return self.q_NI.shape


Rows: TypeAlias = torch.Tensor | QuantisedRows


def dense_of(x: Rows) -> torch.Tensor:
    """The rows before they were quantised, which must have been kept."""
    if isinstance(x, torch.Tensor):
        return x
    assert x.dense_NI is not None
    return x.dense_NI
