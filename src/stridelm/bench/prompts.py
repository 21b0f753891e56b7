"""The benchmarks' prompts: the shipped held-out ones, or the user's own files."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BUILT_IN = Path(__file__).parent / "prompts.json"
"""48 beginnings of Python functions from packages on which the built-in model was not trained
(recipes/builtin/make_prompts.py).
"""
TEXT_KEYS = ("text", "prompt")


@dataclass(frozen=True)
class Prompt:
    name: str
    text: str


@dataclass(frozen=True)
class PromptSet:
    """Prompts in the order in which they are run."""

    name: str
    prompts: tuple[Prompt, ...]

    def first(self, count: int | None) -> PromptSet:
        """The first `count` prompts, all if None. Raises ValueError if there are fewer."""
        if count is None:
            return self
        if not 1 <= count <= len(self.prompts):
            raise ValueError(f"num_prompts is {count} but {self.name} has {len(self.prompts)} prompts; lower it")
        return PromptSet(self.name, self.prompts[:count])


def load_prompts(source: str | None = None) -> PromptSet:
    """The prompts at a path, or the shipped ones if None.

    A .json file holds a list, or an object with "prompts"; a .jsonl file one prompt per line; a prompt there is a
    string or an object with "text" or "prompt". Any other file is one prompt; a directory holds such files, read in
    order of name. Raises ValueError for a path without prompts.
    """
    path = BUILT_IN if source is None else Path(source)
    if path.is_dir():
        files = [file for file in sorted(path.rglob("*")) if file.is_file() and not file.name.startswith(".")]
        prompts = [prompt for file in files for prompt in _read(file, str(file.relative_to(path)))]
    elif path.is_file():
        prompts = _read(path, path.name)
    else:
        raise ValueError(f"no prompts at {path}: give a .json, .jsonl or text file, or a directory of them")
    prompts = [prompt for prompt in prompts if prompt.text]
    if not prompts:
        raise ValueError(f"{path} holds no prompt; give a file with text")
    name = "held-out Python (shipped)" if source is None else str(path)
    return PromptSet(name, tuple(prompts))


def _read(path: Path, name: str) -> list[Prompt]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text; leave it out or convert it") from error
    if path.suffix not in (".json", ".jsonl"):
        return [Prompt(name, text)]
    try:
        document = (
            json.loads(text) if path.suffix == ".json" else [json.loads(x) for x in text.splitlines() if x.strip()]
        )
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    entries = document.get("prompts") if isinstance(document, dict) else document
    if not isinstance(entries, list):
        raise ValueError(f'{path} must hold a list of prompts, or an object with "prompts"')
    return [_entry(entry, f"{name}[{i}]", path) for i, entry in enumerate(entries)]


def _entry(entry: Any, name: str, path: Path) -> Prompt:
    if isinstance(entry, str):
        return Prompt(name, entry)
    for key in TEXT_KEYS:
        if isinstance(entry, dict) and isinstance(entry.get(key), str):
            return Prompt(str(entry.get("name", name)), entry[key])
    raise ValueError(f'{name} in {path} is neither a string nor an object with "text" or "prompt"')
