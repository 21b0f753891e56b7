"""How an engine's memory is divided: what is taken before KV, told from shapes before any weight is read, and how many
pages fit into the rest."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from stridelm.cache.layout import LayerStates, bytes_per_token, windows_of
from stridelm.cache.pool import KvShare, MemoryBudget, divided
from stridelm.cache.split import most_pages
from stridelm.config import DEFAULT_CAPTURE_MEMORY, EngineConfig
from stridelm.draft import DRAFTERS
from stridelm.draft.base import TargetInfo
from stridelm.engine.kv_dtype import stored_states
from stridelm.models.layers.decoder import Decoder
from stridelm.models.loader import parameter_bytes
from stridelm.progress import size
from stridelm.types import MAX_DRAFT_ROWS

logger = logging.getLogger(__name__)

CPU_MEMORY_FRACTION, GPU_MEMORY_FRACTION = 0.25, 0.9
GPU_MARGIN = 3 << 30
"""Bytes left free on a large GPU beside all that is planned: for gaps between tensors, for kernels and libraries."""
PARTS = {
    ".mlp.experts.": "experts",
    ".mixer.": "attention",
    ".mlp.": "MLPs",
    "embed.": "embeddings",
    "head.": "embeddings",
}
"""What a parameter belongs to, by a part of its name."""


@dataclass(frozen=True)
class MemoryProfile:
    """What an engine will take of a device's memory, in bytes."""

    device: torch.device
    free: int
    """Before anything is loaded."""
    parts: Mapping[str, int]
    """What is taken before KV, by part."""
    share: KvShare | None
    """Of what is left, that KV may take; None if the number of pages is given."""
    page_bytes: int
    """Of a page of every group."""
    kv: int
    """What KV will take."""
    contexts: int
    """How many requests at once may have a context of full length, each followed by a draft."""
    max_length: int
    remedies: tuple[str, ...]
    """What would leave more for KV."""

    @property
    def taken(self) -> int:
        return sum(self.parts.values())

    @property
    def left(self) -> int:
        """For KV, and what is not to be used."""
        return max(0, self.free - self.taken)

    def rows(self) -> dict[str, str]:
        """The table, as it is shown."""
        contexts = f"{self.contexts} context{'' if self.contexts == 1 else 's'} of {self.max_length:,} tokens"
        return {
            f"free on {self.device}": size(self.free),
            **{name: size(count) for name, count in self.parts.items()},
            "left": size(self.left),
            "KV": f"{size(self.kv)}, {contexts}",
        }

    def log(self) -> None:
        logger.info("memory: %s", "; ".join(f"{name} {text}" for name, text in self.rows().items()))

    def check(self) -> None:
        """Raise ValueError, stating how much is missing and what would help, if nothing is left for KV."""
        least = max(self.kv, self.page_bytes)
        need = self.taken + (least if self.share is None else self.share.needed(least))
        if need <= self.free:
            return
        parts = ", ".join(f"{name} {size(count)}" for name, count in self.parts.items())
        raise ValueError(
            f"{self.device} has {size(self.free)} free, which leaves too little for KV beside {parts}: "
            f"{size(need - self.free)} are missing; {', '.join(self.remedies)} or free memory"
        )


def profile_memory(
    config: EngineConfig,
    target: TargetInfo,
    model: Decoder,
    dtype: torch.dtype,
    free: int,
    drafter: str,
    *,
    captures: bool,
    workspace: int = 0,
) -> MemoryProfile:
    """What an engine of this config will take on the target's device, of which `free` bytes are free. Nothing is read,
    allocated or raised. model: on the meta device; captures: whether steps can be captured there; workspace: bytes that
    attention may allocate beside activations.

    Activations are told by the logits of the largest step alone; on a GPU all of them are measured once it is loaded.
    """
    device, need = target.device, DRAFTERS.get(drafter).memory_need(target, model)
    _, decisions = largest_step(config, target.max_length)
    logits = decisions * model.spec.vocab_size * (dtype.itemsize + torch.float32.itemsize)
    parts = {
        **_weights(model, dtype),
        "rotary tables": model.ropes.nbytes,
        "drafting heads": need.parameters * dtype.itemsize,
        "captured steps": captured_bytes(config, captures=captures),
        "logits": logits if device.type == "cuda" else 0,
        "expanded latents": workspace,
    }
    parts = {name: count for name, count in parts.items() if count}
    states = stored_states(config, (*model.layer_states, *need.layers))
    page_bytes, share = page_bytes_of(config, states, dtype), kv_share(config, device)
    room = share.of(max(0, free - sum(parts.values())))
    useful = useful_pages(config, windows_of(states), target.max_length)
    pages = _pages(config, useful, page_bytes, room)
    return MemoryProfile(
        device=device,
        free=free,
        parts=parts,
        share=None if config.num_pages is not None else share,
        page_bytes=sum(page_bytes.values()),
        kv=sum(pages[group] * page_bytes[group] for group in pages),
        contexts=_contexts(config, states, pages, target.max_length),
        max_length=target.max_length,
        remedies=_remedies(config, parts, dtype, share.fraction),
    )


def _pages(
    config: EngineConfig, useful: Mapping[str, int], page_bytes: Mapping[str, int], room: int
) -> Mapping[str, int]:
    """Page group -> pages, 0 if there is no room for one of each."""
    if config.num_pages is not None:
        return dict.fromkeys(useful, config.num_pages)
    if room < sum(page_bytes.values()):
        return dict.fromkeys(useful, 0)
    return divided(room, page_bytes, useful)


def _contexts(config: EngineConfig, states: LayerStates, pages: Mapping[str, int], max_length: int) -> int:
    """How many requests of full length fit these pages at once."""

    def lacks_room(requests: int) -> bool:
        needed = useful_pages(replace(config, max_num_seqs=requests), windows_of(states), max_length)
        return any(needed[group] > pages[group] for group in pages)

    return bisect_left(range(1, config.max_num_seqs + 1), True, key=lacks_room)


def _weights(model: Decoder, dtype: torch.dtype) -> dict[str, int]:
    """Bytes of the parameters by what they belong to, the largest first."""
    found: dict[str, int] = {}
    for name, count in parameter_bytes(model, dtype).items():
        part = next((part for piece, part in PARTS.items() if piece in name), "norms")
        part = "scales" if name.endswith("_scale") else part
        found[part] = found.get(part, 0) + count
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _remedies(config: EngineConfig, parts: Mapping[str, int], dtype: torch.dtype, fraction: float) -> tuple[str, ...]:
    helps = {
        "choose a narrower dtype": dtype.itemsize > 2,
        "set quantization='fp8'": config.quantization is None and "scales" not in parts,
        "set drafter='none'": "drafting heads" in parts,
        "lower capture_memory": "captured steps" in parts,
        "lower max_num_batched_tokens or max_num_seqs": "logits" in parts,
        "set kv_cache_dtype='fp8'": config.num_pages is not None and not config.kv_in_eight_bits,
        "lower num_pages": config.num_pages is not None,
        "raise kv_memory_fraction": config.num_pages is None and fraction < GPU_MEMORY_FRACTION,
    }
    return tuple(remedy for remedy, helps_here in helps.items() if helps_here) or ("choose a smaller model",)


def captured_bytes(config: EngineConfig, *, captures: bool) -> int:
    """Bytes set aside for captured steps. captures: whether any can be captured on the device."""
    graphs = DEFAULT_CAPTURE_MEMORY if config.capture_memory is None else config.capture_memory
    return int(graphs * 2**30) if captures and config.may_capture else 0


def kv_share(config: EngineConfig, device: torch.device) -> KvShare:
    """What of the memory left KV may take."""
    if config.kv_memory_fraction is not None:
        return KvShare(config.kv_memory_fraction)
    return KvShare(GPU_MEMORY_FRACTION, GPU_MARGIN) if device.type == "cuda" else KvShare(CPU_MEMORY_FRACTION)


def page_bytes_of(config: EngineConfig, states: LayerStates, dtype: torch.dtype) -> dict[str, int]:
    """Page group -> bytes of one of its pages."""
    return {
        group: config.page_size * bytes_per_token([state for state in states if state.group == group], dtype)
        for group in windows_of(states)
    }


def largest_step(config: EngineConfig, max_length: int) -> tuple[int, int]:
    """(maximum rows of a step, maximum decision rows of a step)."""
    rows = min(config.max_num_batched_tokens, config.max_num_seqs * (max_length + MAX_DRAFT_ROWS))
    return rows, min(rows, config.max_num_seqs * (1 + MAX_DRAFT_ROWS))


def may_split(config: EngineConfig, states: LayerStates, dtype: torch.dtype) -> bool:
    """Whether there are page groups between which memory could move: their numbers of pages are not given, and more
    than one has entries."""
    return config.num_pages is None and sum(map(bool, page_bytes_of(config, states, dtype).values())) > 1


def count_pages(
    config: EngineConfig,
    states: LayerStates,
    max_length: int,
    dtype: torch.dtype,
    room: MemoryBudget,
    *,
    elastic: bool = False,
) -> tuple[dict[str, int], dict[str, int]]:
    """Page group -> pages at the start, and those that it may ever have, which are more only if memory is elastic.

    At the start: as configured, else as many as are useful and fit the memory fraction, divided in proportion to the
    useful numbers. Warns if a whole context can never be held. Raises ValueError if there is no room for them.
    """
    windows, page_bytes = windows_of(states), page_bytes_of(config, states, dtype)
    if config.num_pages is not None:
        counts = dict.fromkeys(windows, config.num_pages)
        room.check(config.num_pages, sum(page_bytes.values()))
    else:
        useful = useful_pages(config, windows, max_length)
        counts = room.page_counts(page_bytes, kv_share(config, room.device), useful)
    most = dict(counts)
    if elastic:
        most = _most_pages(counts, windows, page_bytes, useful_pages(config, windows, max_length), config.page_size)
    whole = min((most[group] for group, window in windows.items() if window is None), default=None)
    if whole is not None and whole * config.page_size < max_length:
        logger.warning(
            "KV holds %d tokens, but a context may have %d; longer requests are refused: %s or lower max_model_len",
            whole * config.page_size,
            max_length,
            "free memory" if config.num_pages is None else "raise num_pages",
        )
    return counts, most


def _most_pages(
    counts: Mapping[str, int],
    windows: Mapping[str, int | None],
    page_bytes: Mapping[str, int],
    useful: Mapping[str, int],
    page_size: int,
) -> dict[str, int]:
    """Page group -> pages, if the others left it all but what one request needs to run a row."""
    least = {group: 1 if window is None else window // page_size + 2 for group, window in windows.items()}
    room = sum(counts[group] * page_bytes[group] for group in counts)
    found = most_pages(least, useful, room, lambda group, pages: pages * page_bytes[group])
    # A group without entries of its own would have no limit.
    return {group: max(count, found[group]) if page_bytes[group] else count for group, count in counts.items()}


def useful_pages(config: EngineConfig, windows: Mapping[str, int | None], max_length: int) -> dict[str, int]:
    """Page group -> maximum number of pages that can be in use: contexts of full length, or all windows plus the rows
    of a step in flight and of the one after it."""
    longest = max_length + MAX_DRAFT_ROWS

    def pages(tokens: int) -> int:
        return -(-tokens // config.page_size)

    useful = {}
    for group, window in windows.items():
        whole = config.max_num_seqs * pages(longest)
        if window is not None:
            each = pages(window) + pages(MAX_DRAFT_ROWS) + 1
            whole = min(whole, config.max_num_seqs * each + 2 * pages(config.max_num_batched_tokens))
        useful[group] = whole
    return useful
