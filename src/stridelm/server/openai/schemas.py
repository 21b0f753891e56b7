"""Requests of OpenAI's API as pydantic models. Parameters in neither this file nor inert.py are refused, as are
parameters that would have no effect."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from stridelm.params import (
    MAX_BAD_WORDS,
    MAX_BAD_WORDS_LENGTH,
    MAX_LOGIT_BIASES,
    MAX_LOGPROBS,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
    MAX_STOPS_LENGTH,
    SamplingParams,
)
from stridelm.server.errors import bad_request
from stridelm.server.openai.inert import InertFields
from stridelm.server.validation import Body
from stridelm.text.generation_config import GenerationDefaults

MAX_WORDS = 1024
MAX_PROMPTS = 1024
MAX_SAMPLES = 128
MAX_MESSAGES = 4096

MAX_CHOICE_TEXT = 1 << 16
"""Characters of all choices together."""


def short_enough(limit: int) -> AfterValidator:
    """Refuses texts, or a single one, with more than `limit` characters in total."""

    def check(value: str | list[str]) -> str | list[str]:
        size = len(value) if isinstance(value, str) else sum(map(len, value))
        if size > limit:
            raise ValueError(f"{size} characters in total, more than {limit}; give fewer or shorter ones")
        return value

    return AfterValidator(check)


# SamplingParams has the same bounds; here they are checked before the lists are processed.
BadWords = Annotated[list[str], Field(max_length=MAX_BAD_WORDS, fail_fast=True), short_enough(MAX_BAD_WORDS_LENGTH)]
Choices = Annotated[list[str], Field(max_length=MAX_WORDS, fail_fast=True), short_enough(MAX_CHOICE_TEXT)]
StopText = short_enough(MAX_STOPS_LENGTH)
TokenId = Annotated[int, Field(ge=0)]
Ids = Annotated[list[TokenId], Field(fail_fast=True)]
"""fail_fast: of a million invalid ids, one is reported."""
PromptIds = Annotated[Ids, Field(min_length=1)]
Prompts = Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    """From vLLM: usage in every event."""
    include_obfuscation: Literal[False] | None = None
    """Events have no padding."""


class JsonSchema(Body):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None
    """Has no effect: the output always follows the schema."""


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class SamplingFields(InertFields):
    """What completions and chat have in common. Names are vLLM's where OpenAI has none."""

    model: str | None = None
    max_tokens: int | None = Field(None, ge=0)
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = Field(None, ge=1, le=MAX_SAMPLES)
    stop: Annotated[str | Annotated[list[str], Field(max_length=MAX_STOPS, fail_fast=True)], StopText] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = Field(None, max_length=MAX_LOGIT_BIASES)
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: Annotated[Ids, Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    bad_words: BadWords | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    priority: int | None = None
    target_tps: float | None = Field(None, ge=0.01, le=1e6)
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    structured_outputs: dict[str, Any] | None = None
    """From vLLM: one of json, json_object, regex, choice, grammar, structural_tag."""
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    """vLLM's older names for the same."""
    response_format: ResponseFormat | None = None
    speculation: dict[str, Any] | str | None = None
    """Drafter, depth, acceptance and their options; or a drafter's name; or "off". The server bounds depth and rows
    (max_depth and max_draft_rows of /server_info)."""

    def sampling(self, defaults: GenerationDefaults, **more: Any) -> SamplingParams:
        """The engine's sampling parameters. Raises ApiError for values out of range.

        defaults: for what is left out. more: parameters that completions and chat spell differently.
        """
        same = {field.name for field in fields(SamplingParams)} & SamplingFields.model_fields.keys()
        given = {name: value for name in same if (value := getattr(self, name)) is not None}
        structured = self._structured()
        if structured is not None:
            given["structured_outputs"] = structured
        if self.logit_bias is not None:
            given["logit_bias"] = biases_by_id(self.logit_bias)
        if self.stream_options is not None and not self.stream:
            raise bad_request("stream_options would have no effect without stream; leave it out", "stream_options")
        try:
            return SamplingParams(**defaults.fill(given | more))
        except ValueError as error:
            raise bad_request(str(error)) from error

    def _structured(self) -> dict[str, Any] | None:
        """The structure of the output, from whichever field was set. Raises ApiError if several were."""
        asked: list[dict[str, Any]] = [] if self.structured_outputs is None else [self.structured_outputs]
        for name in ("json", "regex", "choice", "grammar"):
            value = getattr(self, f"guided_{name}")
            if value is not None:
                asked.append({name: value})
        form = self.response_format
        if form is not None:
            if (form.type == "json_schema") != (form.json_schema is not None):
                raise bad_request("response_format: json_schema goes with the type json_schema", "response_format")
            if form.json_schema is not None:
                asked.append({"json": form.json_schema.schema_})
            elif form.type == "json_object":
                asked.append({"json_object": True})
        if len(asked) > 1:
            raise bad_request("the structure of the output is given in several ways; give only one")
        return asked[0] if asked else None


class CompletionRequest(SamplingFields):
    prompt: str | PromptIds | Annotated[list[str], Prompts] | Annotated[list[PromptIds], Prompts]
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None
    add_special_tokens: bool | None = None


class ChatMessage(BaseModel):
    """One message; further keys go to the chat template."""

    model_config = ConfigDict(extra="allow")

    role: str = Field(min_length=1, max_length=64)
    content: str | list[dict[str, Any]] | None = None


class FunctionName(Body):
    name: str


class NamedTool(Body):
    """The function that must be called."""

    type: Literal["function"]
    function: FunctionName


class ToolSubset(Body):
    mode: Literal["auto", "required"]
    tools: list[NamedTool] = Field(min_length=1, max_length=MAX_WORDS)


class AllowedTools(Body):
    """Some of the tools: the model reads of all, and may call these."""

    type: Literal["allowed_tools"]
    allowed_tools: ToolSubset


def check_tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Refuses what is not a function with a name of its own, and parameters that are not a JSON schema of an object."""
    names = set[str]()
    for place, tool in enumerate(tools):
        function = tool.get("function")
        if tool.get("type", "function") != "function" or not isinstance(function, dict):
            raise ValueError(f'tool {place}: only functions can be called: {{"type": "function", "function": {{...}}}}')
        name, parameters = function.get("name"), function.get("parameters")
        if not isinstance(name, str) or not re.fullmatch(r"[\w.:/-]{1,256}", name):
            raise ValueError(f"tool {place}: a function needs a name of letters, digits and _ - . : /, at most 256")
        if name in names:
            raise ValueError(f"tool {place}: another function has the same name; give each its own")
        if parameters is not None and (
            not isinstance(parameters, dict) or parameters.get("type", "object") != "object"
        ):
            raise ValueError(f"tool {place}: parameters must be a JSON schema of an object")
        names.add(name)
    return tools


class Conversation(Body):
    """What a chat template reads. add_special_tokens: in addition to those that the template writes."""

    messages: list[ChatMessage] = Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_WORDS), AfterValidator(check_tools)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedTools | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    """A variable of the chat template."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool = False


class ChatRequest(SamplingFields, Conversation):
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    separate_reasoning: bool | None = None
    """From SGLang: False leaves reasoning in the content."""
    stream_reasoning: Literal[True] | None = None
    include_reasoning: bool | None = None
    """From vLLM: False leaves reasoning out of the answer."""


def biases_by_id(bias: Mapping[str, float]) -> dict[int, float]:
    try:
        return {int(token): value for token, value in bias.items()}
    except ValueError as error:
        raise bad_request("logit_bias: keys are token ids, whole numbers", "logit_bias") from error
