"""The published JSON-Schema-Test-Suite, out of the source distribution of the package `jsonschema`, and the ways in
which its instances may be written as outputs."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

DRAFTS = ("draft4", "draft6", "draft7", "draft2019-09", "draft2020-12")
IDENTITY = {
    "draft4": "http://json-schema.org/draft-04/schema#",
    "draft6": "http://json-schema.org/draft-06/schema#",
    "draft7": "http://json-schema.org/draft-07/schema#",
}
"""Schemas of older drafts do not name them."""
NARROWER = re.compile(
    "leap second|only an annotation by default|^bignum.json: comparison works"
    r"|^ipv6.json: (mixed format|a long valid ipv6)"
    r"|^email.json: (a quoted string|an IPv6-address-literal)|^const.json: float is valid|^float-overflow.json"
    r"|^vocabulary.json: no validation"
    r"|^ecmascript-regex.json: (NKO DIGIT|latin-1 e-acute|Line tabulation|zero-width|Non-whitespace control)"
)
"""Valid instances that no output is: formats are asserted, and narrower than the standard's; bounds beyond 2**53 are
narrowed to it; characters in which ECMAScript and Python differ, and control characters, are not written."""
NOT_SAID = re.compile("^(content.json|zeroTerminatedFloats.json)")
"""Optional parts in which annotations are asserted, or `1.0` is another number than `1`."""


@dataclass(frozen=True)
class Case:
    file: str
    description: str
    schema: Any
    tests: list[dict[str, Any]]


def suite(draft: str) -> Iterator[Case]:
    for path in sorted((_folder() / draft).rglob("*.json")):
        if path.parent.name in (draft, "optional", "format") and not NOT_SAID.search(path.name):
            for case in json.loads(path.read_text(encoding="utf-8")):
                schema = case["schema"]
                if isinstance(schema, dict) and draft in IDENTITY:
                    schema = {"$schema": IDENTITY[draft], **schema}
                yield Case(path.name, case["description"], schema, case["tests"])


def instances(value: Any) -> Iterator[str]:
    """The ways to write a value: keys in every order, whole numbers without a point."""
    return itertools.islice(_forms(value), 200)


def _forms(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        items = list(value.items())
        for order in itertools.permutations(items) if len(items) <= 4 else [items]:
            for forms in itertools.product(*(list(itertools.islice(_forms(one), 8)) for _, one in order)):
                yield (
                    "{"
                    + ", ".join(
                        f"{json.dumps(key, ensure_ascii=False)}: {form}" for (key, _), form in zip(order, forms)
                    )
                    + "}"
                )
    elif isinstance(value, list):
        for forms in itertools.product(*(list(itertools.islice(_forms(one), 8)) for one in value)):
            yield "[" + ", ".join(forms) + "]"
    else:
        yield json.dumps(value, ensure_ascii=False)
        if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
            yield str(int(value))


@cache
def _folder() -> Path:
    """Downloaded once per environment; the test is skipped where that cannot be, except in CI."""
    name = f"jsonschema-{version('jsonschema')}"
    place = Path(sys.prefix) / "share" / "json-schema-test-suite" / name
    if not place.is_dir():
        place.parent.mkdir(parents=True, exist_ok=True)
        arguments = ("download", "--quiet", "--no-deps", "--no-binary=:all:", "-d", str(place.parent))
        done = subprocess.run(
            [sys.executable, "-m", "pip", *arguments, name.replace("-", "==")],
            capture_output=True,
            text=True,
            check=False,
        )
        archive = place.parent / f"{name}.tar.gz"
        if done.returncode and not archive.exists():
            assert "CI" not in os.environ, done.stderr
            pytest.skip("the source distribution of jsonschema, which holds the suite, cannot be downloaded")
        with tarfile.open(archive) as tar:
            tests = [one for one in tar.getmembers() if one.name.startswith(f"{name}/json/tests/")]
            tar.extractall(place.parent, members=tests, filter="data")
    return place / "json" / "tests"
