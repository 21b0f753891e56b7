"""Reports as files: Markdown with its charts beside it, or one page of HTML."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path

from stridelm.bench.outputs import writing
from stridelm.bench.serving.document import Document
from stridelm.bench.serving.render import as_html, as_markdown

FORMATS = (".md", ".html")


def check_report(path: Path) -> None:
    """Raise ValueError, before anything is measured, if a report could not be written to `path`."""
    if path.suffix not in FORMATS:
        raise ValueError(f"a report cannot be written to {path}: the name must end in {' or '.join(FORMATS)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("a report has charts, and matplotlib is not installed: pip install 'stridelm[plot]'")


def write_report(path: Path, document: Document, charts: Sequence[Callable[[], str]]) -> None:
    """charts: each draws one, as an SVG element. Raises ValueError if a file cannot be written."""
    drawn = [draw() for draw in charts]
    with writing(path):
        if path.suffix == ".html":
            path.write_text(as_html(document, drawn), encoding="utf-8")
            return
        names = [f"{path.stem}-{number}.svg" for number in range(1, len(drawn) + 1)]
        for name, chart in zip(names, drawn, strict=True):
            (path.parent / name).write_text(chart, encoding="utf-8")
        path.write_text(as_markdown(document, names), encoding="utf-8")
