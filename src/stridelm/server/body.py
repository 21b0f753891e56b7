"""Parses the body of a request, and refuses there what no later code should meet: text that is not Unicode, and nesting
that would exhaust the stack. Nothing after it needs to check for either."""

from __future__ import annotations

import json
from typing import Any

from fastapi import Request

from stridelm.server.errors import bad_request
from stridelm.values import MAX_NESTING, check_plain


def parsed(body: bytes) -> Any:
    """The body's JSON. Raises ApiError, or ValueError for what is not JSON."""
    try:
        data = json.loads(body)
    except RecursionError as error:
        raise bad_request(f"the body is nested more than {MAX_NESTING} levels deep; make it flatter") from error
    for name, value in data.items() if isinstance(data, dict) else [("the body", data)]:
        try:
            check_plain("the name of a field", name)
            check_plain(name, value)
        except ValueError as error:
            raise bad_request(str(error), name) from error
    return data


class CheckedRequest(Request):
    """A request that FastAPI reads through `parsed`."""

    async def json(self) -> Any:
        return parsed(await self.body())
