"""How a checkpoint stores its matrices: dense, or quantised, as its config.json and its files' headers say."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stridelm.kernels.plain_fp8 import BLOCK, E4M3, quantised, widened
from stridelm.models.files import DTYPES
from stridelm.models.layers.block import Block
from stridelm.models.layers.fp8 import BY_BLOCK, BY_BLOCK_POWERS, BY_CHANNEL, FP8Format
from stridelm.models.layers.linear import Storable
from stridelm.models.layers.quantised import REMEDY, refuse_unread
from stridelm.models.layers.slots import ModelPart
from stridelm.values import shortened

Tensors = Iterator[tuple[str, torch.Tensor]]
WEIGHT = ".weight"
E8M0 = torch.float8_e8m0fnu
"""Powers of two in eight bits, in which scales may be stored."""
METHODS = ("fp8", "compressed-tensors")
"""Values of `quant_method` whose weights can be read."""
QUANTIZATIONS = {"fp8": BY_BLOCK}
"""What `quantization` may be set to, and the format in which matrices are then stored while they are loaded."""


@dataclass(frozen=True)
class Storage:
    """The quantised format of a checkpoint's matrices; a tensor's dtype says which of them have it."""

    form: FP8Format
    path: Path
    """The checkpoint's directory."""
    excluded: tuple[str, ...] = ()
    """Modules whose matrices are dense, as config.json lists them."""
    quantises: bool = False
    """Whether the checkpoint is dense, and its matrices are quantised while they are loaded."""

    def excludes(self, module: str) -> bool:
        """Whether config.json lists a module: by its name, the end or the beginning of it, or a pattern."""
        for listed in self.excluded:
            pattern = listed.removeprefix("re:")
            if pattern != listed:
                if re.match(pattern, module):
                    return True
            elif module == listed or module.startswith(f"{listed}.") or module.endswith(f".{listed}"):
                return True
        return False


def storage_of(config: Any, path: str | Path, quantization: str | None = None) -> Storage | None:
    """What a config.json says of quantisation; None if all weights are dense and stay so.

    config: a transformers config or a mapping. path: its directory. quantization: one of QUANTIZATIONS, to quantise
    dense weights. Raises ValueError for a way of quantising that is not supported, and for `quantization` of a
    quantised checkpoint.
    """
    field = "quantization_config"
    said = config.get(field) if isinstance(config, Mapping) else getattr(config, field, None)
    if not said:
        return None if quantization is None else Storage(QUANTIZATIONS[quantization], Path(path), quantises=True)
    if quantization is not None:
        raise ValueError(f"quantization={quantization!r} would have no effect on weights that are quantised; {REMEDY}")
    said = said.to_dict() if hasattr(said, "to_dict") else said
    refuse_unread(said, str(path), METHODS)
    stated = Stated(Path(path), field, dict(said))
    return _by_block(stated) if said["quant_method"] == "fp8" else _by_channel(stated)


@dataclass(frozen=True)
class Stated:
    """An object in a config.json, and where it is, for errors."""

    path: Path
    name: str
    fields: dict[str, Any]

    def get(self, field: str) -> Any:
        return self.fields.get(field)

    def part(self, field: str) -> Stated:
        """The object that a field holds, empty if there is none. Raises ValueError for anything else."""
        value = self.get(field)
        if not isinstance(value, Mapping | None):
            raise self._malformed(field, "an object", value)
        return Stated(self.path, f"{self.name}.{field}", dict(value or {}))

    def modules(self, field: str) -> tuple[str, ...]:
        """The modules that a field lists, none if it is not there. Raises ValueError for anything else, and for
        patterns that are none."""
        value = self.get(field)
        if value is None:
            return ()
        if not isinstance(value, list | tuple) or not all(isinstance(each, str) for each in value):
            raise self._malformed(field, "a list of modules' names", value)
        for each in value:
            try:
                re.compile(each.removeprefix("re:") if each.startswith("re:") else "")
            except re.error as error:
                raise self._malformed(field, f"names, or regular expressions after re: ({error})", each) from error
        return tuple(value)

    def _malformed(self, field: str, kind: str, value: Any) -> ValueError:
        where = f"{self.path}/config.json: {self.name}.{field}"
        return ValueError(f"{where} must be {kind}; got {shortened(value)}; copy the file from the model again")


def _by_block(said: Stated) -> Storage:
    only = {
        "weight_block_size": ([BLOCK, BLOCK],),
        "activation_scheme": ("dynamic", None),
        "fmt": ("e4m3", None),
        "scale_fmt": ("float", "ue8m0", None),
        "expert_dtype": ("fp8", None),
    }
    for field, values in only.items():
        value = said.get(field)
        if (list(value) if isinstance(value, tuple) else value) not in values:
            supported = " or ".join(repr(each) for each in values if each is not None)
            raise _unsupported(f"FP8 with {field} {value!r}", supported)
    form = BY_BLOCK_POWERS if said.get("scale_fmt") == "ue8m0" else BY_BLOCK
    return Storage(form, said.path, said.modules("modules_to_not_convert"))


def _by_channel(said: Stated) -> Storage:
    if said.get("format") != "float-quantized":
        raise _unsupported(f"compressed-tensors in format {said.get('format')!r}", "'float-quantized'")
    _check_kv_cache(said.part("kv_cache_scheme"))
    sparsity, transforms = said.part("sparsity_config"), said.part("transform_config")
    if sparsity.get("format") not in (None, "dense"):
        raise _unsupported(f"compressed-tensors with sparsity_config in format {sparsity.get('format')!r}", "'dense'")
    if any(transforms.fields.values()):
        raise _unsupported(f"compressed-tensors with transform_config {transforms.fields}", "none")
    groups = said.part("config_groups")
    for group in [groups.part(name) for name in groups.fields] or [groups]:
        for which, strategy, dynamic in (("weights", "channel", False), ("input_activations", "token", True)):
            part, wanted = group.part(which), {"num_bits": 8, "type": "float", "strategy": strategy}
            found = {field: part.get(field) for field in wanted}
            if found != wanted or bool(part.get("dynamic")) != dynamic or part.get("symmetric") is False:
                raise _unsupported(
                    f"compressed-tensors with {which} {part.fields}",
                    f"{wanted}, symmetric and {'dynamic' if dynamic else 'not dynamic'}",
                )
        if group.get("output_activations"):
            raise _unsupported(f"compressed-tensors with output_activations {group.get('output_activations')}", "none")
    return Storage(BY_CHANNEL, said.path, said.modules("ignore"))


def _check_kv_cache(said: Stated) -> None:
    """Raise ValueError for scales of KV other than one for a layer's keys and one for its values."""
    wanted = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    if said.fields and ({field: said.get(field) for field in wanted} != wanted or said.get("dynamic")):
        raise _unsupported(f"a kv_cache_scheme {said.fields}", f"{wanted}, not dynamic")


def _unsupported(what: str, supported: str) -> ValueError:
    return ValueError(f"quantised weights: {what} is not supported; supported: {supported}; otherwise {REMEDY}")


class Loading:
    """What is done to a checkpoint's tensors on their way into a model: what `store` returns."""

    def __init__(self, form: FP8Format, quantises: Collection[str], widens: Collection[str]) -> None:
        """Names of weights: of those that are quantised, and of those that are widened."""
        self.form, self.quantises = form, frozenset(quantises)
        self.widens = frozenset(widens)

    @property
    def read_whole(self) -> frozenset[str]:
        """Tensors that must be whole to be worked on: a share of a widened matrix may cut what shares a scale."""
        return self.widens | {self._scale_of(name) for name in self.widens}

    def stream(self, tensors: Tensors) -> Tensors:
        """The tensors as the model's slots expect them. Raises ValueError for scales that do not fit, or are
        missing."""
        waiting: dict[str, dict[str, torch.Tensor]] = {}
        for name, tensor in tensors:
            weight = f"{name.rpartition('.')[0]}{WEIGHT}"
            if self.form.powers and tensor.dtype == E8M0 and name == self._scale_of(weight):
                tensor = tensor.float()
            if name in self.quantises:
                stored, scale = quantised(tensor)
                yield name, stored
                yield self._scale_of(name), scale
            elif weight in self.widens and name in (weight, self._scale_of(weight)):
                pair = waiting.setdefault(weight, {})
                pair["weight" if name == weight else "scale"] = tensor
                if len(pair) == 2:
                    yield weight, self._widened(weight, **waiting.pop(weight))
            else:
                yield name, tensor
        if waiting:
            missing = ", ".join(sorted(self._scale_of(name) for name in waiting))
            raise ValueError(
                f"scales are missing, or the weights of which they are: {missing}; copy the checkpoint again"
            )

    def _scale_of(self, weight: str) -> str:
        return f"{weight.removesuffix(WEIGHT)}.{self.form.scale}"

    def _widened(self, name: str, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        wanted = self.form.scales_of(weight.shape)
        if scale.shape != wanted or scale.dtype not in DTYPES.values():
            have = f"{self._scale_of(name)} is {list(scale.shape)} in {_name(scale.dtype)}"
            have += f", but {self.form.name} has {list(wanted)} in one of {', '.join(DTYPES)}"
            raise ValueError(f"{have}; copy the checkpoint again")
        if not (scale.is_meta or are_scales(scale)):
            raise ValueError(f"{self._scale_of(name)} are not all finite and at least 0; copy the checkpoint again")
        return widened(weight, scale, BLOCK if self.form.by_block else 1)


def are_scales(tensor: torch.Tensor) -> bool:
    """Whether its numbers can be scales: finite ones, and none below 0. A block of zeros may have a scale of 0."""
    return bool(((tensor >= 0) & (tensor < torch.inf)).all())


def store(model: ModelPart, storage: Storage, headers: Mapping[str, torch.Tensor] | None) -> Loading:
    """Give the model's matrices, which have no memory yet, the formats in which the checkpoint stores them.

    headers: the checkpoint's tensors without data; without them, config.json's list decides. A matrix that is stored
    quantised, and which its module must have dense, is widened while it is loaded. Raises ValueError if matrices that
    are multiplied as one are stored differently, if what is no matrix is stored quantised, or if the shares of a rank
    would cut what shares a scale.
    """
    quantises: list[str] = []
    widens: list[str] = []
    inside = {id(part) for block in model.modules() if isinstance(block, Block) for part in block.modules()}
    for module, names in _matrices(model):
        replaceable = isinstance(module, Storable) and module.format.replaceable
        if storage.quantises or headers is None:
            chosen = replaceable and id(module) in inside and not _any_excluded(storage, names)
            quantises += names if chosen and storage.quantises else ()
        else:
            eight = [name for name in names if name in headers and headers[name].dtype == E4M3]
            others = sorted(name for name in names if name in headers and name not in eight)
            chosen = replaceable and bool(eight)
            if chosen and others:
                raise ValueError(
                    f"{eight[0]} is in {_name(E4M3)} and {others[0]} in {_name(headers[others[0]].dtype)}, but both "
                    f"are multiplied at once; {REMEDY}"
                )
            if not chosen:
                _check_matrices(eight, headers, storage.path)
                widens += eight
        if chosen:
            assert isinstance(module, Storable)
            module.store_as(storage.form)
    return Loading(storage.form, quantises, widens)


def _check_matrices(names: Sequence[str], headers: Mapping[str, torch.Tensor], path: Path) -> None:
    for name in names:
        if headers[name].ndim != 2:
            shape = list(headers[name].shape)
            raise ValueError(
                f"{name} in {path} is {shape} in {_name(E4M3)}, but only matrices can be in eight bits; {REMEDY}"
            )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _any_excluded(storage: Storage, names: Sequence[str]) -> bool:
    return any(storage.excludes(name.removesuffix(WEIGHT)) for name in names)


def _matrices(model: ModelPart) -> list[tuple[nn.Module, list[str]]]:
    """Every module with the checkpoint's names of its weights."""
    found: dict[str, list[str]] = {}
    for stored, slot in model.slots():
        if stored.endswith(WEIGHT):
            found.setdefault(slot.name.rpartition(".")[0], []).append(stored)
    return [(model.get_submodule(path), names) for path, names in found.items()]
