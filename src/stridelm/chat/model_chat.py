"""How one model converses: its chat template, and how reasoning and tool calls stand in its messages."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Sequence

from stridelm.chat.formats import (
    AUTO,
    NONE,
    REASONING_FORMATS,
    TOOL_FORMATS,
    check_formats,
    reasoning_format_of,
    tool_format_of,
)
from stridelm.chat.message_format import MessageFormat, published_format
from stridelm.chat.template import TemplateHabits, habits_of
from stridelm.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

TAILS = (64, 256, 1024, 4096, 16_384)
"""Tokens at the end of a prompt in which the beginning of the model's message is looked for, one after another."""
RENDERING_S = 20.0
"""How long small conversations may take, which are rendered in some hundredths of a second."""
ANCHORS = ("[/INST]", "[/TOOL_RESULTS]", "<|turn>model\n", "<tool_response|>")
"""What precedes a message where the template adds nothing to open one."""


class ModelChat:
    """Made once for a model."""

    def __init__(self, tokenizer: Tokenizer, tool_call_parser: str = AUTO, reasoning_parser: str = AUTO) -> None:
        """tool_call_parser, reasoning_parser: names of formats (formats.py), "auto" for what the tokenizer's response
        template or the chat template shows, "none" to leave calls or reasoning in the text.

        Raises ValueError for unknown names, and for a chat template that does not end.
        """
        self.tokenizer = tokenizer
        source = str(tokenizer.hf.chat_template or "")
        check_formats(tool_call_parser, reasoning_parser)
        self.habits = _habits_in_time(tokenizer)
        """What the chat template does."""
        published = getattr(tokenizer.hf, "response_template", None)
        self.tool_name = {AUTO: tool_format_of(source), NONE: None}.get(tool_call_parser, tool_call_parser)
        self.reasoning_name = {AUTO: reasoning_format_of(source), NONE: None}.get(reasoning_parser, reasoning_parser)
        tools = TOOL_FORMATS.get(self.tool_name or "")
        if published and tool_call_parser == AUTO and reasoning_parser == AUTO:
            self.form = published_format(published, tools)
            self.source = "the tokenizer's response template"
        else:
            reasoning = REASONING_FORMATS.get(self.reasoning_name or "")
            opening = self.habits.opening
            for mark in (reasoning.open, reasoning.close) if reasoning is not None else ():
                opening = opening.partition(mark.strip())[0]
            anchors = [opening] if opening.strip() else [one for one in ANCHORS if one.strip() in source]
            self.form = MessageFormat(reasoning, tools, "|".join(map(re.escape, anchors)) or "(?!)")
            self.source = "the chat template" if AUTO in (tool_call_parser, reasoning_parser) else "options"
        said = "\n".join(self.form.texts)
        self.kept = frozenset(token for token in tokenizer.special_ids if tokenizer.token_text(token) in said)
        """Special tokens that are marks of the format: its parser needs them."""

    @property
    def description(self) -> str:
        """One line for people."""
        calls = self.tool_name or ("as the response template says" if self.form.call_region else "none")
        reasoning = self.reasoning_name or ("as the response template says" if self.form.reasoning else "none")
        return f"tool calls: {calls}, reasoning: {reasoning} (by {self.source})"

    def tell(self) -> None:
        """Log the formats in one line."""
        logger.warning("messages: %s; for others set tool_call_parser and reasoning_parser", self.description)

    def opened(self, prompt_ids: Sequence[int]) -> str:
        """What a prompt has of the message that follows it: the text after its last anchor, or nothing if there is
        none."""
        anchor = self.form.templates[False, False].start_anchor_re
        for tail in TAILS:
            text = self.tokenizer.decode(prompt_ids[-tail:], skip_special_tokens=False)
            ends = [found.end() for found in anchor.finditer(text)]
            if ends:
                return text[ends[-1] :]
        return ""


def _habits_in_time(tokenizer: Tokenizer) -> TemplateHabits:
    found: list[TemplateHabits] = []
    rendering = threading.Thread(target=lambda: found.append(habits_of(tokenizer)), daemon=True)
    rendering.start()
    rendering.join(RENDERING_S)
    if not found:
        raise ValueError(f"the chat template does not end within {RENDERING_S:g} s; repair it, or give another")
    return found[0]
