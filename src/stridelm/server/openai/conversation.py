"""Conversations, and the token ids that a model's chat template makes of them."""

from __future__ import annotations

from array import array

from fastapi import Request

from stridelm.chat.template import habits_of
from stridelm.server.callers import caller_of
from stridelm.server.errors import bad_request
from stridelm.server.large import prompts_read
from stridelm.server.openai.schemas import ChatRequest, Conversation
from stridelm.server.service import Service
from stridelm.text.tokenizer import Tokenizer


async def conversation_ids(body: ChatRequest, request: Request) -> array[int]:
    """The conversation's token ids. Raises ApiError for one that cannot be served."""
    read = prompts_read(request)
    if read is not None:
        return read[0]
    service: Service = request.app.state.service
    caller = caller_of(request)
    text = await service.beside(caller, lambda _: conversation_text(body, service.tokenizer))
    [ids] = await service.read([text], caller, body.add_special_tokens, "messages")
    return ids


def conversation_text(body: Conversation, tokenizer: Tokenizer) -> str:
    """The conversation rendered by the chat template. Raises ApiError if there is none, or if it refuses."""
    going_on = bool(body.continue_final_message)
    if going_on and body.add_generation_prompt:
        raise bad_request(
            "continue_final_message continues the last message, add_generation_prompt begins another; give only one",
            "continue_final_message",
        )
    opens = not going_on if body.add_generation_prompt is None else body.add_generation_prompt
    tools = None if body.tool_choice == "none" else body.tools
    try:
        habits = habits_of(tokenizer)
        messages = habits.messages(dict(one) for one in body.messages)  # with their further keys
    except ValueError as error:
        raise bad_request(f"messages: {error}", "messages") from error
    variables = body.chat_template_kwargs or {}
    if body.reasoning_effort is not None:
        if "reasoning_effort" in variables:
            raise bad_request("reasoning_effort is in chat_template_kwargs too; give only one", "reasoning_effort")
        variables = {**variables, "reasoning_effort": body.reasoning_effort}
    try:
        return tokenizer.render_chat(messages, tools, opens, going_on, variables)
    except ValueError as error:
        raise bad_request(str(error), "messages") from error
