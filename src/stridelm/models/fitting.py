"""Whether a checkpoint's tensors are those of a model, and where each goes in it."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch
from torch import nn

from stridelm.models.files import DTYPES
from stridelm.models.kv_scales import is_kv_scale
from stridelm.models.layers.decoder import HEAD, Decoder
from stridelm.models.layers.hf import EXTRA_MODULES
from stridelm.models.layers.slots import WHOLE, Slots, WeightSlot
from stridelm.models.storage import E8M0, Loading, are_scales

LAYER = re.compile(r"model\.layers\.(?P<layer>\d+)\.")
OF_MODULE = re.compile(rf"model\.mtp_layers\.|mtp\.|{LAYER.pattern}(?:enorm|hnorm|eh_proj|shared_head)\.")
"""Tensors that only MTP modules have, which checkpoints name separately or as layers after the last one."""
NAMED = 8
"""Tensors that an error names, at most; the others are counted."""


class Fillable(Protocol):
    """A module that knows where a checkpoint's tensors go in it."""

    def slots(self, theirs: str = "") -> Slots: ...

    def named_parameters(self, *, remove_duplicate: bool) -> Iterator[tuple[str, nn.Parameter]]: ...


@torch.no_grad()
def fill(
    model: Fillable,
    tensors: Iterator[tuple[str, torch.Tensor]],
    path: Path,
    ignorable: Callable[[str], bool] = lambda name: False,
    cut: Collection[str] = (),
) -> None:
    """Copy tensors into the model, or the model's shares of them; those named in `cut` are such shares already. Raises
    ValueError listing missing, unexpected and misshapen ones."""
    slots: dict[str, WeightSlot] = dict(model.slots())
    parameters = dict(model.named_parameters(remove_duplicate=False))
    waiting = set(slots)
    unexpected: list[str] = []
    misshapen: list[str] = []
    unsupported: list[str] = []
    for name, tensor in tensors:
        if name not in slots:
            # Scales of KV are no weights: engine/kv_dtype.py reads them. transformers writes empty matrices for experts
            # that a config has none of.
            if not (ignorable(name) or is_kv_scale(name)) and tensor.numel():
                unexpected.append(name)
            continue
        slot = replace(slots[name], split=WHOLE) if name in cut else slots[name]
        target = parameters[slot.name][slot.start : slot.stop]
        waiting.discard(name)
        whole = slot.stored_shape(target.shape)
        if whole != tensor.shape:
            misshapen.append(f"{name} is {list(tensor.shape)}, config.json says {list(whole)}")
            continue
        if tensor.dtype != target.dtype and not {tensor.dtype, target.dtype} <= {*DTYPES.values()}:
            unsupported.append(f"{name} ({tensor.dtype})")
            continue
        if not target.is_meta:
            target.copy_(slot.rows_of(tensor))
    kinds = {
        "missing": sorted(waiting),
        "unexpected": unexpected,
        "misshapen": misshapen,
        "of a dtype that weights cannot have": unsupported,
    }
    problems = [f"{kind}: {_listed(names)}" for kind, names in kinds.items() if names]
    if problems:
        remedy = "copy both from the model again"
        if any(str(torch.float8_e4m3fn) in text for text in unsupported):
            remedy += ", with config.json's quantization_config if weights are in eight bits"
        if any(str(E8M0) in text for text in unsupported):
            remedy += "; scales of that dtype need scale_fmt 'ue8m0' in its quantization_config"
        if any(map(OF_MODULE.match, unexpected)):
            remedy += f", or let config.json declare all MTP modules that are there ({' or '.join(EXTRA_MODULES)})"
        raise ValueError(f"the weights in {path} do not fit its config.json; {'; '.join(problems)}; {remedy}")


def ignorable_of(model: Decoder, names: Iterable[str]) -> Callable[[str], bool]:
    """Which of a checkpoint's tensors, all of whose names are given, may be skipped: files carry redundant ones, and
    declared extra modules have their own."""
    spec = model.spec
    found = {int(match["layer"]) for name in names if (match := OF_MODULE.match(name)) and match["layer"]}
    # Where config.json has too few layers, the next one of the model must not pass for a module.
    modules = found & set(range(spec.num_layers, spec.num_layers + spec.extra_modules))
    copies = (HEAD,) if spec.tied and not spec.tied_as_head else ()

    def ignorable(name: str) -> bool:
        if name.endswith("rotary_emb.inv_freq") or name in copies:
            return True
        if model.leaves_out(name):
            return True
        layer = LAYER.match(name)
        if layer is not None:
            return int(layer["layer"]) in modules
        return spec.extra_modules > 0 and OF_MODULE.match(name) is not None

    return ignorable


def check_scales(model: Decoder, loading: Loading, path: Path) -> None:
    """Raise ValueError naming scales of a model that is loaded which are not all finite and at least 0."""
    parameters = dict(model.named_parameters())
    slots = [(stored, slot) for stored, slot in model.slots() if stored.endswith(f".{loading.form.scale}")]
    # A parameter has the scales of many tensors, and to look at one on a GPU is to wait for it.
    suspects = {name for name in {slot.name for _, slot in slots} if not are_scales(parameters[name])}
    wrong = [
        stored
        for stored, slot in slots
        if slot.name in suspects and not are_scales(parameters[slot.name][slot.start : slot.stop])
    ]
    if wrong:
        raise ValueError(f"scales in {path} are not all finite and at least 0: {_listed(wrong)}; copy it again")


def _listed(names: Sequence[str]) -> str:
    more = len(names) - NAMED
    return f"{', '.join(names[:NAMED])}{f' and {more} more' if more > 0 else ''}"
