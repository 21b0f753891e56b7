"""Loads the large parts of an engine from a config: model, tokenizer, KV pool, attention. Every automatic choice is
logged with its reason."""

from __future__ import annotations

import gc
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stridelm.attention import BACKENDS, MADE_FOR
from stridelm.attention.base import AttentionBackend, HeadsInput, LatentInput
from stridelm.builtin import builtin_path
from stridelm.cache.backing import elastic_memory
from stridelm.cache.layout import FULL
from stridelm.cache.pool import Elastic, MemoryBudget, PagePool, free_memory
from stridelm.config import EngineConfig
from stridelm.draft import DRAFTERS
from stridelm.draft.base import TargetInfo
from stridelm.draft.settle import settle
from stridelm.draft.whose import heads_of
from stridelm.engine.kv_dtype import stored_states, target_states
from stridelm.engine.memory import captured_bytes, count_pages, largest_step, may_split, profile_memory, useful_pages
from stridelm.models.layers.decoder import Decoder, ModelInput
from stridelm.models.layers.rope import lengthen
from stridelm.models.loader import (
    build_empty,
    build_stored,
    format_names,
    load_config,
    load_model,
    resolve_dtype,
    weight_bytes,
)
from stridelm.parallel.shard import ONE, Shard
from stridelm.progress import size
from stridelm.run.malloc import give_back_memory, keep_large_blocks
from stridelm.text.tokenizer import Tokenizer, check_files, checkpoint_eos_ids
from stridelm.types import MAX_DRAFT_ROWS
from stridelm.values import token_ids

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedModel:
    """What an engine is built from. Engines in one process may share model and tokenizer, never a pool."""

    path: Path
    model: Decoder
    tokenizer: Tokenizer | None
    eos_id: int | None
    """The tokenizer's own end-of-text id."""
    eos_ids: tuple[int, ...]
    """All ids that end a text: the tokenizer's own and the checkpoint's."""
    target: TargetInfo
    pool: PagePool
    pages: dict[str, int]
    attention: AttentionBackend
    device: torch.device
    deterministic: bool
    """Whether outputs are bitwise independent of the batch."""


def load(config: EngineConfig, shard: Shard = ONE, *, elastic: bool = True) -> LoadedModel:
    """Load everything; of the model, one rank's share. elastic: whether memory may move between page groups later.
    Raises ValueError for settings that do not fit together."""
    path = Path(config.model) if config.model is not None else builtin_path()
    hf_config = load_config(path)
    if config.max_model_len is not None:
        lengthen(hf_config, config.max_model_len)
    device = resolve_device(config.device)
    # A dropped engine may still be there, since its parts refer to one another, and malloc keeps what it had.
    gc.collect()
    give_back_memory()
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)  # where kernels are launched and graphs captured
    dtype = resolve_dtype(config.dtype, hf_config, device)
    target = describe_target(config, hf_config, path, device)
    check_given(target, len(config.drafter_models))
    chosen = settle(config.speculation, target).drafter  # refuse an impossible default before the weights are read
    assert chosen is not None
    deterministic = device.type == "cpu" if config.deterministic is None else config.deterministic
    attention = pick_attention(config.attention, device, deterministic)
    if not config.skip_tokenizer_init:
        check_files(path)  # before minutes are spent on weights
    empty, _ = build_stored(hf_config, path, shard, config.quantization)
    check_drafters(config, target, empty, chosen)
    states = target_states(config, empty, path, device)
    attention.check(states, dtype)
    captures = device.type == "cuda" and attention.reads_device
    if not captures:
        config.refuse_capture_options("steps are captured only on a GPU with attention='triton'")
        if config.enforce_eager:
            raise ValueError("enforce_eager would have no effect: nothing is captured here; leave it out")
    if device.type == "cpu":
        keep_large_blocks()
    rows, decisions = largest_step(config, target.max_length)
    workspace = attention.workspace(rows, target.max_length + MAX_DRAFT_ROWS)
    profile = profile_memory(
        config, target, empty, dtype, free_memory(device), chosen, captures=captures, workspace=workspace
    )
    profile.log()
    profile.check()
    model = load_model(
        path,
        dtype=dtype,
        device=device,
        deterministic=deterministic,
        load_format=config.load_format,
        quantization=config.quantization,
        shard=shard,
    )
    model.spec.prepare(model.ops, dtype)
    activations = peak_activations(model, rows, decisions, device) + workspace
    memory_need = DRAFTERS.get(chosen).memory_need(target, empty)
    kept = captured_bytes(config, captures=captures) + memory_need.parameters * dtype.itemsize
    room = MemoryBudget(device, free_memory(device), activations + kept)
    kept_states = (*states, *stored_states(config, memory_need.layers))
    memory = elastic_memory(device) if elastic and may_split(config, kept_states, dtype) else None
    pages, most = count_pages(config, kept_states, target.max_length, dtype, room, elastic=memory is not None)
    if FULL not in pages and drafts_with_kv(target):  # page ids for KV of drafters other than the default
        pages[FULL] = useful_pages(config, {FULL: None}, target.max_length)[FULL]
        most[FULL] = pages[FULL]
    logger.info(
        "model %s on %s in %s: weights %s (%s), activations %s, KV %s, %s pages of %d tokens",
        path,
        device,
        dtype,
        size(weight_bytes(empty, dtype)),  # of the empty model, since the loaded one's may be packed by now
        ", ".join(format_names(empty)),
        size(activations) if device.type == "cuda" else "not measured",
        size(sum(pages[state.group] * config.page_size * state.bytes_per_token(dtype) for state in states)),
        pages,
        config.page_size,
    )
    # A generation_config directory also defines end-of-text ids; neutral defaults leave the checkpoint's in place.
    ends = path if config.generation_config in ("auto", "vllm") else Path(config.generation_config)
    tokenizer = None if config.skip_tokenizer_init else Tokenizer.load(path, ends)
    return LoadedModel(
        path=path,
        model=model,
        tokenizer=tokenizer,
        eos_id=None if tokenizer is None else tokenizer.eos_id,
        eos_ids=checkpoint_eos_ids(ends) if tokenizer is None else tokenizer.eos_ids,
        target=target,
        pool=PagePool(
            states,
            pages,
            config.page_size,
            dtype,
            device,
            elastic=Elastic(memory, most) if memory is not None and most != pages else None,
        ),
        pages=pages,
        attention=attention,
        device=device,
        deterministic=deterministic,
    )


def drafts_with_kv(target: TargetInfo) -> bool:
    """Whether a drafter that keeps KV of its own can serve this model."""
    kinds = (DRAFTERS.get(name) for name in DRAFTERS)
    return any(kind.keeps_kv and kind.why_not(target) is None for kind in kinds)


def check_given(target: TargetInfo, named: int) -> None:
    """Raise ValueError if drafter weights that the user named, the first `named` heads, are not for this model."""
    for name in list(target.heads)[:named]:
        reason = DRAFTERS.get(name).why_not(target)
        if reason:
            raise ValueError(f"drafter_model: {reason}")


def check_drafters(config: EngineConfig, target: TargetInfo, model: Decoder, chosen: str) -> None:
    """Raise ValueError, saying how to serve without them, if the weights of the default drafter, or those that the user
    named, do not fit by their files' headers. model: the target on the meta device; `check_given` has no objection."""
    named = list(target.heads)[: len(config.drafter_models)]
    for name in dict.fromkeys((chosen, *named)):
        kind = DRAFTERS.get(name)
        try:
            kind.check_weights(target, model)
        except ValueError as error:
            drafter = kind.weights_of(target) or name
            remedy = "leave it out of drafter_model" if drafter in named else "drafter='none' serves without it"
            raise ValueError(f"drafter {drafter!r} cannot be loaded: {error}; {remedy}") from error


def resolve_device(name: str) -> torch.device:
    """ "auto" is the first GPU if there is one. Raises ValueError for a device that does not exist."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"unknown device {name!r}; choose auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device {name!r} is not supported; choose auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"no such device {name!r}: torch sees {torch.cuda.device_count()} GPUs; use device='cpu'")
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


def describe_target(config: EngineConfig, hf_config: Any, path: Path, device: torch.device) -> TargetInfo:
    """What drafters may know about the model. Raises ValueError for a context longer than it supports or mask ids
    outside its vocabulary."""
    spec = build_empty(hf_config, path).spec
    if config.max_model_len is not None and config.max_model_len > spec.max_length:
        raise ValueError(
            f"max_model_len {config.max_model_len} exceeds the {spec.max_length} tokens that {path} supports; lower it"
        )
    masks = config.mask_token_id
    if masks is None:
        masks = getattr(hf_config, "mask_token_id", None)
    mask_ids = () if masks is None else token_ids("mask_token_id", [masks] if isinstance(masks, int) else masks)
    wrong = [i for i in mask_ids if not 0 <= i < spec.vocab_size]
    if wrong:
        raise ValueError(f"mask_token_id must be from 0 to {spec.vocab_size - 1}; got {wrong}")
    return TargetInfo(
        vocab_size=spec.vocab_size,
        max_length=config.max_model_len or spec.max_length,
        max_num_seqs=config.max_num_seqs,
        mask_token_ids=tuple(mask_ids),
        mask_depth=getattr(hf_config, "mask_k_max", None),
        device=device,
        path=path,
        config=hf_config,
        heads=heads_of(path, config.drafter_models),
        weighted=config.load_format != "dummy",
    )


def peak_activations(model: Decoder, rows: int, decisions: int, device: torch.device) -> int:
    """Peak bytes that a step of this size takes on a GPU besides weights and KV. Measured by running one.

    0 on a CPU, where nothing is measured: by default KV leaves three quarters of its memory free.
    Raises ValueError if the step does not fit.
    """
    if device.type != "cuda":
        return 0
    free = free_memory(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    try:
        run_rows(model, rows, decisions)
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"the activations of a step of {rows} rows do not fit the {size(free)} that the weights leave free on "
            f"{device}; lower max_num_batched_tokens or free memory"
        ) from error
    return torch.cuda.max_memory_allocated(device) - before


@torch.inference_mode()
def run_rows(model: Decoder, rows: int, decisions: int) -> torch.Tensor:
    """The logits [decisions, V] of a step without KV, whose tensors are as large as in a real step. The logits are
    copied to float32, as happens whenever a request's logits are edited."""

    def mix(layer: int, inputs: HeadsInput | LatentInput) -> torch.Tensor:
        return inputs.unmixed()

    ids_N = torch.zeros(rows, dtype=torch.int64, device=model.norm.device)
    hidden_NH = model(ModelInput(ids_N, ids_N, mix))
    return model.logits(hidden_NH.index_select(0, ids_N[:decisions])).to(torch.float32, copy=True)
