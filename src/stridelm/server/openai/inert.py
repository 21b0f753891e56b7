"""Parameters of OpenAI, vLLM and SGLang without effect on an answer here, which clients and routers send by default.

`InertFields`: bookkeeping and hints, accepted with any value of their type. `UNSUPPORTED`: parameters that would change
an answer, accepted with the values that ask for what is done anyway, and refused otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from stridelm.server.errors import bad_request
from stridelm.server.validation import Body

MAX_PAIRS = 16
"""OpenAI's limits of metadata: pairs, and characters of keys and values."""
Key = Annotated[str, Field(max_length=64)]
Value = Annotated[str, Field(max_length=512)]


class TextPart(Body):
    type: Literal["text"]
    text: str


class Prediction(Body):
    """What the answer is expected to be like."""

    type: Literal["content"]
    content: str | list[TextPart]


class PromptCacheOptions(Body):
    mode: Literal["implicit", "explicit"] | None = None
    ttl: Literal["30m"] | None = None


TABLE: dict[str, tuple[Any, ...]] = {
    # OpenAI's
    "functions": ("functions are called tools now; use tools",),
    "function_call": ("functions are called tools now; use tool_choice", "none", "auto"),
    "web_search_options": ("the server does not search; give the model a tool that does",),
    "best_of": ("samples are not ranked; ask for n of them, and choose one", 1),
    "echo": ("chat answers do not repeat messages; use /v1/completions", False),
    "messages": ("messages go to /v1/chat/completions; here, use prompt",),
    "prompt": ("a prompt goes to /v1/completions; here, use messages",),
    "max_completion_tokens": ("completions call it max_tokens",),
    "top_logprobs": ("completions have the number of alternatives in logprobs", 0),
    # vLLM's
    "use_beam_search early_stopping": ("there is no beam search; use n, or temperature 0", False),
    "length_penalty": ("there is no beam search; leave it out", 1),
    "spaces_between_special_tokens": ("the tokenizer's decoder decides; leave it out", True),
    "truncate_prompt_tokens truncation_side": ("prompts are never cut; send a shorter one",),
    "allowed_token_ids": ("use structured_outputs (choice, regex), or logit_bias",),
    "logprob_token_ids": ("use logprobs, or token_ids_logprob of /generate",),
    "prompt_embeds": ("prompts are texts or token ids; send one of them as prompt",),
    "documents": ("put them into a message, or into chat_template_kwargs if the template reads them", []),
    "chat_template": ("a template could be any program; start the server with --chat-template",),
    "vllm_xargs": ("there are no extensions that would read it; leave it out", {}),
    "return_token_offsets": ("use logprobs of /v1/completions, which have text_offset", False),
    "return_prompt_text": ("use return_token_ids, and /detokenize for prompt_token_ids", False),
    "repetition_detection": ("repetition ends no output; use frequency_penalty or max_tokens",),
    "thinking_token_budget": ("reasoning has no budget of its own; use max_tokens", -1),
    # SGLang's
    "regex ebnf json_schema stop_regex": ("use structured_outputs, with regex, grammar or json; or stop",),
    "no_stop_trim": ("use include_stop_str_in_output", False),
    "sampling_seed": ("use seed",),
    "input_ids": ("send token ids as prompt to /v1/completions",),
    "rid": ("close the connection to end a request, or use /generate, where requests have names",),
    "extra_key": ("use cache_salt to keep cached prefixes apart",),
    "session_params": ("sessions are not kept; send the whole prompt, whose prefix is cached", {}),
    "return_hidden_states return_meta_info": ("use /generate, which returns them", False),
    "return_cached_tokens_details": ("usage has cached_tokens; leave it out", False),
    "return_prompt_token_ids return_tokens_as_token_ids": ("use return_token_ids", False),
    "routed_dp_rank data_parallel_rank": ("there is one rank; leave it out", 0),
    # What a text model, served by one process, does not have
    "modalities": ('the model answers only in text; leave modalities out, or make it ["text"]', ["text"]),
    "audio max_dynamic_patch min_dynamic_patch": ("the model has only text; leave it out",),
    "media_io_kwargs mm_processor_kwargs images_config": ("the model has only text; leave it out", {}),
    "use_audio_in_video": ("the model has only text; leave it out", False),
    "return_mm_kwargs": ("the model has only text; leave it out", True, False),
    "logits_processors logit_processors": ("requests bring no code; use logit_bias or bad_words", []),
    "custom_logit_processor custom_params": ("requests bring no code; use logit_bias or bad_words", {}),
    "lora_path lora_request": ("serve a checkpoint into which the adapter was merged",),
    "kv_transfer_params ec_transfer_params": ("prompts are read where they are continued; leave it out", {}),
    "bootstrap_host bootstrap_port bootstrap_room": ("prompts are read where they are continued; leave it out",),
    "return_routed_experts": ("experts are not told; leave it out", False),
    "routed_experts_start_len routed_experts_prompt_start": ("experts are not told; leave it out", 0),
    # Others'
    "enable_thinking thinking reasoning": ("use reasoning_effort, or chat_template_kwargs",),
}
"""Names -> what to do instead, then values that ask for what is done anyway; null is always one."""
Rows = Mapping[str, tuple[Any, ...]]


def by_name(table: Rows) -> dict[str, tuple[Any, ...]]:
    """The table with a row for each name."""
    return {name: row for names, row in table.items() for name in names.split()}


UNSUPPORTED = by_name(TABLE)
"""By name. Some are fields of one of the routes, which reads them itself."""


class InertFields(Body):
    """None of these is read, except service_tier, which is always answered in the same way."""

    refused: ClassVar[Rows] = {}
    """More of them, which may be fields of other routes."""

    @model_validator(mode="before")
    @classmethod
    def _without_unsupported(cls, data: Any) -> Any:
        """The body without unsupported parameters. Raises ApiError if one of them would have an effect."""
        if not isinstance(data, dict):
            return data
        kept = dict[str, Any]()
        for name, value in data.items():
            row = cls.refused.get(name, () if name in cls.model_fields else UNSUPPORTED.get(name, ()))
            if not row:
                kept[name] = value
            elif value is not None and not any(_same(value, one) for one in row[1:]):
                raise bad_request(f"{name}: {row[0]}", name)
        return kept

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
    prompt_cache_options: PromptCacheOptions | None = None
    """Equal prefixes are found without them, and kept while there is room."""
    verbosity: Literal["low", "medium", "high"] | None = None
    request_id: str | None = None
    session_id: str | None = None
    """For routers. An answer's id is its own."""
    prediction: Prediction | None = None
    """A hint for speed; here the drafter is chosen by `speculation`."""


def _same(value: Any, other: Any) -> bool:
    """Whether two values of JSON are equal. In Python, but not in JSON, true equals 1."""
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)
