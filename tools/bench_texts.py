"""Collect the texts of `stride bench`'s scenarios from the Python that runs this.

    python tools/bench_texts.py src/stridelm/bench/serving/texts.json

Prose is chapters of the language reference, which Python ships for `help()`; code is the beginnings of modules of the
standard library, cut between statements. Both are under the licence of the Python Software Foundation, which is written
beside the file. The texts are kept, rather than read from the Python at hand, so that all machines measure the same
prompts.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import os
import platform
import sys
from pathlib import Path
from pydoc_data.topics import topics

CHAPTERS = ("compound", "types", "formatstrings", "debugger", "string-methods")
MODULES = (
    *("reprlib", "shlex", "textwrap", "fnmatch", "graphlib", "contextlib", "tabnanny", "queue", "sched", "colorsys"),
    *("calendar", "cmd", "netrc", "bisect", "quopri", "filecmp"),
)
MODULE_CHARACTERS = 3600


def main() -> None:
    document = {
        "source": f"Python {platform.python_version()}: pydoc_data.topics and the standard library",
        "licence": "PSF-2.0",
        "chapters": {name: topics[name] for name in CHAPTERS},
        "modules": {name: beginning(inspect.getsource(importlib.import_module(name))) for name in MODULES},
    }
    text = json.dumps(document, indent=1, ensure_ascii=False) + "\n"
    Path(sys.argv[1]).write_text(text, encoding="utf-8")
    Path(sys.argv[1]).with_suffix(".LICENSE").write_text(licence(), encoding="utf-8")
    print(f"{sys.argv[1]}: {len(text.encode())} bytes")


def licence() -> str:
    return (Path(os.__file__).parent / "LICENSE.txt").read_text(encoding="utf-8")


def beginning(source: str) -> str:
    """As much of a module as fits, cut after a statement so that it is still valid Python."""
    lines = source.splitlines(keepends=True)
    ends = {node.end_lineno for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt)}
    texts = ["".join(lines[:end]) for end in sorted(filter(None, ends))]
    return max((text for text in texts if len(text) <= MODULE_CHARACTERS and parses(text)), key=len)


def parses(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:  # between `try` and `except`
        return False
    return True


if __name__ == "__main__":
    main()
