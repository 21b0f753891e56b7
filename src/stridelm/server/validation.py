"""How bodies are validated: null means absent, and pydantic's errors are told without the input, which may be a
prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, model_validator

from stridelm.server.errors import ApiError, bad_request

MAX_FAULTS = 5


class Body(BaseModel):
    """A body, or an object in one. Clients write null for what they leave out, so null counts as absent, under unknown
    names too. Only a field that declares a null of its own receives it."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        known = cls.model_fields
        return {
            name: value
            for name, value in data.items()
            if value is not None or (name in known and type(None) in get_args(known[name].annotation))
        }


def invalid(faults: Sequence[Any]) -> ApiError:
    """faults: from `errors()` of pydantic's and FastAPI's exceptions."""
    words = [f"{_place(fault['loc'])}: {fault['msg']}" for fault in faults[:MAX_FAULTS]]
    more = f" (and {len(faults) - MAX_FAULTS} more)" if len(faults) > MAX_FAULTS else ""
    return bad_request("; ".join(words) + more, _place(faults[0]["loc"]) if faults else None)


def _place(loc: tuple[int | str, ...]) -> str:
    """The place in the body, such as prompt.0 for a first item. Long keys are cut; union tags (~each) are left out."""
    parts = [str(part)[:64] for part in loc if part != "body" and not str(part).startswith("~")]
    return ".".join(parts) or "body"
