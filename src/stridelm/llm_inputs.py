"""What the offline API takes: prompts, conversations and parameters, in the forms of vLLM's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import closing, contextmanager
from numbers import Number
from typing import Any

from stridelm.params import SamplingParams
from stridelm.progress import bar
from stridelm.text.tokenizer import Tokenizer
from stridelm.values import shortened, token_ids

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or a mapping with `prompt` (text), `prompt_token_ids`, or both: then the ids are used."""
Message = Mapping[str, Any]
NOT_PROMPTS = {
    **dict.fromkeys(("multi_modal_data", "mm_processor_kwargs"), "this model reads only text; leave it out"),
    "cache_salt": "use SamplingParams.cache_salt",
}
"""Some of vLLM's keys that are refused -> what to do instead."""


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A single prompt becomes a batch of one. Arrays and tensors count as lists of ids."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    value: Any = prompts.tolist() if hasattr(prompts, "tolist") else prompts
    if isinstance(value, bytes | bytearray | Set) or not isinstance(value, Iterable):
        raise ValueError(f"prompts must be text or lists of token ids; got {shortened(value)}")
    items = list(value)
    if not items:
        raise ValueError("no prompts were given; give at least one")
    if isinstance(items[0], Number) and all(isinstance(item, Number) for item in items):
        return [items]
    return items


def one_each(params: SamplingParams | Sequence[SamplingParams], count: int) -> list[SamplingParams]:
    """A parameter set for each of `count` prompts."""
    if isinstance(params, SamplingParams):
        return [params] * count
    sets = list(params) if isinstance(params, Sequence) else [params]
    wrong = [one for one in sets if not isinstance(one, SamplingParams)]
    if wrong:
        raise ValueError(f"sampling_params must be SamplingParams, one for all or one each; got {shortened(wrong[0])}")
    if len(sets) != count:
        raise ValueError(f"{len(sets)} parameter sets for {count} prompts; give one for all or one each")
    return sets


def encoded(prompt: Prompt, tokenizer: Tokenizer | None) -> tuple[str | None, list[int]]:
    """A prompt's text, if it has one, and its token ids. Raises ValueError for what is not a prompt."""
    text: Any = prompt
    if isinstance(prompt, Mapping):
        given = {name: value for name, value in prompt.items() if value is not None}
        for name in given:
            if name not in ("prompt", "prompt_token_ids"):
                instead = NOT_PROMPTS.get(name, "give prompt or prompt_token_ids")
                raise ValueError(f"a prompt has no {shortened(name)}: {instead}")
        text = given.get("prompt")
        if text is not None and not isinstance(text, str):
            raise ValueError(f"prompt must be text; got {shortened(text)}; token ids are prompt_token_ids")
        if "prompt_token_ids" in given:
            return text, token_ids("prompt_token_ids", given["prompt_token_ids"])
        if text is None:
            raise ValueError("a prompt has neither prompt nor prompt_token_ids; give one of them")
    if not isinstance(text, str):
        return None, token_ids("the prompt", text)
    if tokenizer is None:
        raise ValueError("the engine was started with skip_tokenizer_init; give prompts as token ids")
    return text, tokenizer.encode(text)


def as_conversations(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[Sequence[Message]]:
    """A single conversation becomes a batch of one. Raises ValueError for what is no list of messages with roles."""
    one = isinstance(messages, Sequence) and len(messages) > 0 and isinstance(messages[0], Mapping)
    many: Any = [messages] if one else messages
    if not isinstance(many, list | tuple) or not many:
        raise ValueError(f"messages must be a conversation, or a list of them; got {shortened(many)}")
    for conversation in many:
        messages = conversation if isinstance(conversation, list | tuple) else []
        if not messages or not all(isinstance(one, Mapping) and isinstance(one.get("role"), str) for one in messages):
            raise ValueError(f"a conversation is a list of mappings with a role; got {shortened(conversation)}")
    return list(many)


@contextmanager
def progress(use_tqdm: bool | Callable[..., Any], total: int) -> Iterator[Callable[[int], Any]]:
    """Yields a function to call with each number of prompts done.

    use_tqdm: whether to show a bar, where there is a terminal; or what makes one, called as `tqdm.tqdm` is.
    """
    if callable(use_tqdm):
        with closing(use_tqdm(total=total, desc="generating")) as made:
            yield made.update
    elif use_tqdm:
        with bar("generating", total, "prompts", least=2) as advance:
            yield advance
    else:
        yield lambda _: None
