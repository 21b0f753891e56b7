"""Drafters by name, each in a folder of its own. A drafter whose folder was deleted is simply not listed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from stridelm.options import OptionRegistry

if TYPE_CHECKING:
    from stridelm.draft.base import Drafter

DRAFTERS: OptionRegistry[type[Drafter]] = OptionRegistry("drafter")
for _name, _class, _options in (
    ("none", "NoDrafter", "options:Options"),
    ("ngram", "NgramDrafter", "draft.options:LookupOptions"),
    ("suffix", "SuffixDrafter", "draft.suffix:SuffixOptions"),
    ("mask", "MaskDrafter", "draft.options:GuessOptions"),
    ("mtp", "MtpDrafter", "draft.options:HeadOptions"),
    ("eagle", "EagleDrafter", "draft.options:HeadOptions"),
    ("frozen_kv", "FrozenKVDrafter", "draft.options:HeadOptions"),
    ("medusa", "MedusaDrafter", "draft.options:HeadOptions"),
    ("model", "ModelDrafter", "draft.options:ChainOptions"),
    ("hybrid", "HybridDrafter", "draft.options:GuessOptions"),
):
    if (Path(__file__).parent / _name / "drafter.py").is_file():
        DRAFTERS.add(_name, f"stridelm.draft.{_name}.drafter:{_class}", f"stridelm.{_options}")
