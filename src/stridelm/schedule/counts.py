"""Counts that are alike: what is learnt of a step with so many requests or rows tells of steps with about as many."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

from stridelm.compiled import njit


@njit()
def stair(count):
    """The same for counts that are alike: exact up to 8, then quarters of powers of two."""
    if count <= 8:
        return count
    step = 1
    while 8 * step <= count:
        step *= 2
    return (count + step - 1) // step * step


def middle(count: int) -> float:
    """The mean of all counts that are like this one."""
    alike = 1 if count <= 8 else 1 << max(0, (count - 1).bit_length() - 3)
    return stair(count) - (alike - 1) / 2


@njit()
def class_of(count):
    """The number of a count's stair, from 0."""
    size, doubled = stair(count), 0
    while size >= 16:
        size, doubled = size // 2, doubled + 1
    return size if size <= 8 and not doubled else 8 + 4 * doubled + (size - 8) // 2
