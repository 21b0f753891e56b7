"""Hooks of the documentation site (mkdocs.yml): pages outside docs/, and links that lead out of it.

Documents are also read in the repository, so their links are paths there: `../src/stridelm/types.py`, `docs/path.md`.
On the site a link to a page leads to that page, and a link to any other file to the repository if its address is known
(REPO_URL); otherwise it becomes plain text. A link to a file that does not exist is left unchanged, and MkDocs warns
about it, which fails a strict build.
"""

from __future__ import annotations

import posixpath
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

ROOT = Path(__file__).parents[1]
DOCS = "docs/"
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
}
"""Documents in the repository's root -> their path on the site."""
SOURCES = {page: source for source, page in PAGES.items()}


def source_of(page: str) -> str:
    """The path in the repository of a page of the site."""
    return SOURCES.get(page, DOCS + page)


def destination(page: str, link: str, repository: str | None) -> str | None:
    """Where a link of a page leads on the site; None if it has no destination there. repository: its address."""
    parts = urlsplit(link)
    if parts.scheme or parts.netloc or not parts.path or parts.path.startswith("/"):
        return link
    target = posixpath.normpath(posixpath.join(posixpath.dirname(source_of(page)), parts.path))
    if not (ROOT / target).exists():
        return link
    fragment = f"#{parts.fragment}" if parts.fragment else ""
    if target in PAGES or target.startswith(DOCS):
        place = PAGES.get(target) or target.removeprefix(DOCS)
        return posixpath.relpath(place, posixpath.dirname(page) or ".") + fragment
    if not repository:
        return None
    kind = "tree" if (ROOT / target).is_dir() else "blob"
    return f"{repository.rstrip('/')}/{kind}/HEAD/{target}{fragment}"


def on_files(files: Any, config: Any) -> Any:
    """Add the pages outside docs/."""
    from mkdocs.structure.files import File

    for source, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    return files


def on_config(config: Any) -> Any:
    """Make Markdown rewrite links after parsing, so that text in code that only looks like a link is not changed."""
    from markdown import Extension, Markdown
    from markdown.treeprocessors import Treeprocessor

    class Links(Treeprocessor):
        def run(self, root: Any) -> None:
            for element in root.iter():
                attribute = {"a": "href", "img": "src"}.get(element.tag)
                link = attribute and element.get(attribute)
                if not link:
                    continue
                leads_to = destination(_current["page"], link, config.extra["repository"])
                if leads_to is None:
                    element.tag = "span"
                    del element.attrib[attribute]
                else:
                    element.set(attribute, leads_to)

    class LinksExtension(Extension):
        def extendMarkdown(self, md: Markdown) -> None:
            # After the inline patterns that create links (20), before MkDocs checks them (0).
            md.treeprocessors.register(Links(md), "repository_links", 5)

    config.markdown_extensions.append(LinksExtension())
    return config


_current = {"page": "index.md"}


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Record which page is rendered next."""
    _current["page"] = page.file.src_uri
    return markdown
