"""Drafting with native multi-token prediction modules (DeepSeek-V3, arXiv 2412.19437), from the checkpoint itself or
from a directory of their own.

A single module is applied repeatedly (FastMTP, arXiv 2509.18362); several are applied in turn, one per depth.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from stridelm.draft.base import TargetInfo
from stridelm.draft.given import Given, given
from stridelm.draft.head_drafter import HeadDrafter
from stridelm.draft.heads import DraftHead, HeadSource, store_as_in
from stridelm.draft.mtp.head import DEEPSEEK, FORMS, MIMO, Form, MtpHead
from stridelm.models.layers.decoder import Decoder
from stridelm.models.layers.hf import EXTRA_MODULES
from stridelm.models.ties import same_matrix

logger = logging.getLogger(__name__)


class MtpDrafter(HeadDrafter):
    name = "mtp"
    takes = "MTP modules by themselves, named as in a checkpoint that has them"

    @classmethod
    def recognises(cls, given: Given) -> bool:
        declared, layers = _declared(given.config), given.config.get("num_hidden_layers", 0)
        whole = "model.norm.weight" in given.shapes
        return bool(declared) and not whole and _form(given.shapes, layers) is not None

    @classmethod
    def why_not(cls, target: TargetInfo) -> str | None:
        if target.config is None:
            return "there is no model"
        source = _source(target)
        if not _declared(source.config):
            return f"its config.json declares no MTP modules ({' or '.join(EXTRA_MODULES)}), and none are given"
        if target.weighted and _form(source.shapes, target.config.num_hidden_layers) is None:
            return "its config.json declares MTP modules and its tensors hold none in a layout that Stride knows"
        return None

    @classmethod
    def usual_depth(cls, target: TargetInfo) -> int:
        modules = _declared(_source(target).config)
        return cls.default_depth if modules == 1 else min(cls.default_depth, modules)

    @classmethod
    def empty(cls, target: TargetInfo, model: Decoder) -> MtpHead:
        source = _source(target)
        form = MIMO if target.config.model_type == "mimo" else DEEPSEEK
        if target.weighted:
            form = _form(source.shapes, model.spec.num_layers) or form
        head = MtpHead(model, form, _declared(source.config))
        own = _own_matrices(head.repeated, source, target) if target.weighted else ()
        return MtpHead(model, form, head.num_modules, own) if own else head

    @classmethod
    def source(cls, target: TargetInfo, head: DraftHead) -> HeadSource:
        assert isinstance(head, MtpHead)
        given, layers = _source(target), target.config.num_hidden_layers
        prefixes = tuple(head.form.module(number, layers) for number in range(head.num_modules))

        def tensors(device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
            return given.tensors(device, lambda name: name.startswith(prefixes))

        return HeadSource(given.path, tensors, head.is_copy, store_as_in(head, given, target.weighted))


def _source(target: TargetInfo) -> Given:
    """The directory with the modules: the one the user named, or the checkpoint itself."""
    path = target.heads.get("mtp", target.path)
    assert path is not None
    return given(path)


def _own_matrices(repeated: Mapping[str, str], source: Given, target: TargetInfo) -> tuple[str, ...]:
    """Which of the matrices that modules may repeat are stored and differ from the target's. repeated: with its name of
    each."""
    assert target.path is not None
    stored = [name for name in repeated if name in source.shapes]
    own = tuple(name for name in stored if not same_matrix(source.path, name, target.path, repeated[name]))
    if own:
        _warn_once(source.path, own)
    return own


@lru_cache(maxsize=64)
def _warn_once(path: Path, own: tuple[str, ...]) -> None:
    logger.warning("%s: %s differ from the model's own; MTP modules use them", path, ", ".join(own))


def _declared(config: Mapping[str, Any]) -> int:
    """Number of modules that a config.json declares."""
    return max((config.get(field) or 0 for field in EXTRA_MODULES), default=0)


def _form(names: Iterable[str], layers: int) -> Form | None:
    """The form whose first module is among these tensor names, for a target with `layers` layers."""
    return next((form for form in FORMS if f"{form.module(0, layers)}{form.join}.weight" in names), None)
