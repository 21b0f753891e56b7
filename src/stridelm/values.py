"""Values as callers give them: checked where they come in, with an error that names the remedy, and made plain."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable, Mapping, Set
from dataclasses import field
from numbers import Integral, Real
from typing import Any

LARGEST = 2**31 - 1
"""Of counts that may be asked for."""


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

    The rest is for fields of Options, which are checked by it: the bounds of a number, as `number` has them, or what
    makes a plain value of what is given and raises ValueError where it cannot.
    """
    limits = {"low": low, "high": high, "open_low": open_low}
    return field(default=default, metadata={"help": text, "limits": limits, "parse": parse})


def number(name: str, value: Any, low: float, high: float, *, whole: bool = False, open_low: bool = False) -> float:
    """`value` as Python's own number, numpy's being taken too.

    Raises ValueError unless it is a finite number in [low, high], or (low, high] if `open_low`.
    """
    bad = isinstance(value, bool) or not isinstance(value, Integral if whole else Real)
    if bad or not low <= value <= high or (open_low and value == low):  # NaN is in no range
        kind = "an integer" if whole else "a number"
        raise ValueError(f"{name} must be {kind} {'above' if open_low else 'from'} {low} to {high}; got {value!r}")
    return int(value) if whole or isinstance(value, int) else float(value)


def settle_number(owner: Any, name: str, low: float, high: float, *, optional: bool = False, **limits: bool) -> None:
    """Check a field of a frozen dataclass, from its own construction, and make it a plain number."""
    value = getattr(owner, name)
    if value is not None or not optional:
        object.__setattr__(owner, name, number(name, value, low, high, **limits))


def token_ids(name: str, value: Any) -> list[int]:
    """`value` as a list of Python's own integers: from any sequence of whole numbers, numpy array or tensor.

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
    return values


def check_flag(name: str, value: Any) -> None:
    """Raise ValueError unless `value` is True or False: "no" would count as true."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False; got {value!r}")


def check_known(names: Iterable[Any], known: Iterable[str], what: str) -> None:
    """Raise ValueError for a name that is none of those that are known."""
    unknown = sorted(str(name) for name in set(names) - set(known))
    if unknown:
        raise ValueError(f"unknown {what} {', '.join(unknown)}; known: {', '.join(sorted(known))}")


def json_text(value: Any) -> str:
    """JSON with its keys in the order given, which schemas mean something by. Raises ValueError for what is none."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"this is no JSON ({error}); give plain values") from error


def check_count(name: str, count: int, most: int, what: str) -> None:
    """Raise ValueError if there are more of something than a request may bring: whoever shares its batch pays too."""
    if count > most:
        raise ValueError(f"{name} has {count} {what}; at most {most} are taken: leave some out")


def shortened(value: Any) -> str:
    """What was given, for an error message of one line."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
