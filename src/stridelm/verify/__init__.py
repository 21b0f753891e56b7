"""Verification: the one place where logits become tokens (verifier.py), and the acceptance rules by name.

A rule with options has a folder of its own; a rule whose file was deleted is simply not listed.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from stridelm.options import OptionRegistry

if TYPE_CHECKING:
    from stridelm.verify.rule import Rule

RULES: OptionRegistry[type[Rule]] = OptionRegistry("acceptance rule")
for _name, _file, _class, _options in (
    ("exact", "exact", "Exact", "options:Options"),
    ("rejection", "rejection", "Rejection", "options:Options"),
    ("block", "block", "Block", "options:Options"),
    ("typical", "typical/rule", "Typical", "verify.typical:TypicalOptions"),
    ("relaxed", "relaxed/rule", "Relaxed", "verify.relaxed:RelaxedOptions"),
    ("trust", "trust/rule", "Trust", "verify.trust:TrustOptions"),
    ("synthetic", "synthetic", "Synthetic", "options:Options"),
    ("synthetic-trust", "trust/synthetic", "SyntheticTrust", "options:Options"),
):
    if (Path(__file__).parent / f"{_file}.py").is_file():
        RULES.add(_name, f"stridelm.verify.{_file.replace('/', '.')}:{_class}", f"stridelm.{_options}")
