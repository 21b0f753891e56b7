"""The texts that scenarios are made of: chapters of Python's language reference and modules of its standard library.

They are shipped (texts.json, made by tools/bench_texts.py), so that all machines measure the same prompts.
"""

from __future__ import annotations

import ast
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FILE = Path(__file__).parent / "texts.json"
PASSAGE = 600
"""Fewest characters of a passage, unless its chapter ends."""


@dataclass(frozen=True)
class Function:
    """A function of one of the modules. code: with its decorators, not indented."""

    module: str
    name: str
    arguments: tuple[str, ...]
    line: int
    code: str


@dataclass(frozen=True)
class Texts:
    chapters: dict[str, str]
    modules: dict[str, str]

    def document(self, characters: int, first: int) -> str:
        """All chapters one after another, beginning with the given one, cut to so many characters. Raises ValueError
        if they have fewer."""
        chapters = list(self.chapters.values())
        first %= len(chapters)
        text = "\n\n".join(chapters[first:] + chapters[:first])
        if len(text) < characters:
            raise ValueError(f"document_chars is {characters}, but all texts together have {len(text)}; lower it")
        return text[:characters]

    def passages(self) -> list[str]:
        """The chapters cut between paragraphs, a passage of each in turn."""
        cut = [_passages(text) for text in self.chapters.values()]
        longest = max(map(len, cut))
        return [passages[i] for i in range(longest) for passages in cut if i < len(passages)]

    def functions(self) -> list[Function]:
        """The modules' top-level functions, in their order."""
        found = []
        for module, source in self.modules.items():
            lines = source.splitlines()
            for node in ast.parse(source).body:
                if isinstance(node, ast.FunctionDef):
                    names = tuple(argument.arg for argument in (*node.args.posonlyargs, *node.args.args))
                    first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
                    code = "\n".join(lines[first - 1 : node.end_lineno])
                    found.append(Function(module, node.name, names, node.lineno, code))
        return found


@cache
def load_texts() -> Texts:
    document = json.loads(FILE.read_text(encoding="utf-8"))
    return Texts(document["chapters"], document["modules"])


def _passages(text: str) -> list[str]:
    passages, current = [], ""
    for paragraph in text.split("\n\n"):
        current = f"{current}\n\n{paragraph}" if current else paragraph
        if len(current) >= PASSAGE:
            passages.append(current.strip("\n"))
            current = ""
    return [*passages, current.strip("\n")] if current.strip() else passages
