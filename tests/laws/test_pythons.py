"""Which Pythons Stride runs on is said in several places, and the same in all of them."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
BOUNDS = re.findall(r'^requires-python = ">=3\.(\d+),<3\.(\d+)"$', PROJECT, re.MULTILINE)
FIRST, BEHIND = map(int, BOUNDS[0])


def test_this_one_is_among_them() -> None:
    assert (3, FIRST) <= sys.version_info[:2] < (3, BEHIND)


def test_classifiers_name_each() -> None:
    named = re.findall(r'"Programming Language :: Python :: 3\.(\d+)"', PROJECT)
    assert [int(minor) for minor in named] == list(range(FIRST, BEHIND)) and BEHIND > 13


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("README.md", "Python 3.{} to 3.{}"),
        ("CONTRIBUTING.md", "Python 3.{} to 3.{}"),
        ("Makefile", "(3.{} to 3.{})"),
        ("Makefile", "(3, {}) <= v <= (3, {})"),
    ],
)
def test_documents_say_the_same(name: str, form: str) -> None:
    assert form.format(FIRST, BEHIND - 1) in (ROOT / name).read_text(encoding="utf-8")
