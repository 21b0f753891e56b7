"""Drafters by name, each a folder of its own. A folder that was deleted is simply not listed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from stridelm.registry import Registry

if TYPE_CHECKING:
    from stridelm.draft.base import Drafter

DRAFTERS: Registry[type[Drafter]] = Registry("drafter")
for _name, _class in (
    ("none", "NoDrafter"),
    ("ngram", "NgramDrafter"),
    ("suffix", "SuffixDrafter"),
    ("mask", "MaskDrafter"),
    ("mtp", "MtpDrafter"),
    ("eagle", "EagleDrafter"),
    ("medusa", "MedusaDrafter"),
    ("model", "ModelDrafter"),
):
    if (Path(__file__).parent / _name / "drafter.py").is_file():
        DRAFTERS.add(_name, f"stridelm.draft.{_name}.drafter:{_class}")
