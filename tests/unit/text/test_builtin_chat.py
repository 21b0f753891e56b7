"""The built-in model's chat template: every conversation becomes Python source for the model to continue."""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

import pytest

from stridelm.builtin import builtin_path
from stridelm.text.tokenizer import Tokenizer

ROLES = ("system", "developer", "user", "assistant", "tool")
SYSTEM, USER = {"role": "system", "content": "Be brief.\nNo prose."}, {"role": "user", "content": "def f(x):"}
ASSISTANT = {"role": "assistant", "content": "\n    return x"}


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.load(builtin_path())


def test_what_it_looks_like() -> None:
    """User messages are source, assistant messages continue them, others are comments; the end is the last character of
    a line, from which the model continues best."""
    again = {"role": "user", "content": "def g(x):"}
    text = tokenizer().render_chat([SYSTEM, USER, ASSISTANT, again])
    assert text == "# Be brief.\n# No prose.\n\ndef f(x):\n    return x\n\ndef g(x):"
    assert tokenizer().render_chat([USER]) == "def f(x):"
    assert tokenizer().render_chat([USER, ASSISTANT], continue_final_message=True, add_generation_prompt=False) == (
        "def f(x):\n    return x"
    )


@pytest.mark.parametrize("roles", list(product(ROLES, repeat=2)), ids="-".join)
def test_any_order_of_roles(roles: tuple[str, ...]) -> None:
    """An earlier conversation is a prefix of a later one, so that its prefix is cached; nothing is left out."""
    messages = [{"role": role, "content": f"word{i}\nline{i}"} for i, role in enumerate(roles)]
    whole = tokenizer().render_chat(messages, add_generation_prompt=False)
    for count in range(1, len(messages)):
        assert whole.startswith(tokenizer().render_chat(messages[:count], add_generation_prompt=False))
    assert all(f"word{i}" in whole and f"line{i}" in whole for i in range(len(roles)))
    assert tokenizer().render_chat(messages).startswith(whole)
    assert tokenizer().apply_chat_template(messages) == tokenizer().encode(tokenizer().render_chat(messages), False)


@pytest.mark.parametrize("role", ROLES)
def test_parts(role: str) -> None:
    """Text in parts is text, one line per part; a message without content is an empty one."""

    def render(content: Any) -> str:
        return tokenizer().render_chat([{"role": role, "content": content}, USER])

    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render(parts) == render("a\nb")
    assert render(None) == render("") == render([])
