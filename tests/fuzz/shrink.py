"""Shrinks a failing case: drops and simplifies all that the failure does not need, and prints the rest as a test."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from fuzz.cases import Ask, Case, Checkpoint

PLAIN_PARAMS: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
"""The first replacements to try for a parameter that cannot be dropped."""


def shrink(case: Case, fails: Callable[[Case], bool], seconds: float = 60.0) -> Case:
    """The smallest case found within `seconds` that still fails."""
    end = time.monotonic() + seconds
    shrunk = True
    while shrunk:
        shrunk = False
        for candidate in smaller(case):
            if time.monotonic() > end:
                return case
            if fails(candidate):
                case, shrunk = candidate, True
                break
    return case


def smaller(case: Case) -> Iterator[Case]:
    """Cases that are simpler by one change, the largest changes first."""
    count = len(case.requests)
    for size in sorted({count // 2, 1} - {0}, reverse=True):
        for start in range(0, count, size):
            yield replace(case, requests=case.requests[:start] + case.requests[start + size :])
    for place in range(len(case.faults)):
        yield replace(case, faults=case.faults[:place] + case.faults[place + 1 :])
    for name in case.engine:
        if name != "device":
            yield replace(case, engine={key: value for key, value in case.engine.items() if key != name})
    if case.policy is not None:
        yield replace(case, policy=None)
    plain = replace(Checkpoint(vocab=case.checkpoint.vocab), speaks=case.checkpoint.speaks)
    if case.checkpoint != plain:
        yield replace(case, checkpoint=plain)
    plainer: dict[str, Any] = {
        "heads": (),
        "modules": "",
        "cyclic": False,
        "family": "qwen3",
        "variant": "untied",
        "widths": (),
    }
    for field, value in plainer.items():
        if getattr(case.checkpoint, field) != value:
            yield replace(case, checkpoint=replace(case.checkpoint, **{field: value}))
    for place, ask in enumerate(case.requests):
        for other in _simpler(ask):
            yield replace(case, requests=(*case.requests[:place], other, *case.requests[place + 1 :]))


def _simpler(ask: Ask) -> Iterator[Ask]:
    if ask.arrival and ask.abort is None:
        yield replace(ask, arrival=0)
    if ask.abort is not None:
        yield replace(ask, abort=None)
    if ask.sample:
        yield replace(ask, sample=0)
    for name in ask.speculation:
        yield replace(ask, speculation={key: value for key, value in ask.speculation.items() if key != name})
    for name in ask.params:
        if name not in ("max_tokens", "seed"):
            yield replace(ask, params={key: value for key, value in ask.params.items() if key != name})
    for name, value in PLAIN_PARAMS.items():
        if ask.params.get(name, value) != value:
            yield replace(ask, params={**ask.params, name: value})
    for name, value in ask.params.items():
        yield from (replace(ask, params={**ask.params, name: less}) for less in _less(name, value))
    depth = ask.speculation.get("depth", 0)
    if depth != "auto" and depth > 1:
        yield replace(ask, speculation={**ask.speculation, "depth": depth - 1})
    for prompt in _shorter(ask.prompt):
        yield replace(ask, prompt=prompt)


def _less(name: str, value: Any) -> Iterator[Any]:
    """Simpler values of the parameter."""
    if name == "max_tokens":
        yield from sorted({1, value // 2, value - 1} - {0, value})
    elif name == "seed" and value != 0:
        yield 0
    elif type(value) in (list, tuple) and len(value) > 1:
        yield from (value[:place] + value[place + 1 :] for place in range(len(value)))
    elif isinstance(value, dict) and len(value) > 1:
        yield from ({key: bias for key, bias in value.items() if key != gone} for gone in value)


def _shorter(prompt: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    half = len(prompt) // 2
    if half:
        yield from (prompt[:half], prompt[half:], prompt[1:], prompt[:-1])
    if len(set(prompt)) > 1:
        yield (prompt[-1],) * len(prompt)


def as_test(case: Case, message: str, name: str = "found") -> str:
    """The case as a pytest test, ready to be added beside fuzz/kept.py."""
    sentence = message.splitlines()[0][:100].replace('"""', "'''").replace("\\", "/")
    names = sorted(
        {part for part in ("Ask", "BadRequest", "Case", "Checkpoint", "ClosedStream", "Raises") if part in repr(case)}
    )
    requests = "".join(f"            {ask!r},\n" for ask in case.requests)
    rest = replace(case, requests=())
    inside = repr(rest).removeprefix("Case(").removesuffix(")")
    return (
        f"from fuzz.cases import {', '.join(names)}\nfrom fuzz.checks import check\n\n\n"
        f'def test_{name}() -> None:\n    """{sentence}"""\n'
        f"    case = Case(\n        {inside + ',' if inside else ''}\n        requests=(\n{requests}        ),\n    )\n"
        f"    check(case)\n"
    )
