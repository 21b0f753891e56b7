"""The supported Python versions are stated in several places, and agree in all of them."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
BOUNDS = re.findall(r'^requires-python = ">=3\.(\d+),<3\.(\d+)"$', PROJECT, re.MULTILINE)
FIRST, END = map(int, BOUNDS[0])


def test_running_python_is_supported() -> None:
    assert (3, FIRST) <= sys.version_info[:2] < (3, END)


def test_classifiers_list_each() -> None:
    named = re.findall(r'"Programming Language :: Python :: 3\.(\d+)"', PROJECT)
    assert [int(minor) for minor in named] == list(range(FIRST, END)) and END > 13


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("README.md", "Python 3.{} to 3.{}"),
        ("CONTRIBUTING.md", "Python 3.{} to 3.{}"),
        ("Makefile", "(3.{} to 3.{})"),
        ("Makefile", "(3, {}) <= v <= (3, {})"),
    ],
)
def test_documents_agree(name: str, form: str) -> None:
    assert form.format(FIRST, END - 1) in (ROOT / name).read_text(encoding="utf-8")
