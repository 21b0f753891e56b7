"""The safetensors files of a checkpoint directory: tensors one at a time, mapped into memory, never a whole file.

A process's own memory does not grow with them, since a mapped page can be read again. While a mapping lasts, though,
the pages that were read through it count as resident, so none lasts for long.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from stridelm.models.layers.slots import Split
from stridelm.text.pointers import refuse_pointer

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float64": torch.float64}
STORED = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""safetensors' names of dtypes. Of these, only DTYPES can hold dense weights, F8_E4M3 those with scales, and F8_E8M0
such scales."""
MISTRAL_S = "consolidated"
"""How names of files with Mistral's own names of tensors begin."""
MAPPED_BYTES = 2**30
"""Bytes of tensors after which a file is mapped anew."""


def read_tensors(
    path: Path,
    device: torch.device,
    wanted: Callable[[str], bool] = lambda name: True,
    shares: Mapping[str, Split] = MappingProxyType({}),
) -> Iterator[tuple[str, torch.Tensor]]:
    """The wanted tensors of the directory's safetensors files, one at a time, on the device: a GPU receives them
    through pinned memory and converts them itself. Of those in `shares`, only that share is read.

    Raises ValueError if there are no files, if a shard named in the index is missing, or if a file is corrupt.
    """
    for file, stores in _weight_files(path):
        done, complete = 0, False
        while not complete:
            with opened(file, device) as handle:
                mapped, complete = 0, True
                for name in [each for each in filter(stores, handle.keys()) if wanted(each)][done:]:
                    if mapped >= MAPPED_BYTES:
                        complete = False
                        break
                    tensor = _read(handle, name, shares.get(name))
                    mapped, done = mapped + tensor.nbytes, done + 1
                    yield name, tensor


def read_headers(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """The same as tensors without data: shapes and dtypes from the files' headers. Raises the same errors, and for a
    tensor that is in two files or has a dtype that is not in STORED."""
    found: dict[str, Path] = {}
    for file, stores in _weight_files(path):
        with opened(file) as handle:
            for name in filter(stores, handle.keys()):
                if name in found:
                    raise ValueError(f"{found[name]} and {file} both store {name}; keep the model's own files alone")
                found[name] = file
                header = handle.get_slice(name)
                stored = header.get_dtype()
                if stored not in STORED:
                    supported = ", ".join((*DTYPES, "float8_e4m3fn with scales"))
                    raise ValueError(
                        f"{file} stores {name} as {stored}; supported: {supported}; give a checkpoint in one of these"
                    )
                yield name, torch.empty(header.get_shape(), dtype=STORED[stored], device="meta")


def read_rows(path: Path, name: str, begin: int, end: int) -> torch.Tensor:
    """Rows of one tensor, on the host, from a mapping that ends with the call. Raises the same errors, and KeyError
    for a tensor that is not there."""
    for file in (file for file, stores in _weight_files(path) if stores(name)):
        with opened(file) as handle:
            if name in set(handle.keys()):
                rows: torch.Tensor = handle.get_slice(name)[begin:end].clone()
                return rows
    raise KeyError(name)


def _read(handle: Any, name: str, share: Split | None) -> torch.Tensor:
    if share is None:
        tensor: torch.Tensor = handle.get_tensor(name)
        return tensor
    stored = handle.get_slice(name)
    begin, end = share.bounds(stored.get_shape()[share.dim])
    part: torch.Tensor = stored[(slice(None),) * share.dim + (slice(begin, end),)]
    return part


@contextmanager
def opened(file: Path, device: torch.device | str = "cpu") -> Iterator[Any]:
    """safetensors' handle of a file. Raises ValueError for one that is corrupt, also while it is read, and for a Git
    LFS pointer in its place."""
    refuse_pointer(file)
    try:
        with safe_open(file, framework="pt", device=str(device)) as handle:
            yield handle
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is corrupt or truncated ({error}); copy it again") from error


def _weight_files(path: Path) -> list[tuple[Path, Callable[[str], bool]]]:
    """The files of weights, and which of their tensors to read there: where there is an index, none that it says is in
    another. Mistral publishes its models twice in one directory; the copy in its own format is left out."""
    index = path / "model.safetensors.index.json"
    if index.is_file():
        refuse_pointer(index)
        try:
            file_of = dict(json.loads(index.read_text())["weight_map"])
            names = sorted(set(file_of.values()))
            absent = [name for name in names if not (path / name).is_file()]
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise ValueError(f"{index} cannot be read ({error}); copy it again") from error
        if absent:
            raise ValueError(f"{path} lacks {', '.join(absent)}, which its index names; copy the missing shards")
        return [(path / file, partial(_is_in, file, file_of)) for file in names]
    stored = sorted(path.glob("*.safetensors"))
    files = [file for file in stored if not file.name.startswith(MISTRAL_S)]
    if stored and not files:
        raise ValueError(
            f"{stored[0]} is in Mistral's own format; download the model's other files of weights "
            f"(model*.safetensors), or convert it with transformers' convert_mistral_weights_to_hf"
        )
    if not files:
        raise ValueError(f"{path} has no *.safetensors; convert the checkpoint with transformers' save_pretrained")
    return [(file, lambda name: True) for file in files]


def _is_in(file: str, file_of: Mapping[str, str], name: str) -> bool:
    return file_of.get(name, file) == file
