"""OpenAI's parameters that have no effect on an answer here: bookkeeping, hints, and those with only one valid value.

Clients send them by default, so they are accepted; their types are checked, so that mistakes are reported.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from stridelm.server.validation import Body

MAX_PAIRS = 16
"""OpenAI's limits of metadata: pairs, and characters of keys and values."""
Key = Annotated[str, Field(max_length=64)]
Value = Annotated[str, Field(max_length=512)]


class TextPart(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text"]
    text: str


class Prediction(BaseModel):
    """What the answer is expected to be like."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["content"]
    content: str | list[TextPart]


def _text_alone(modalities: Any) -> Any:
    if modalities != ["text"]:
        raise ValueError('this model answers only in text; leave modalities out, or make it ["text"]')
    return modalities


class InertFields(Body):
    """None of these is read, except service_tier, which is always answered in the same way."""

    user: str | None = None
    safety_identifier: str | None = None
    """The end user, for the operator's own records."""
    metadata: Annotated[dict[Key, Value], Field(max_length=MAX_PAIRS)] | None = None
    store: bool | None = None
    """Nothing is ever stored."""
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = None
    """There is one tier; an answer to a request that names one has `default`, as OpenAI's has for that tier."""
    prompt_cache_key: str | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    """Equal prefixes are found without them, and kept while there is room."""
    modalities: (
        Annotated[list[Literal["text"]], BeforeValidator(_text_alone), Field(min_length=1, max_length=1)] | None
    ) = None
    verbosity: Literal["low", "medium", "high"] | None = None
    prediction: Prediction | None = None
    """A hint for speed; here the drafter is chosen by `speculation`."""
