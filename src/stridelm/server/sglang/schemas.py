"""Requests of SGLang's API as pydantic models. Unknown parameters are refused. Those that SGLang has and Stride does
not are accepted only if unset, because clients send their defaults."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag

from stridelm.params import (
    MAX_LOGIT_BIASES,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_LOGPROBS,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
    SamplingParams,
)
from stridelm.server.errors import bad_request
from stridelm.server.openai.schemas import Conversation, StopText, biases_by_id
from stridelm.server.validation import Body
from stridelm.text.generation_config import GenerationDefaults

MAX_PROMPTS = 1024
MAX_SAMPLES = 128
MAX_TEXT = 1 << 24
MAX_TOKENS = 1 << 22
MAX_WORD = 1 << 16

RENAMED = {
    "min_new_tokens": "min_tokens",
    "no_stop_trim": "include_stop_str_in_output",
    "sampling_seed": "seed",
    **dict.fromkeys(("temperature", "top_p", "top_k", "min_p", "n", "ignore_eos", "skip_special_tokens", "stop")),
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "repetition_penalty", "stop_token_ids")),
}
"""SGLang's name of a parameter -> ours; None: the same."""


_EMPTY: tuple[Any, ...] = (None, False, "", [], {})


def unset(value: Any) -> bool:
    """Whether it is null, false or empty, or a list of such values, one per prompt."""
    return value in _EMPTY or (isinstance(value, list) and all(one in _EMPTY for one in value))


def _refuse(value: Any) -> Any:
    if not unset(value):
        raise ValueError("not supported by this server; leave it out")
    return None


Nothing = Annotated[Any, AfterValidator(_refuse)]
"""A field that is accepted only if unset."""

Text = Annotated[str, Field(max_length=MAX_TEXT)]
Word = Annotated[str, Field(max_length=MAX_WORD)]
Rid = Annotated[str, Field(min_length=1, max_length=256)]
TokenId = Annotated[int, Field(ge=0)]
Ids = Annotated[list[TokenId], Field(min_length=1, max_length=MAX_TOKENS, fail_fast=True)]
Chosen = Annotated[list[TokenId], Field(max_length=MAX_LOGPROB_TOKEN_IDS)]
OneOrEachIds = Chosen | Annotated[list[Chosen | None], Field(max_length=MAX_PROMPTS)]
Start = Annotated[int, Field(ge=-1)]
Top = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]


class NativeSampling(Body):
    """SGLang's sampling_params. null selects the default, except for max_new_tokens, where only the checkpoint's own
    limit applies."""

    max_new_tokens: int | None = Field(128, ge=0)
    min_new_tokens: int | None = Field(None, ge=0)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: Annotated[Word | Annotated[list[Word], Field(max_length=MAX_STOPS, fail_fast=True)], StopText] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    stop_regex: Nothing = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: Literal[True] | None = None
    no_stop_trim: bool | None = None
    n: int | None = Field(None, ge=1, le=MAX_SAMPLES)
    logit_bias: dict[str, float] | None = Field(None, max_length=MAX_LOGIT_BIASES)
    sampling_seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stream_interval: Literal[1] | None = None
    custom_params: Nothing = None

    regex: Word | None = None
    json_schema: Text | None = None
    ebnf: Text | None = None
    structural_tag: Text | None = None

    speculation: dict[str, Any] | Word | None = None
    """Drafter, depth, acceptance and their options; or a drafter's name; or "off"."""

    mtp_enabled: bool | None = None
    """Decode with mask tokens, unchecked: the parameters of the method's own server, and of its authors' harness."""
    mtp_k: int | None = Field(None, ge=1)
    """Maximum tokens per step."""
    mtp_mask_id: TokenId | None = None
    mtp_min_mask_id: TokenId | None = None
    mtp_max_mask_id: TokenId | None = None
    mtp_strategy: Word | Annotated[list[Word | float], Field(max_length=2)] | None = None
    """["conf_adapt", 0.9], "conf_adapt+0.9", or "conf_adapt" together with mtp_conf_threshold."""
    mtp_conf_threshold: float | None = Field(None, ge=0.0, le=1.0)
    mtp_temperature: float | None = None

    @property
    def scores_only(self) -> bool:
        """Whether the prompt is only scored and nothing is generated."""
        return self.max_new_tokens == 0

    def sampling(self, defaults: GenerationDefaults, **more: Any) -> SamplingParams:
        """The engine's sampling parameters, with `defaults` for what is left out. Raises ApiError for values out of
        range."""
        if self.max_new_tokens is not None and (self.min_new_tokens or 0) > self.max_new_tokens:
            raise bad_request(
                f"min_new_tokens {self.min_new_tokens} exceeds max_new_tokens {self.max_new_tokens}; lower it or raise "
                "max_new_tokens",
                "min_new_tokens",
            )
        given = {ours or name: value for name, ours in RENAMED.items() if (value := getattr(self, name)) is not None}
        if self.logit_bias is not None:
            given["logit_bias"] = biases_by_id(self.logit_bias)
        # The step that scores a prompt also draws a token.
        given["max_tokens"] = 1 if self.scores_only else self.max_new_tokens
        try:
            return SamplingParams(**defaults.fill(given | more))
        except ValueError as error:
            raise bad_request(str(error), "sampling_params") from error


OneOrEach = Annotated[
    Annotated[NativeSampling, Tag("~one")]
    | Annotated[list[NativeSampling], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True), Tag("~each")],
    Discriminator(lambda value: "~each" if isinstance(value, list) else "~one"),
]


class GenerateRequest(Body):
    model: Word | None = None
    text: Text | Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)] | None = None
    input_ids: Ids | Annotated[list[Ids], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)] | None = None
    sampling_params: OneOrEach | None = None
    rid: Rid | Annotated[list[Rid], Field(max_length=MAX_PROMPTS)] | None = None
    stream: bool | None = None
    priority: int | None = Field(None, gt=-(2**63), lt=2**63)
    """Higher is served first, as in SGLang and unlike elsewhere in Stride."""
    cache_salt: str | None = None
    speculation: dict[str, Any] | Word | None = None
    """For prompts whose sampling_params do not set it."""

    return_logprob: bool | Annotated[list[bool], Field(max_length=MAX_PROMPTS)] | None = None
    """Without it the fields that select log-probabilities have no effect, as in SGLang."""
    logprob_start_len: Start | Annotated[list[Start], Field(max_length=MAX_PROMPTS)] | None = None
    """First position of the prompt whose log-probability is returned; -1 for the output only."""
    top_logprobs_num: Top | Annotated[list[Top], Field(max_length=MAX_PROMPTS)] | None = None
    return_text_in_logprobs: bool | None = None
    token_ids_logprob: OneOrEachIds | None = None
    return_hidden_states: bool | Annotated[list[bool], Field(max_length=MAX_PROMPTS)] | None = None

    log_metrics: Literal[True] | None = None
    no_logs: bool | None = None
    """Prompts and outputs are never logged."""
    conversation_id: Word | None = None
    """For the client's own use; the answer does not depend on it."""

    input_embeds: Nothing = None
    image_data: Nothing = None
    video_data: Nothing = None
    audio_data: Nothing = None
    modalities: Nothing = None
    session_params: Nothing = None
    session_id: Nothing = None
    lora_path: Nothing = None
    lora_id: Nothing = None
    custom_logit_processor: Nothing = None
    custom_labels: Nothing = None
    extra_key: Nothing = None
    background: Nothing = None
    bootstrap_host: Nothing = None
    bootstrap_port: Nothing = None
    bootstrap_room: Nothing = None
    bootstrap_pair_key: Nothing = None
    data_parallel_rank: Nothing = None
    routed_dp_rank: Nothing = None
    require_reasoning: Nothing = None
    return_sampling_mask: Nothing = None
    return_prompt_token_ids: Nothing = None
    return_routed_experts: Nothing = None
    return_indexer_topk: Nothing = None
    return_bytes: Nothing = None
    return_entropy: Nothing = None

    @property
    def is_list(self) -> bool:
        """Whether the prompts were given as a list, if only of one: then the answer is a list."""
        return isinstance(self.text, list) or isinstance((self.input_ids or [0])[0], list)


class AbortRequest(Body):
    rid: Annotated[str, Field(max_length=256)] | None = None
    """The rid sent to /generate, or the id in its answers; the rid of a request with several samples means all of
    them."""
    abort_all: bool = False
    finished_reason: Nothing = None
    abort_message: Nothing = None


class TokenizeRequest(Body):
    """As in SGLang and vLLM: one text or several."""

    model: Word | None = None
    prompt: Text | Annotated[list[Text], Field(max_length=MAX_PROMPTS)]
    add_special_tokens: bool = True
    return_token_strs: bool | None = None


class TokenizeConversation(Conversation):
    """As in vLLM: a conversation instead of texts."""

    model: Word | None = None
    return_token_strs: bool | None = None


Tokenize = Annotated[
    Annotated[TokenizeRequest, Tag("~text")] | Annotated[TokenizeConversation, Tag("~conversation")],
    Discriminator(lambda body: "~conversation" if isinstance(body, dict) and "messages" in body else "~text"),
]


class DetokenizeRequest(Body):
    model: Word | None = None
    tokens: (
        Annotated[list[TokenId], Field(max_length=MAX_TOKENS, fail_fast=True)]
        | Annotated[
            list[Annotated[list[TokenId], Field(max_length=MAX_TOKENS, fail_fast=True)]],
            Field(max_length=MAX_PROMPTS, fail_fast=True),
        ]
    )
    skip_special_tokens: bool | None = None
