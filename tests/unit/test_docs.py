"""The documentation: its pictures are what their script draws."""

from __future__ import annotations

import runpy
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "docs" / "images"
PICTURES = runpy.run_path(str(IMAGES / "architecture.py"))["pictures"]()


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_are_what_their_script_draws(name: str) -> None:
    """Whoever edits a picture edits docs/images/architecture.py, and runs it."""
    assert (IMAGES / name).read_bytes() == PICTURES[name].encode()


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_say_what_they_show(name: str) -> None:
    """Well-formed, with a title and a description for those who cannot see them, and colours for a dark page."""
    tree = ElementTree.fromstring(PICTURES[name])
    space = "{http://www.w3.org/2000/svg}"
    assert all(tree.findtext(f"{space}{part}") for part in ("title", "desc"))
    assert "prefers-color-scheme: dark" in PICTURES[name]
