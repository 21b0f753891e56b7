"""What no text and no stack can hold is refused by the parameters themselves, in every field."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import pytest

from stridelm import SamplingParams, Speculation
from stridelm.options import known
from stridelm.params import StructuredOutputs
from stridelm.values import MAX_NESTING, check_plain

HALF = "\ud83d"
DEEP = json.loads('{"a":[' * 60 + "1" + "]}" * 60)
UNFIT: list[Any] = [HALF, [HALF], {HALF: 1}, {"a": [{"b": HALF}]}, DEEP, [DEEP]]
CLASSES: list[tuple[type[Any], list[str]]] = [
    (SamplingParams, [field.name for field in fields(SamplingParams)]),
    (StructuredOutputs, [field.name for field in fields(StructuredOutputs)]),
    (Speculation, ["drafter", "depth", "acceptance", "acceptance_length", *known()]),
]


@pytest.mark.parametrize("value", UNFIT, ids=lambda value: str(type(value).__name__))
@pytest.mark.parametrize(("cls", "name"), [(cls, name) for cls, names in CLASSES for name in names])
def test_every_field(cls: type[Any], name: str, value: Any) -> None:
    """Half a surrogate pair, or nesting beyond the limit, is a ValueError on construction."""
    with pytest.raises(ValueError, match=r".+"):
        cls(**{name: value})


def test_the_limit() -> None:
    """MAX_NESTING levels are accepted, one more is not; and keys count as text."""
    value: Any = "x"
    for _ in range(MAX_NESTING):
        value = [value]
    check_plain("it", value)
    with pytest.raises(ValueError, match="it is nested more than 100 levels deep; make it flatter"):
        check_plain("it", [value])
    with pytest.raises(ValueError, match="it is not valid Unicode"):
        check_plain("it", {"a": {HALF: 2}})
