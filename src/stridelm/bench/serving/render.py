"""A document for a terminal, as Markdown, and as a page of HTML that needs nothing besides itself."""

from __future__ import annotations

import html
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from stridelm.bench.serving.document import Document, Table

STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding: .3rem 0; }
th, td { padding: .2rem .7rem; border-bottom: 1px solid #8884; text-align: left; vertical-align: top; }
.number { text-align: right; white-space: nowrap; }
dl { display: grid; grid-template-columns: max-content auto; gap: .1rem 1rem; }
dt { opacity: .7; } dd { margin: 0; }
figure { margin: 1rem 0; background: white; overflow-x: auto; } svg { max-width: 100%; height: auto; }
.wide { overflow-x: auto; }
"""


def as_text(document: Document) -> RenderableType:
    parts: list[RenderableType] = [Text(f"{name}: {value}") for name, value in document.about]
    for table in document.tables:
        shown = RichTable(box=None, pad_edge=False, header_style="bold", title_justify="left")
        shown.title = Text(table.title, style="bold") if table.title else None
        for heading, number in table.columns:
            shown.add_column(heading, justify="right" if number else "left")
        for row in table.rows:
            shown.add_row(*map(Text, row))
        parts += [Text(""), shown]
    return Group(*parts, Text(""), *(Text(note, style="dim") for note in document.notes))


def as_markdown(document: Document, charts: Sequence[str] = ()) -> str:
    """charts: paths of pictures, relative to the file."""
    parts = [f"# {document.title}", "\n".join(f"- {name}: {value}" for name, value in document.about)]
    parts += [f"![{document.title}]({path})" for path in charts]
    for table in document.tables:
        parts += [f"## {table.title}"] if table.title else []
        parts.append("\n".join(_markdown_lines(table)))
    parts.append("\n".join(f"- {note}" for note in document.notes))
    return "\n\n".join(part for part in parts if part) + "\n"


def as_html(document: Document, charts: Sequence[str] = ()) -> str:
    """charts: SVG elements, which become part of the page."""
    title = html.escape(document.title)
    about = "".join(f"<dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd>\n" for name, value in document.about)
    notes = "".join(f"<li>{html.escape(note)}</li>\n" for note in document.notes)
    figures = "".join(f"<figure>{chart}</figure>\n" for chart in charts)
    tables = "".join(map(_html_table, document.tables))
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{title}</title>\n'
        f"<style>{STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>\n<dl>\n{about}</dl>\n{figures}{tables}"
        f"<ul>\n{notes}</ul>\n</body>\n</html>\n"
    )


def _markdown_lines(table: Table) -> list[str]:
    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"

    rule = f"|{'|'.join('---:' if number else '---' for _, number in table.columns)}|"
    return [line([heading for heading, _ in table.columns]), rule, *map(line, table.rows)]


def _html_table(table: Table) -> str:
    kinds = [' class="number"' if number else "" for _, number in table.columns]

    def row(tag: str, cells: Sequence[str]) -> str:
        written = "".join(f"<{tag}{kind}>{html.escape(cell)}</{tag}>" for kind, cell in zip(kinds, cells))
        return f"<tr>{written}</tr>"

    head = row("th", [heading for heading, _ in table.columns])
    body = "\n".join(row("td", cells) for cells in table.rows)
    caption = f"<caption>{html.escape(table.title)}</caption>" if table.title else ""
    return f'<div class="wide"><table>{caption}<thead>{head}</thead>\n<tbody>{body}</tbody></table></div>\n'
