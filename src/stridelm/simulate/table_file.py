"""Cost tables as files. docs/simulation.md describes the format; what `stride bench cost` does not know can be added by
hand."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stridelm.bench.outputs import writing
from stridelm.simulate.curve import DecodePoint, PromptPoint
from stridelm.simulate.table import PLAIN, CostTable, DrafterCosts, EngineLimits, RecordedRequest
from stridelm.values import number

FORMAT = "stride-cost-table-2"
READABLE = ("stride-cost-table-1", FORMAT)
"""The first says nothing of drafters that wait."""
REMEDY = "`stride bench cost` writes such a file"


def write_table(table: CostTable, path: Path) -> None:
    """Raises ValueError if the file cannot be written."""
    with writing(path):
        path.write_text(as_text(table), encoding="utf-8")


def as_text(table: CostTable) -> str:
    """A point or a request per line, so that versions of a table can be compared."""
    drafters = {
        name: {
            "rows_by_depth": list(costs.rows_by_depth),
            "usual_depth": costs.usual_depth,
            "host_bound": costs.host_bound,
            "may_wait": costs.may_wait,
            "decode": [[p.requests, p.rows, p.depth, round(p.context, 1), _short(p.seconds)] for p in costs.decode],
            "prompts": [[p.rows, round(p.context, 1), _short(p.seconds)] for p in costs.prompts],
        }
        for name, costs in table.drafters.items()
    }
    requests = [
        {**asdict(each), "chances": {name: list(map(_short, levels)) for name, levels in each.chances.items()}}
        for each in table.requests
    ]
    whole = {
        "format": FORMAT,
        "hardware": table.hardware,
        "model": table.model,
        "engine": asdict(table.engine),
        "stairs": list(table.stairs),
        "drafters": drafters,
        "scenario": table.scenario,
        "requests": requests,
        "about": dict(table.about),
    }
    return _lines(whole) + "\n"


def read_table(path: Path) -> CostTable:
    """Raises ValueError for a file that is not a table, or whose points do not make one."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {path}: {error}; {REMEDY}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON (line {error.lineno}: {error.msg}); {REMEDY}") from error
    try:
        return _table(found)
    except (KeyError, TypeError, AttributeError) as error:
        missing = f"has no {error}" if isinstance(error, KeyError) else f"has an entry of the wrong kind ({error})"
        raise ValueError(f"{path} {missing}; {REMEDY}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _table(found: Any) -> CostTable:
    if not isinstance(found, dict) or found.get("format") not in READABLE:
        raise ValueError(f"not a cost table of a known version ({', '.join(READABLE)}); {REMEDY}")
    stairs = tuple(int(number("stairs", each, 1, 2**31, whole=True)) for each in found.get("stairs", ()))
    drafters = {name: _drafter(name, each, stairs) for name, each in found["drafters"].items()}
    if PLAIN not in drafters:
        raise ValueError(f"drafters has no {PLAIN!r}, with which others are compared; {REMEDY}")
    table = CostTable(
        hardware=str(found["hardware"]),
        model=str(found["model"]),
        engine=_limits(found["engine"]),
        drafters=drafters,
        stairs=stairs,
        scenario=str(found.get("scenario", "")),
        requests=tuple(map(_request, found.get("requests", ()))),
        about=found.get("about", {}),
    )
    if stairs and max(stairs) < table.most_requests:
        raise ValueError(
            f"the largest of stairs is {max(stairs)} and points have {table.most_requests} requests; add stairs "
            "for them"
        )
    return table


def _limits(found: Mapping[str, Any]) -> EngineLimits:
    limits = EngineLimits(**found)
    for name in ("max_num_batched_tokens", "page_size", "num_pages"):
        number(f"engine.{name}", getattr(limits, name), 1, 2**31, whole=True)
    number("engine.max_model_len", limits.max_model_len, 2, 2**31, whole=True)
    number("engine.itl_target_ms", limits.itl_target_ms, 0, 1e6)
    number("engine.lag", limits.lag, 0, 1, whole=True)
    number("engine.patience", limits.patience, 0, 2**31, whole=True)
    return limits


def _drafter(name: str, found: Mapping[str, Any], stairs: tuple[int, ...]) -> DrafterCosts:
    widths = tuple(int(number(f"{name}: rows_by_depth", each, 0, 64, whole=True)) for each in found["rows_by_depth"])
    if not widths or widths[0] != 0 or any(b <= a for a, b in itertools.pairwise(widths)):
        raise ValueError(f"{name}: rows_by_depth must begin with 0 and grow; got {list(widths)}")
    decode = tuple(_point(name, each, widths) for each in found["decode"])
    prompts = tuple(_prompt_point(name, each) for each in found["prompts"])
    if not decode or not prompts:
        raise ValueError(f"{name}: decode and prompts need at least one point each; {REMEDY}")
    usual = int(
        number(f"{name}: usual_depth", found.get("usual_depth", len(widths) - 1), 0, len(widths) - 1, whole=True)
    )
    host_bound, may_wait = (bool(found.get(name, False)) for name in ("host_bound", "may_wait"))
    try:
        return DrafterCosts(widths, decode, prompts, usual, host_bound, stairs, may_wait)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _point(name: str, found: Sequence[Any], widths: Sequence[int]) -> DecodePoint:
    if len(found) != 5:
        raise ValueError(f"{name}: a point of decode is [requests, rows, depth, context, seconds]; got {found}")
    requests, rows, depth, context, seconds = found
    point = DecodePoint(
        int(number(f"{name}: requests", requests, 1, 2**31, whole=True)),
        int(number(f"{name}: rows", rows, 1, 2**31, whole=True)),
        int(number(f"{name}: depth", depth, 0, len(widths) - 1, whole=True)),
        number(f"{name}: context", context, 0, 2**31),
        _positive(name, seconds),
    )
    most = point.requests * (1 + widths[point.depth])
    if not point.requests <= point.rows <= most:
        raise ValueError(
            f"{name}: a step of {requests} requests at depth {depth} has {requests} to {most} rows; the point "
            f"{found} has {rows}"
        )
    return point


def _prompt_point(name: str, found: Sequence[Any]) -> PromptPoint:
    if len(found) != 3:
        raise ValueError(f"{name}: a point of prompts is [rows, context, seconds]; got {found}")
    rows, context, seconds = found
    return PromptPoint(
        int(number(f"{name}: rows", rows, 1, 2**31, whole=True)),
        number(f"{name}: context", context, 0, 2**31),
        _positive(name, seconds),
    )


def _request(found: Mapping[str, Any]) -> RecordedRequest:
    chances = {
        drafter: tuple(number(f"chances of {drafter}", each, 0, 1) for each in levels)
        for drafter, levels in found["chances"].items()
    }
    return RecordedRequest(
        int(number("prompt_tokens", found["prompt_tokens"], 1, 2**31, whole=True)),
        int(number("max_tokens", found["max_tokens"], 1, 2**31, whole=True)),
        chances,
    )


def _positive(name: str, value: Any) -> float:
    return number(f"{name}: seconds", value, 0, 2**31, open_low=True)


def _short(value: float) -> float:
    return float(f"{value:.5g}")


def _lines(value: Any, indent: int = 0) -> str:
    """JSON in which lists of numbers and requests take one line each."""
    inner = " " * (indent + 1)
    if isinstance(value, dict) and any(isinstance(each, dict | list) for each in value.values()) and indent < 3:
        entries = [f"{inner}{json.dumps(name)}: {_lines(each, indent + 1)}" for name, each in value.items()]
    elif isinstance(value, list) and value and isinstance(value[0], list | dict):
        entries = [inner + json.dumps(each) for each in value]
    else:
        return json.dumps(value)
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return f"{opening}\n" + ",\n".join(entries) + f"\n{' ' * indent}{closing}"
