"""Checks of values from callers, with errors that name the remedy, and conversion to plain Python types."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable, Mapping, Set
from dataclasses import field
from numbers import Integral, Real
from typing import Any

LARGEST = 2**31 - 1
"""Largest count that an option accepts."""
MAX_NESTING = 100
"""Levels of lists and mappings in a value: several times as many as schemas of real tools have, and a fraction of those
that exhaust the stack."""


def option(
    default: Any,
    text: str,
    *,
    low: float = 0,
    high: float = LARGEST,
    open_low: bool = False,
    parse: Callable[[Any], Hashable] | None = None,
) -> Any:
    """A field with its help text, which the command line shows.

    The rest is for fields of Options and says how to check them: the bounds of a number, as in `number`, or `parse`,
    which turns the given value into a plain one and raises ValueError if it cannot.
    """
    limits = {"low": low, "high": high, "open_low": open_low}
    return field(default=default, metadata={"help": text, "limits": limits, "parse": parse})


def number(name: str, value: Any, low: float, high: float, *, whole: bool = False, open_low: bool = False) -> float:
    """`value` as a Python int or float; numpy numbers are accepted.

    Raises ValueError unless it is a finite number in [low, high], or (low, high] if `open_low`.
    """
    bad = isinstance(value, bool) or not isinstance(value, Integral if whole else Real)
    if bad or not low <= value <= high or (open_low and value == low):  # NaN fails the comparison
        kind = "an integer" if whole else "a number"
        raise ValueError(f"{name} must be {kind} {'above' if open_low else 'from'} {low} to {high}; got {value!r}")
    return int(value) if whole or isinstance(value, int) else float(value)


def settle_number(owner: Any, name: str, low: float, high: float, *, optional: bool = False, **limits: bool) -> None:
    """Check a field of a frozen dataclass and make it a plain number. Called on construction."""
    value = getattr(owner, name)
    if value is not None or not optional:
        object.__setattr__(owner, name, number(name, value, low, high, **limits))


def token_ids(name: str, value: Any) -> list[int]:
    """`value` as a list of Python ints: from any sequence of whole numbers, numpy array or tensor.

    Raises ValueError for anything else, text and bytes included.
    """
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, str | bytes | bytearray | Mapping | Set) or not isinstance(value, Iterable):
        raise ValueError(f"{name} must be a list of token ids; got {shortened(value)}")
    ids = list(value)
    wrong = [t for t in ids if type(t) is not int and (isinstance(t, bool) or not isinstance(t, Integral))]
    if wrong:
        raise ValueError(f"{name}: token ids must be whole numbers; got {shortened(wrong[:4])}")
    return [int(t) for t in ids]


def sequences(name: str, value: Any) -> list[list[int]]:
    """Lists of token ids, none of them empty. Raises ValueError for anything else."""
    if isinstance(value, str | bytes | Mapping | Set) or not isinstance(value, Iterable):
        raise ValueError(f"{name} takes a list of lists of token ids; got {shortened(value)}")
    lists = [token_ids(name, ids) for ids in value]
    if not all(lists):
        raise ValueError(f"{name} holds an empty sequence; remove it")
    return lists


def strings(name: str, value: Any) -> tuple[str, ...]:
    """One string or several, none of them empty. Raises ValueError for anything else."""
    if not isinstance(value, Iterable) or isinstance(value, Mapping):
        raise ValueError(f"{name} takes a string or a list of strings; got {shortened(value)}")
    values = (value,) if isinstance(value, str) else tuple(value)
    if any(not isinstance(word, str) for word in values):
        raise ValueError(f"{name} takes a string or a list of strings; got {shortened(value)}")
    if not all(values):
        raise ValueError(f"{name} holds an empty string, which would match everywhere; remove it")
    check_plain(name, values)
    return values


def check_text(name: str, text: str) -> None:
    """Raise ValueError for text with half a surrogate pair, which has no UTF-8."""
    try:
        text.isascii() or text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} is not valid Unicode ({error.reason}): decode it as UTF-8 first") from error


def check_plain(name: str, value: Any, levels: int = MAX_NESTING) -> None:
    """Raise ValueError for a value with such text anywhere, or nested deeper than `levels`."""
    if isinstance(value, str):
        check_text(name, value)
    elif isinstance(value, Mapping | list | tuple):
        if not levels:
            raise ValueError(f"{name} is nested more than {MAX_NESTING} levels deep; make it flatter")
        if isinstance(value, Mapping):
            check_plain(name, list(value), 1)
            value = value.values()
        for one in value:
            if not isinstance(one, int):  # prompts are long lists of them
                check_plain(name, one, levels - 1)


def check_flag(name: str, value: Any) -> None:
    """Raise ValueError unless `value` is True or False: "no" would count as true."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False; got {value!r}")


def check_known(names: Iterable[Any], known: Iterable[str], what: str) -> None:
    """Raise ValueError for any unknown name."""
    unknown = sorted(str(name) for name in set(names) - set(known))
    if unknown:
        raise ValueError(f"unknown {what} {', '.join(unknown)}; known: {', '.join(sorted(known))}")


def json_text(value: Any) -> str:
    """JSON with its keys in the order given, which matters in schemas. Raises ValueError for what JSON cannot
    express."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"this is not JSON ({error}); give plain values") from error


def check_count(name: str, count: int, most: int, what: str) -> None:
    """Raise ValueError if a request has too many of something, which would slow down the whole batch."""
    if count > most:
        raise ValueError(f"{name} has {count} {what}; at most {most} are allowed: leave some out")


def shortened(value: Any) -> str:
    """The repr of a value, cut to fit an error message of one line."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
