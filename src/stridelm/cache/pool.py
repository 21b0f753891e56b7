"""The tensors that hold the pages, and how many pages fit into memory."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch

from stridelm.batch import Draft, ForwardBatch, Geometry, Verdict
from stridelm.cache.backing import Backing, ElasticMemory, rounded
from stridelm.cache.layout import HeadsKV, LayerStates, Shared
from stridelm.kernels import step_ops_for
from stridelm.kernels.host.columns import bits
from stridelm.kernels.step_ops import StepOps
from stridelm.progress import size

logger = logging.getLogger(__name__)


MOVED_AT_ONCE = 64
"""Pages that are copied by one call, which bounds the memory that the copy takes."""


@dataclass(frozen=True, eq=False)
class Elastic:
    """Memory that can serve one group or another."""

    memory: ElasticMemory
    most: Mapping[str, int]
    """Page group -> maximum pages that it may ever have."""


@dataclass(frozen=True, eq=False)
class StoredLayers:
    """Where layers keep heads' keys and values, for compiled code. Valid as long as their pool."""

    states: tuple[HeadsKV, ...]
    """Their states, each once."""
    table: np.ndarray
    """[L, 6] int64: see kernels/host/columns.py. KIND is the index of the layer's state."""


class PagePool:
    """Every layer's entries, in tensors of [P slots, ...] as described by its LayerState. Slot = page * page_size +
    offset; padding writes to the null page 0. Zeroed, so that masked reads are finite.

    With elastic memory, a tensor has addresses for the most pages that its group may ever have, and memory for those
    that it has now (`pages`).
    """

    def __init__(
        self,
        states: LayerStates,
        pages: dict[str, int],
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        ops: StepOps | None = None,
        elastic: Elastic | None = None,
    ) -> None:
        """pages: page group -> number of pages. dtype: the model's. elastic: None if that number stays."""
        self.states = states
        self.read = tuple(state.read for state in states)
        """For each layer, the kind of the entries that its rows read."""
        self.pages = pages
        self.page_size = page_size
        self.dtype = dtype
        self.elastic = elastic
        self._device = device
        self._beside: list[PagePool] = []
        """Other layers' pools with the same pages."""
        self._backings: dict[str, list[tuple[int, Backing]]] = {group: [] for group in pages}
        """Page group -> bytes of a page of each of its tensors, and the memory under the tensor."""
        self.entries: list[dict[str, torch.Tensor]] = []
        """For each layer, the tensors that its rows read, by name."""
        for state in states:
            if isinstance(state, Shared):
                assert states[state.layer].group == state.group and states[state.layer].tensors()
                self.entries.append(self.entries[state.layer])
                continue
            stored = state.stored or dtype
            self.entries.append(
                {name: self._zeros(state.group, shape, stored) for name, shape in state.tensors().items()}
            )
        ops = ops or step_ops_for(device)
        self._moves = {group: ops.mover(tensors) for group in pages if (tensors := self._tensors(group))}
        """Page group -> function that moves its layers' entries."""
        self._stored: dict[tuple[tuple[int, ...], LayerStates | None], StoredLayers] = {}
        self.budget = self.bytes_at(pages)
        """Bytes that all groups may take together, pools beside this one included."""

    def _zeros(self, group: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of a group's slots."""
        if self.elastic is None:
            slots = (self.pages[group] + 1) * self.page_size
            return torch.zeros(slots, *shape, dtype=dtype, device=self._device)
        page = self.page_size * math.prod(shape) * dtype.itemsize
        most = self.elastic.most[group] + 1
        backing = self.elastic.memory.reserve(most * page, (self.pages[group] + 1) * page)
        self._backings[group].append((page, backing))
        return backing.bytes.view(dtype).view(most * self.page_size, *shape)

    def beside(self, states: LayerStates, ops: StepOps) -> PagePool:
        """A pool of other layers that hold entries in the same pages, and that gets and loses pages with this one."""
        other = PagePool(states, self.pages, self.page_size, self.dtype, self._device, ops, self.elastic)
        self._beside.append(other)
        self.budget += other.budget
        return other

    @property
    def most(self) -> Mapping[str, int] | None:
        """Page group -> maximum pages that it may ever have; None if the numbers of pages stay."""
        return None if self.elastic is None else self.elastic.most

    def bytes_at(self, pages: Mapping[str, int]) -> int:
        """Memory that these groups take with so many pages, in whole chunks, pools beside this one included. 0 without
        elastic memory."""
        if self.elastic is None:
            return 0
        chunk = self.elastic.memory.chunk
        own = sum(rounded((n + 1) * page, chunk) for group, n in pages.items() for page, _ in self._backings[group])
        return own + sum(pool.bytes_at(pages) for pool in self._beside)

    def move(self, group: str, renamed: Mapping[int, int]) -> None:
        """Copy the contents of pages, by their old number, to the new one. No new number is an old one, but a page may
        move onto itself."""
        moves = list(renamed.items())
        offset = torch.arange(self.page_size, device=self._device)
        for start in range(0, len(moves), MOVED_AT_ONCE):
            pages_2P1 = torch.tensor(moves[start : start + MOVED_AT_ONCE], device=self._device).T[:, :, None]
            source_N, target_N = (pages_2P1 * self.page_size + offset).flatten(1).unbind(0)
            for pool in (self, *self._beside):
                pool.compact(group, source_N, target_N)

    def resize(self, pages: Mapping[str, int]) -> None:
        """Let these groups have so many pages: first those that lose some. Entries of pages that are added are zero or
        finite; what is in pages that leave is lost. Waits for the device."""
        assert self.elastic is not None
        self.elastic.memory.wait()
        losing = [group for group, count in pages.items() if count < self.pages[group]]
        for group in (*losing, *(group for group in pages if group not in losing)):
            for pool in (self, *self._beside):
                for page, backing in pool._backings[group]:
                    backing.resize((pages[group] + 1) * page)
            self.pages[group] = pages[group]

    def keep(self, batch: ForwardBatch, draft: Draft, verdict: Verdict) -> None:
        """Move the entries of accepted paths to where a chain's would be. A no-op if all drafts are chains.

        Path rows at or beyond `kept` copy the null slot onto itself. A span's copies are in order of depth, and each
        reads after the slots that earlier ones write, since a path's row numbers increase.
        """
        if draft.is_chain:
            return
        depth = torch.arange(verdict.path.shape[1], device=verdict.path.device)
        keep = depth < verdict.kept[:, None]
        base, tables = draft_places(batch.geometry)
        for group, pages in tables.items():
            source = _slots(pages, base[:, None] + verdict.path, self.page_size)
            target = _slots(pages, base[:, None] + depth, self.page_size)
            self.compact(group, torch.where(keep, source, 0).flatten(), torch.where(keep, target, 0).flatten())

    def stored(self, layers: tuple[int, ...], read: LayerStates | None = None) -> StoredLayers:
        """Layers with keys and values, by number. read: what each reader makes of its layer's entries, if not what the
        layer itself does."""
        found = self._stored.get((layers, read))
        if found is None:
            read_as = [self.read[layer] for layer in layers] if read is None else read
            states = [state for state in read_as if isinstance(state, HeadsKV)]
            once = tuple(dict.fromkeys(states))
            rows = []
            for layer, state in zip(layers, states, strict=True):
                keys, values = self.entries[layer]["keys"], self.entries[layer]["values"]
                window, shared = state.window or sys.maxsize, state.heads // state.kv_heads
                rows.append((keys.data_ptr(), values.data_ptr(), once.index(state), window, shared, bits(state.scale)))
            found = self._stored[layers, read] = StoredLayers(once, np.array(rows))
        return found

    def compact(self, group: str, source_N: torch.Tensor, target_N: torch.Tensor) -> None:
        """Copy slots source[i] to target[i], int64, in all layers of a group: compacts an accepted path.

        `StepOps.mover` documents the order that the entries must have.
        """
        if group in self._moves:
            self._moves[group](source_N, target_N)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors of all layers, each once."""
        return [
            entries[name] for state, entries in zip(self.states, self.entries, strict=True) for name in state.tensors()
        ]

    def _tensors(self, group: str) -> list[torch.Tensor]:
        """The tensors of a group's layers, each once."""
        layers = zip(self.states, self.entries, strict=True)
        return [entries[name] for state, entries in layers if state.group == group for name in state.tensors()]


def draft_places(geometry: Geometry) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """([R] storage index of each span's first draft row, page group -> [R, P] page ids), int64."""
    base = (geometry.starts + geometry.reals).to(torch.int64)
    return base, {group: pages.to(torch.int64) for group, pages in geometry.tables.items()}


def _slots(pages_RP: torch.Tensor, storage_RD: torch.Tensor, page_size: int) -> torch.Tensor:
    """[R, D] pool slots of storage indices; indices beyond the table are clamped, for the caller to mask."""
    page = (storage_RD // page_size).clamp(max=pages_RP.shape[1] - 1)
    return pages_RP.gather(1, page) * page_size + storage_RD % page_size


@dataclass(frozen=True)
class KvShare:
    """What of the memory left KV may take."""

    fraction: float
    margin: int | None = None
    """Bytes that are enough to leave, where the fraction would leave more."""

    def of(self, left: int) -> int:
        room = int(left * self.fraction)
        return room if self.margin is None else max(room, left - self.margin)

    def needed(self, kv: int) -> int:
        """How much must be left for so much KV."""
        need = math.ceil(kv / self.fraction)
        return need if self.margin is None else min(need, kv + self.margin)


@dataclass(frozen=True)
class MemoryBudget:
    """The memory available to a pool, in bytes."""

    device: torch.device
    free: int
    """Free memory once the weights are loaded and nothing else is allocated."""
    activations: int = 0
    """The part needed by the largest step while it runs, by captured steps and by a drafter's weights."""

    @property
    def left(self) -> int:
        """Memory that pages may use."""
        return max(0, self.free - self.activations)

    def page_counts(self, page_bytes: Mapping[str, int], share: KvShare, useful: Mapping[str, int]) -> dict[str, int]:
        """Page group -> number of pages that fit into this share of the memory left, at most `useful`. If not all of
        those fit, each group is scaled down proportionally.

        Raises ValueError, stating how much is missing, if there is not even room for one page of each.
        """
        room, one = share.of(self.left), sum(page_bytes.values())
        if room < one:
            raise ValueError(
                f"no room for KV: {share.fraction:g} of {self} is {size(room)}, {size(one - room)} less than a page "
                f"takes; raise kv_memory_fraction{self._remedy} or free memory"
            )
        return divided(room, page_bytes, useful)

    def check(self, pages: int, page_bytes: int) -> None:
        """Raise ValueError, stating how much is missing, if the memory left has no room for this many pages."""
        need = pages * page_bytes
        if need > self.left:
            raise ValueError(
                f"num_pages {pages} of {size(page_bytes)} each take {size(need)}, but there are {self}: "
                f"{size(need - self.left)} are missing; lower num_pages{self._remedy} or free memory"
            )

    def __str__(self) -> str:
        beside = f", beside {size(self.activations)} for activations and captured steps," if self.activations else ""
        return f"{size(self.left)} free on {self.device}{beside}"

    @property
    def _remedy(self) -> str:
        return ", lower max_num_batched_tokens" if self.activations else ""


def divided(room: int, page_bytes: Mapping[str, int], useful: Mapping[str, int]) -> dict[str, int]:
    """Page group -> number of pages: the useful ones or, if those do not fit into `room` bytes, as large a part of each
    as does, at least one."""
    wanted = {group: useful[group] * page_bytes[group] for group in page_bytes}
    part = Fraction(min(room, sum(wanted.values())), sum(wanted.values()))
    return {group: max(1, int(wanted[group] * part) // page_bytes[group]) for group in page_bytes}


def free_memory(device: torch.device) -> int:
    """Bytes free on the device; on a GPU, after torch has returned its cached memory."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    with open("/proc/meminfo") as file:
        fields = dict(line.split(":", 1) for line in file)
    return int(fields["MemAvailable"].split()[0]) * 1024
