"""From a Hugging Face directory to a loaded model. Errors in a checkpoint are raised here and name the culprit."""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from stridelm.cache.pool import free_memory
from stridelm.kernels import ops_for
from stridelm.models import MODELS, WITH_TEXT
from stridelm.models.files import DTYPES, read_headers, read_tensors
from stridelm.models.fitting import check_scales, fill, ignorable_of
from stridelm.models.layers.compiled import make_ready
from stridelm.models.layers.decoder import Decoder
from stridelm.models.layers.hf import text_part
from stridelm.models.layers.linear import Storable, WeightFormat
from stridelm.models.layers.products import bfloat16_is_native
from stridelm.models.layers.quantised import refuse_unread
from stridelm.models.layers.slots import ModelPart, Split
from stridelm.models.storage import METHODS, Loading, storage_of, store
from stridelm.models.ties import settle_tie
from stridelm.parallel.shard import ONE, Shard
from stridelm.progress import bar, size
from stridelm.text.pointers import refuse_pointer

logger = logging.getLogger(__name__)

M = TypeVar("M", bound=nn.Module)


SHOWN_BYTES = 2**30
"""Minimum bytes of weights whose loading shows a bar: fewer are loaded before one could be read."""
DRAWN_ROWS = 4096
"""Of an eight-bit matrix that is drawn at random, at once."""


def load_config(path: str | Path) -> Any:
    """The transformers config of a checkpoint directory, or of its text part if it has others beside it. It says of
    embedding and output head what the files hold.

    Raises ValueError if it is missing or cannot be read, and for what is not supported: model types, and weights that
    are quantised.
    """
    from transformers import AutoConfig

    path = Path(path)
    if not path.is_dir():
        raise ValueError(f"no model at {path}: give a directory with config.json and *.safetensors")
    if not (path / "config.json").is_file():
        raise ValueError(
            f"{path} has no config.json: give a Hugging Face checkpoint directory{_in_another_format(path)}"
        )
    stated = _json(path / "config.json")
    _make_known(stated, path)
    refuse_unread(stated.get("quantization_config"), str(path), METHODS)
    for quantisation in (stated.get("compression_config"), _beside(path)):  # once compressed-tensors', and ModelOpt's
        refuse_unread(quantisation, str(path))
    try:
        # Left open, transformers would ask on a terminal whether to run what `auto_map` refers to.
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    # A broken file makes transformers raise all kinds of errors; the user needs the file's name in each case.
    except Exception as error:
        raise ValueError(f"{path}/config.json cannot be read, copy it from the model again: {error}") from error
    under = WITH_TEXT.get(config.model_type)
    if under is not None:
        config = text_part(config, under)
    if config.model_type not in MODELS:
        raise ValueError(f"the text part of {path} has the unknown model type {config.model_type!r}; {_known()}")
    settle_tie(config, path)
    return config


def _known() -> str:
    return f"choose one of: {', '.join((*MODELS, *WITH_TEXT))}"


def _in_another_format(path: Path) -> str:
    if not (path / "params.json").is_file():
        return ""
    return "; params.json says that this one is in Meta's or Mistral's format: download the model in transformers'"


def _json(file: Path) -> dict[str, Any]:
    refuse_pointer(file)
    try:
        stated = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{file} cannot be read, copy it from the model again: {error}") from error
    if not isinstance(stated, dict):
        raise ValueError(f"{file} cannot be read, copy it from the model again: it holds no object")
    return stated


def _make_known(stated: Mapping[str, Any], path: Path) -> None:
    """Import an architecture's file, which registers its config class, if transformers has none for it. Raises
    ValueError for an unknown architecture."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = stated.get("model_type")
    if not isinstance(kind, str) or not (kind in MODELS or kind in WITH_TEXT):
        code = "; the code of its own that its auto_map names is not run" if stated.get("auto_map") else ""
        raise ValueError(f"{path}/config.json has the unknown model type {kind!r}; {_known()}{code}")
    if kind not in CONFIG_MAPPING:
        MODELS.get(kind)


def _beside(path: Path) -> Any:
    """What a file beside config.json says about quantisation: ModelOpt wrote one before it wrote a field."""
    file = path / "hf_quant_config.json"
    stated = _json(file).get("quantization") if file.is_file() else None
    if not isinstance(stated, dict) or stated.get("quant_algo") is None:
        return None
    return {"quant_method": "modelopt", **stated}


def build_empty(config: Any, path: str | Path, shard: Shard = ONE) -> Decoder:
    """A rank's share of the model that a config describes, on the meta device: shapes without memory.

    Raises ValueError for an unsupported architecture or impossible sizes.
    """
    build = MODELS.get(config.model_type)
    try:
        with torch.device("meta"):
            model = build(config)
            return model if shard is ONE else Decoder(model.spec, shard)
    # Missing or senseless fields first show up in whatever is computed from them.
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise ValueError(f"{path}/config.json does not describe a model that can be run: {error}") from error


def build_stored(
    config: Any, path: str | Path, shard: Shard = ONE, quantization: str | None = None
) -> tuple[Decoder, Loading | None]:
    """The same, with its matrices in the formats in which the checkpoint's files store them or, with `quantization`,
    in which they are stored once loaded; and what is done to its tensors on the way, None if nothing.

    Raises ValueError also for quantised weights that are not supported, and for files that cannot be read.
    """
    storage = storage_of(config, path, quantization)
    model = build_empty(config, path, shard)
    if storage is None:
        return model, None
    has_weights = any(Path(path).glob("*.safetensors"))
    return model, store(model, storage, dict(read_headers(Path(path))) if has_weights else None)


def resolve_dtype(name: str, config: Any, device: torch.device) -> torch.dtype:
    """The serving dtype. "auto" is, on a GPU, the checkpoint's own dtype (float32 for float64, bfloat16 if it is none
    of DTYPES) and, on a CPU, bfloat16 if it is multiplied natively, else float32. Raises ValueError for an unknown
    name, and for float64 on a GPU, whose kernels compute in float32."""
    if name != "auto":
        if name not in DTYPES:
            raise ValueError(f"unknown dtype {name!r}; choose one of: auto, {', '.join(DTYPES)}")
        if DTYPES[name] == torch.float64 and device.type == "cuda":
            raise ValueError("dtype float64 is for a CPU; choose float32, or device cpu")
        return DTYPES[name]
    if device.type == "cpu":
        return torch.bfloat16 if bfloat16_is_native() else torch.float32
    stored = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None)
    if stored == torch.float64:
        return torch.float32
    return stored if isinstance(stored, torch.dtype) and stored in DTYPES.values() else torch.bfloat16


def load_model(
    path: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    serving: bool = True,
    deterministic: bool = True,
    load_format: str = "auto",
    quantization: str | None = None,
    shard: Shard = ONE,
) -> Decoder:
    """Build the model that config.json names, or a rank's share of it, and fill it from the directory's safetensors.

    load_format: "dummy" reads no weights and fills it with small random numbers, to measure speed.
    quantization: one of storage.QUANTIZATIONS, in which dense matrices are stored once loaded.
    serving: freeze it and choose row products (layers.linear.set_products) and kernels; otherwise leave it trainable.
    Raises ValueError for an unsupported architecture, quantisation or device for it, weights that do not fit the
    device's memory, an unreadable file, or missing, unexpected or misshapen tensors.
    """
    path, device = Path(path), torch.device(device)
    model, loading = build_stored(load_config(path), path, shard, quantization)
    for form in formats_of(model):
        form.check(device)
    shares = _shares(model, loading)
    if load_format == "auto":  # before minutes are spent on tensors that do not fit
        check_headers(model, loading, path)
    check_room(model, dtype, device)
    model = materialise(model, dtype, device)
    if load_format == "dummy":
        with bar("drawing weights", weight_bytes(model, dtype), "bytes", least=SHOWN_BYTES) as advance:
            fill_randomly(model, advance)
    else:
        _read_into(model, loading, path, shares)
    if serving:
        make_ready(model, deterministic=deterministic)
        model.ops = ops_for(device, dtype)
    return model


def _shares(model: Decoder, loading: Loading | None) -> dict[str, Split]:
    """Checkpoint tensors of which only the model's share is read, with that share. What is widened is cut only after
    that, and a mixture's experts in one tensor once it has been read."""
    whole = loading.read_whole if loading is not None else ()
    return {name: slot.split for name, slot in model.slots() if slot.cuts_files and name not in whole}


def _read_into(model: Decoder, loading: Loading | None, path: Path, shares: Mapping[str, Split]) -> None:
    """Fill a model with memory of its own from the files, a tensor at a time and no more of it than its share."""

    headers = {name: header.nbytes for name, header in read_headers(path)}
    ignorable = ignorable_of(model, headers)

    def wanted(name: str) -> bool:
        return not ignorable(name)

    sizes = ((name, nbytes) for name, nbytes in headers.items() if wanted(name))
    total = sum(nbytes // (shares[name].world if name in shares else 1) for name, nbytes in sizes)
    began = time.perf_counter()
    with bar("loading weights", total, "bytes", least=SHOWN_BYTES) as advance:
        # Take the device from a parameter, which knows which GPU "cuda" is; safetensors takes it for the first.
        read = _counted(read_tensors(path, model.norm.device, wanted, shares), advance)
        fill(model, read if loading is None else loading.stream(read), path, cut=shares)
    if loading is not None and not loading.quantises:
        check_scales(model, loading, path)
    seconds = max(time.perf_counter() - began, 1e-9)
    rate = size(int(total / seconds))
    logger.info("%s of weights read from %s in %.1f s, %s/s", size(total), path, seconds, rate)
    beside = Counter(part for name in headers if (part := model.part_beside(name)) is not None)
    if beside:
        left_out = ", ".join(f"{part} ({count})" for part, count in sorted(beside.items()))
        logger.info("only the text part of %s is served; tensors left out: %s", path, left_out)


def formats_of(model: nn.Module) -> list[WeightFormat]:
    """The formats of its layers, each once, in the order in which they first occur."""
    return list(dict.fromkeys(part.format for part in model.modules() if isinstance(part, Storable)))


def format_names(model: nn.Module) -> list[str]:
    """What `formats_of` are called."""
    return list(dict.fromkeys(form.name for form in formats_of(model)))


def check_headers(model: Decoder, loading: Loading | None, path: Path) -> None:
    """Raise ValueError for a checkpoint whose tensors do not fit a model on the meta device, by their names, shapes and
    dtypes."""
    headers = dict(read_headers(path))
    read = iter(headers.items())
    fill(model, read if loading is None else loading.stream(read), path, ignorable_of(model, headers))


def parameter_bytes(model: Decoder, dtype: torch.dtype) -> dict[str, int]:
    """Bytes of each parameter in a dtype; of tied ones, the first. The model may be on the meta device."""
    fixed = _fixed_dtype_ids(model)
    return {name: p.nbytes if id(p) in fixed else p.numel() * dtype.itemsize for name, p in model.named_parameters()}


def weight_bytes(model: Decoder, dtype: torch.dtype) -> int:
    """Bytes of all parameters in a dtype; tied ones count once."""
    return sum(parameter_bytes(model, dtype).values())


def check_room(model: Decoder, dtype: torch.dtype, device: torch.device) -> None:
    """Raise ValueError, stating how much is missing, if the model's weights and rotary tables do not fit the device's
    memory."""
    need, free = weight_bytes(model, dtype) + model.ropes.nbytes, free_memory(device)
    if need > free:
        narrower = "a narrower dtype, " if dtype.itemsize > 2 else ""
        raise ValueError(
            f"the weights and rotary tables take {size(need)} in {str(dtype).removeprefix('torch.')} but only "
            f"{size(free)} are free on {device}: {size(need - free)} are missing; choose {narrower}a smaller model or "
            f"another device, or free memory"
        )


def materialise(model: Decoder, dtype: torch.dtype, device: torch.device) -> Decoder:
    """Give a model built on the meta device real memory. Weights start as NaN, so that one never loaded shows up."""
    if model.spec.tied:  # otherwise both ends of the tie would get memory of their own
        del model.head.weight
    model = screaming(model, dtype, device)
    if model.spec.tied:
        model.tie()
    model.ropes.prepare(device)
    return model


def screaming(module: M, dtype: torch.dtype, device: torch.device) -> M:
    """Give a module whose weights are on the meta device real memory, filled with NaN."""
    fixed = _fixed_dtype_ids(module)
    for parameter in module.parameters():
        if id(parameter) not in fixed:
            parameter.data = parameter.data.to(dtype)
    module = module.to_empty(device=device)
    for parameter in module.parameters():
        if parameter.is_floating_point():
            nn.init.constant_(parameter, float("nan"))
    return module


def _fixed_dtype_ids(module: nn.Module) -> set[int]:
    """Ids of the parameters whose dtype is fixed."""
    return {id(fixed) for part in module.modules() if isinstance(part, ModelPart) for fixed in part.kept()}


def _counted(
    tensors: Iterator[tuple[str, torch.Tensor]], advance: Callable[[int], None]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors unchanged; reports the bytes of each once the consumer is done with it."""
    for name, tensor in tensors:
        yield name, tensor
        advance(tensor.nbytes)


@torch.no_grad()
def fill_randomly(model: nn.Module, advance: Callable[[int], None]) -> None:
    """Fill matrices with variance 1 / width, so that states neither vanish nor explode; vectors, and what has a fixed
    dtype such as scales, with 1. `advance` gets the bytes of each."""
    fixed = _fixed_dtype_ids(model)
    for parameter in model.parameters():
        if parameter.itemsize == 1:  # it cannot be drawn itself; in pieces, since what is drawn takes twice its memory
            for piece in parameter.split(DRAWN_ROWS):
                piece.copy_(torch.empty_like(piece, dtype=torch.bfloat16).normal_(0.0, parameter.shape[1] ** -0.5))
        elif parameter.ndim == 1 or id(parameter) in fixed:
            parameter.fill_(1.0)
        else:
            parameter.normal_(0.0, parameter.shape[1] ** -0.5)
        advance(parameter.nbytes)
