"""What the clients ask for. The built-in model writes code and knows no tools: calls are forced, and strings are
bounded by their schema."""

from __future__ import annotations

import importlib
import os
from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field

QUESTION = "Where is it?"
SAMPLING: dict[str, Any] = {"temperature": 0.8, "seed": 5, "max_tokens": 1000}
"""There may be much space between the parts of a JSON text, and what is cut is no call."""


class Place(BaseModel):
    """A place to look at."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=8)
    side: Literal["left", "right"]
    count: int = Field(ge=0, le=99)


def client_library(name: str) -> Any:
    """The module; the test is skipped where it is not installed, except in CI."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if "CI" in os.environ or error.name != name:
            raise
        pytest.skip(f"{name} is not installed: make setup EXTRAS=dev,harness,clients", allow_module_level=True)
