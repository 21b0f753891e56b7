"""Conversations, and the token ids that a model's chat template makes of them."""

from __future__ import annotations

from array import array
from typing import Any

from stridelm.server.errors import bad_request
from stridelm.server.openai.schemas import ChatMessage, Conversation
from stridelm.server.service import Service


async def conversation_ids(body: Conversation, service: Service, *, any_length: bool = False) -> array[int]:
    """Its token ids (service.read). Raises ApiError if the model has no chat template or its template refuses."""
    going_on = bool(body.continue_final_message)
    if going_on and body.add_generation_prompt:
        raise bad_request(
            "continue_final_message goes on with the last message, add_generation_prompt begins another; give one",
            "continue_final_message",
        )
    opens = not going_on if body.add_generation_prompt is None else body.add_generation_prompt
    tools = None if body.tool_choice == "none" else body.tools
    messages = [_message(one) for one in body.messages]
    try:
        text = service.tokenizer.render_chat(messages, tools, opens, going_on, body.chat_template_kwargs)
    except ValueError as error:
        raise bad_request(str(error), "messages") from error
    [ids] = await service.read([text], body.add_special_tokens, "messages", any_length=any_length)
    return ids


def _message(message: ChatMessage) -> dict[str, Any]:
    """As templates know it: parts that are text become one text. Raises ApiError for other parts."""
    content = message.content
    if isinstance(content, list):
        if any(part.get("type") != "text" or not isinstance(part.get("text"), str) for part in content):
            raise bad_request("messages: this model reads text alone; leave other parts out", "messages")
        content = "\n".join(part["text"] for part in content)
    return {**(message.model_extra or {}), "role": message.role, "content": content}
