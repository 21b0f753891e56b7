"""Accepting: the one door through which tokens become output, and the rules beside it.

A rule with options is a folder of its own; one that was deleted is simply not listed.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from stridelm.registry import Registry

if TYPE_CHECKING:
    from stridelm.verify.rule import Rule

RULES: Registry[type[Rule]] = Registry("acceptance rule")
for _name, _file, _class in (
    ("exact", "exact", "Exact"),
    ("rejection", "rejection", "Rejection"),
    ("block", "block", "Block"),
    ("typical", "typical/rule", "Typical"),
    ("relaxed", "relaxed/rule", "Relaxed"),
    ("trust", "trust/rule", "Trust"),
    ("synthetic", "synthetic", "Synthetic"),
    ("synthetic-trust", "synthetic", "SyntheticTrust"),
):
    if (Path(__file__).parent / f"{_file}.py").is_file():
        RULES.add(_name, f"stridelm.verify.{_file.replace('/', '.')}:{_class}")
