"""The ten named scenarios: what the requests of a load ask.

All prompts are made of shipped text (texts.py, and the held-out Python of bench/prompts.py), and a scenario's prompts
are the same on every machine and for every target. `requests` puts them into an order that a seed fixes.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from stridelm.bench.prompts import load_prompts
from stridelm.bench.serving.texts import Texts, load_texts
from stridelm.values import check_known

DOCUMENT_CHARS = 4000
"""Characters of a long document unless others are asked for: about 1,200 tokens of the built-in model."""
SHARED_CHARS = 3000
TURNS = 4
PASSAGES = 4
"""Passages of a retrieval prompt, only one of which is asked for."""
RECORDS = 12
PASSAGE = 1200
"""Longest passage that is used, in characters."""

QUESTIONS = (
    "What is the difference between a list and a tuple in Python?",
    "How does a hash table resolve collisions?",
    "Why is the sky blue?",
    "What does a garbage collector do?",
    "How do I reverse a string in Python?",
    "What is the time complexity of binary search?",
    "Explain recursion in two sentences.",
    "What is a deadlock, and how can it be avoided?",
    "How does HTTP differ from TCP?",
    "What is the purpose of an index in a database?",
    "When should I use a generator instead of a list?",
    "What is the capital of Australia?",
    "How many bits are in a byte, and why?",
    "What is a race condition?",
    "How do you remove duplicates from a list while keeping its order?",
    "What does it mean for a function to be pure?",
)


@dataclass(frozen=True)
class Message:
    role: Literal["system", "user", "assistant"]
    content: str


@dataclass(frozen=True)
class Prompt:
    """A conversation that a request continues; of one message, unless the scenario has turns."""

    messages: tuple[Message, ...]

    @classmethod
    def of(cls, text: str) -> Prompt:
        return cls((Message("user", text),))

    @property
    def text(self) -> str:
        """For a target that completes text. Several messages are laid out as a dialogue."""
        if len(self.messages) == 1:
            return self.messages[0].content
        return "".join(f"{each.role.capitalize()}: {each.content}\n\n" for each in self.messages) + "Assistant:"


Build = Callable[[Texts, int], list[Prompt]]
"""From the texts and the characters of a document to the prompts in their order."""


@dataclass(frozen=True)
class Scenario:
    name: str
    about: str
    max_tokens: int
    """Tokens of an output, unless others are asked for."""
    build: Build
    python: bool = False
    """A prompt is the beginning of Python source, and its completion the continuation."""
    document: bool = False
    """The length of its prompts can be chosen (document_chars)."""
    ordered: bool = False
    """Its prompts build on one another, so that their order is kept."""


def requests(scenario: Scenario, count: int, seed: int, document_chars: int | None = None) -> list[Prompt]:
    """The prompts of `count` requests in order: all of the scenario's in an order that the seed fixes, then all again
    in another. Raises ValueError for a length that the scenario does not have."""
    if document_chars is not None and not scenario.document:
        able = ", ".join(name for name, each in SCENARIOS.items() if each.document)
        raise ValueError(f"document_chars would have no effect on {scenario.name}; leave it out, or choose {able}")
    prompts = scenario.build(load_texts(), document_chars or DOCUMENT_CHARS)
    draw, found = random.Random(seed), list[Prompt]()
    while len(found) < count:
        found += prompts if scenario.ordered else draw.sample(prompts, len(prompts))
    return found[:count]


def scenario_of(name: str) -> Scenario:
    """Raises ValueError for an unknown name."""
    check_known([name], SCENARIOS, "scenario")
    return SCENARIOS[name]


def _passages(texts: Texts) -> list[str]:
    return [passage for passage in texts.passages() if len(passage) <= PASSAGE]


def _short_question(texts: Texts, characters: int) -> list[Prompt]:
    return [Prompt.of(question) for question in QUESTIONS]


def _instruction(texts: Texts, characters: int) -> list[Prompt]:
    return [Prompt.of(f"{passage}\n\nSummarise the text above in one sentence.") for passage in _passages(texts)[:48]]


def _code_completion(texts: Texts, characters: int) -> list[Prompt]:
    return [Prompt.of(prompt.text) for prompt in load_prompts().prompts]


def _code_file(texts: Texts, characters: int) -> list[Prompt]:
    return [Prompt.of(source) for source in texts.modules.values()]


def _code_edit(texts: Texts, characters: int) -> list[Prompt]:
    ask = "# The same function, with type annotations and otherwise unchanged:\n"
    return [
        Prompt.of(f"{function.code}\n\n\n{ask}def {function.name}(")
        for function in texts.functions()
        if 200 <= len(function.code) <= PASSAGE
    ]


def _retrieval(texts: Texts, characters: int) -> list[Prompt]:
    """The answer is in the prompt, word for word."""
    passages = _passages(texts)
    prompts = []
    for first in range(0, len(passages) - PASSAGES + 1, PASSAGES):
        given = passages[first : first + PASSAGES]
        wanted = given[(first // PASSAGES) % PASSAGES]
        sources = "\n\n".join(f"[{number}]\n{passage}" for number, passage in enumerate(given, start=1))
        opening = " ".join(wanted.split()[:8])
        ask = f"Quote, in full and unchanged, the source above that begins with: {opening}"
        prompts.append(Prompt.of(f"{sources}\n\n{ask}\n\nQuotation:\n"))
    return prompts


def _repetition(texts: Texts, characters: int) -> list[Prompt]:
    """Records of one form, to be continued."""
    functions = texts.functions()
    lines = [
        json.dumps({"module": f.module, "function": f.name, "line": f.line, "arguments": f.arguments})
        for f in functions
    ]
    return [Prompt.of("\n".join((lines + lines)[first : first + RECORDS]) + "\n") for first in range(len(lines))]


def _shared_prefix(texts: Texts, characters: int) -> list[Prompt]:
    """Different questions about the same document, which comes first."""
    document = texts.document(SHARED_CHARS, 0)
    terms = dict.fromkeys(re.findall(r'"([a-zA-Z_]\w*)(?:\(\))?"', document))
    return [Prompt.of(f'{document}\n\nIn one sentence: what is said above about "{term}"?\n') for term in terms]


def _multi_turn(texts: Texts, characters: int) -> list[Prompt]:
    """The first turn of every conversation, then the second of each, and so on. What the assistant said before is part
    of the prompt, the same for every target: the next passage of a chapter."""
    conversations = []
    for name, chapter in texts.chapters.items():
        passages = [" ".join(passage.split())[:PASSAGE] for passage in chapter.split("\n\n") if len(passage) > 200]
        for part in range(2):
            told = passages[part * TURNS : (part + 1) * TURNS]
            messages = [Message("system", "You recite the Python language reference, a paragraph at a time.")]
            turns = []
            for number, passage in enumerate(told):
                ask = f"Recite the chapter on {name}, from its part {part + 1}." if not number else "And the next?"
                messages.append(Message("user", ask))
                turns.append(Prompt(tuple(messages)))
                messages.append(Message("assistant", passage))
            conversations.append(turns)
    return [turns[number] for number in range(TURNS) for turns in conversations if number < len(turns)]


def _long_document(texts: Texts, characters: int) -> list[Prompt]:
    return [
        Prompt.of(f"{texts.document(characters, first)}\n\nSummarise the document above in one paragraph.\n\nSummary:")
        for first in range(len(texts.chapters))
    ]


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("short-question", "a question of one line", 64, _short_question),
        Scenario("instruction", "a passage, and what to do with it", 64, _instruction),
        Scenario("code-completion", "the beginning of a held-out function", 128, _code_completion, python=True),
        Scenario("code-file", "the beginning of a module of the standard library", 128, _code_file, python=True),
        Scenario("code-edit", "a function to be repeated with small changes", 128, _code_edit),
        Scenario("retrieval", "four passages, one of which is to be quoted", 128, _retrieval),
        Scenario("repetition", "JSON records to be continued", 128, _repetition),
        Scenario("shared-prefix", "different questions about one document", 64, _shared_prefix),
        Scenario("multi-turn", "conversations of four turns that share prefixes", 64, _multi_turn, ordered=True),
        Scenario("long-document", "a long document and a short summary", 96, _long_document, document=True),
    )
}
"""By name, in the order in which they are listed."""
