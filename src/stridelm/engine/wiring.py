"""From a config to the heavy parts of an engine: model, tokenizer, KV pool, attention. Every choice made for the user
is logged with its reason."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stridelm.attention import BACKENDS, MADE_FOR
from stridelm.attention.base import AttentionBackend
from stridelm.builtin import builtin_path
from stridelm.cache.pool import PagePool, bytes_per_token, free_memory, page_count
from stridelm.config import EngineConfig
from stridelm.draft.base import Target
from stridelm.draft.settle import settle
from stridelm.models.layers.decoder import Decoder
from stridelm.models.loader import build_empty, load_config, load_model, resolve_dtype
from stridelm.params import token_ids
from stridelm.run.malloc import keep_large_blocks
from stridelm.text.tokenizer import Tokenizer, checkpoint_eos_ids

logger = logging.getLogger(__name__)

CPU_MEMORY_FRACTION, GPU_MEMORY_FRACTION = 0.25, 0.9


@dataclass(frozen=True)
class Parts:
    """What an engine is built from. Engines in one process may share model and tokenizer, never a pool."""

    path: Path
    model: Decoder
    tokenizer: Tokenizer | None
    eos_ids: tuple[int, ...]
    target: Target
    pool: PagePool
    pages: dict[str, int]
    attention: AttentionBackend
    device: torch.device


def load_parts(config: EngineConfig) -> Parts:
    """Load everything. Raises ValueError for whatever does not fit together."""
    path = Path(config.model) if config.model is not None else builtin_path()
    hf_config = load_config(path)
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, hf_config, device)
    target = describe_target(config, hf_config, path, device)
    settle(config.speculation, target)  # refuse an impossible default before the weights are read
    if config.drafter_model is not None:
        raise ValueError("drafter_model has no effect: no drafter here runs a model of its own; leave it out")
    deterministic = device.type == "cpu" if config.deterministic is None else config.deterministic
    attention = pick_attention(config.attention, device, deterministic)
    if device.type == "cpu":
        keep_large_blocks()
    model = load_model(path, dtype=dtype, device=device, deterministic=deterministic, load_format=config.load_format)
    model.ops.prepare(dtype, normed_heads=model.spec.qk_norm)
    pages = count_pages(config, model, target.max_length, dtype, device)
    logger.info("model %s on %s in %s; %s pages of %d tokens", path, device, dtype, pages, config.page_size)
    return Parts(
        path=path,
        model=model,
        tokenizer=None if config.skip_tokenizer_init else Tokenizer.load(path),
        eos_ids=checkpoint_eos_ids(path),
        target=target,
        pool=PagePool(model.kv_layout, pages, config.page_size, dtype, device),
        pages=pages,
        attention=attention,
        device=device,
    )


def resolve_device(name: str) -> torch.device:
    """ "auto" is the first GPU if there is one. Raises ValueError for a device that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"unknown device {name!r}; choose auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device {name!r} is not supported; choose auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device {name!r} is not there: torch sees {torch.cuda.device_count()} GPUs; use device='cpu'")
    return device


def pick_attention(name: str, device: torch.device, deterministic: bool) -> AttentionBackend:
    """The attention backend called `name`; "auto" is the one made for the device, else the reference.

    Raises ValueError for one that is unknown or made for another device.
    """
    if name == "auto":
        made = MADE_FOR.get(device.type, "reference")
        name = made if made in BACKENDS else "reference"
        logger.info("attention auto: %s, for %s", name, device)
    backend = BACKENDS.get(name)
    if backend.device not in (None, device.type):
        raise ValueError(f"attention backend {name!r} runs on {backend.device}, not on {device}; use attention='auto'")
    return backend(deterministic)


def describe_target(config: EngineConfig, hf_config: Any, path: Path, device: torch.device) -> Target:
    """What drafters may know of the model. Raises ValueError for a context that it does not have or mask ids outside
    its vocabulary."""
    spec = build_empty(hf_config, path).spec
    if config.max_model_len is not None and config.max_model_len > spec.max_length:
        raise ValueError(
            f"max_model_len {config.max_model_len} is over the {spec.max_length} tokens that {path} supports; lower it"
        )
    masks = config.mask_token_id
    if masks is None:
        masks = getattr(hf_config, "mask_token_id", None)
    mask_ids = () if masks is None else token_ids("mask_token_id", [masks] if isinstance(masks, int) else masks)
    wrong = [i for i in mask_ids if not 0 <= i < spec.vocab_size]
    if wrong:
        raise ValueError(f"mask_token_id must be from 0 to {spec.vocab_size - 1}; got {wrong}")
    return Target(
        vocab_size=spec.vocab_size,
        max_length=config.max_model_len or spec.max_length,
        max_num_seqs=config.max_num_seqs,
        mask_token_ids=tuple(mask_ids),
        mask_depth=getattr(hf_config, "mask_k_max", None),
        device=device,
    )


def count_pages(
    config: EngineConfig, model: Decoder, max_length: int, dtype: torch.dtype, device: torch.device
) -> dict[str, int]:
    """Page group -> pages: as configured, else as many as are of use and fit the memory fraction.

    Raises ValueError if memory has no room for them.
    """
    groups = dict.fromkeys(layer.group for layer in model.kv_layout)
    if config.num_pages is not None:
        need = config.num_pages * config.page_size * bytes_per_token(model.kv_layout, dtype)
        free = free_memory(device)
        if need > free:
            raise ValueError(
                f"num_pages {config.num_pages} of {config.page_size} tokens take {need / 2**20:.0f} MiB and "
                f"{free / 2**20:.0f} MiB are free on {device}; lower num_pages"
            )
        return dict.fromkeys(groups, config.num_pages)
    fraction = config.kv_memory_fraction
    if fraction is None:
        fraction = GPU_MEMORY_FRACTION if device.type == "cuda" else CPU_MEMORY_FRACTION
    useful = config.max_num_seqs * -(-(max_length + 64) // config.page_size)
    count = page_count(model.kv_layout, config.page_size, dtype, device, fraction, useful)
    return dict.fromkeys(groups, count)
