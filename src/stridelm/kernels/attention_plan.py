"""What the host decides about a launch of attention (attention.py), from shapes alone: which queries a tile stacks, the
sizes of its blocks, and how many programs share its keys.

Legend: T tiles, H query heads, G groups of heads that share keys, D head size, M query vectors of a tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, lru_cache

import torch

from stridelm.kernels.processors import multiprocessors, shared_memory
from stridelm.types import MAX_DRAFT_ROWS

SPLIT_KEYS = 256
"""Keys of a split in deterministic mode. Shorter splits keep more processors busy at batch 1, but cost more merging."""
MIN_KEYS = 32
"""In other modes, about the fewest keys worth a program of their own while processors are idle."""
TALL, MIN_KEYS_TALL = 64, 256
"""Query vectors of a tile from which on a split takes long to merge, and the same for such a tile."""
MIN_KEYS_BUSY = 512
"""The same if one program per tile already keeps half of the processors busy: additional programs share their memory
bandwidth and must gain more than merging costs."""
MERGING, MERGING_WIDE = 20, 2
"""How many keys a program reads in the time in which one split more is merged; of wide heads, whose keys take longer.
Measured over 512, 2,048 and 8,192 keys: of heads of 128 and 64 on H200s, of latents on an H100."""
SHARING = 2.5
"""Maximum programs per multiprocessor among which the keys of tiles are divided, on average. All of them must run at
once: one that waits for another to end costs more than sharing gains. (Three were as fast over one row of a request,
and slower over four.)"""
FILLED = 0.75
"""The share of the programs that run at once which long blocks of keys must keep busy: fewer programs of them then do
more than more of short blocks."""
SHARED_MEMORY = 228 << 10
"""Bytes of shared memory that a multiprocessor divides among its programs, and RESERVED bytes of each program (compute
capability 9.0)."""
RESERVED = 1 << 10
WORKSPACE_LIMIT = 1 << 28
"""Maximum floats of workspace (1 GiB). A launch that would need more uses fewer programs, down to one per tile."""
SHARED_WORKSPACE = 1 << 25
"""The same without fixed splits (128 MiB), where only tiles that fill a captured size could need as much."""
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_HEADS = 128
"""Maximum query heads per KV head."""
VERY_WIDE = 256
"""Heads wider than this have lower tiles and shorter blocks, since a tile's sums must fit into registers and its
queries, keys and values into shared memory; and, as latents, shorter splits."""
MAX_DIM = 512
"""Widest heads."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Block sizes of a launch, and how it is pipelined."""

    queries: int
    """Query vectors of a tile's stack, padded: M."""
    keys: int
    """Keys of a block."""
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What the host decides about a launch, from shapes alone."""

    shape: Shape
    unit: int
    """Key blocks of a split; 0 if splits are not fixed."""
    programs: int
    """Programs that share a tile's keys; 1 writes the output itself."""
    splits: int
    """Maximum splits that a tile can leave in the workspace; 0: no workspace is used."""
    workspace: int
    """Floats of workspace."""
    least: int
    """About the fewest key blocks of a program, unless splits are fixed."""
    merging: float
    """Key blocks that a program reads in the time in which one split more is merged, unless splits are fixed."""


@dataclass(frozen=True)
class Stack:
    """The query vectors of a layer that can read keys together: a tile's rows, each with the heads of a group."""

    groups: int
    per_group: int
    """Heads of a group."""
    dim: int
    """Of a query, without a latent's tail, and of a value."""
    dtype: torch.dtype
    deterministic: bool

    @property
    def max_queries(self) -> int:
        """Maximum query vectors of a tile."""
        raise NotImplementedError

    @property
    def max_rows(self) -> int:
        """Maximum rows of a tile."""
        return self.max_queries // self.per_group

    def shape(self, rows: int) -> Shape:
        """Block sizes for tiles of this many rows. In deterministic mode they depend only on the model."""
        queries = self.max_queries if self.deterministic else self.per_group * rows
        return self._shape(max(16, power_of_two(queries)))

    def _shape(self, height: int) -> Shape:
        raise NotImplementedError

    @property
    def is_wide(self) -> bool:
        return self.dim > VERY_WIDE

    def merged_queries(self, rows: int) -> int:
        """Query vectors that one program merges. rows: of a tile."""
        if self.is_wide:
            return 1
        return 16 if self.is_tall(rows) and not self.deterministic else 2

    def is_tall(self, rows: int) -> bool:
        """Whether tiles of so many rows have many query vectors, of a usual width."""
        return self.per_group * rows >= TALL and not self.is_wide

    def narrowed(self, shape: Shape) -> Shape | None:
        """Slower block by block, but more programs run at once; None if that does not help."""
        raise NotImplementedError

    def widened(self, shape: Shape, device: torch.device) -> Shape | None:
        """Faster block by block, but fewer programs run at once; None if that does not help, or there is no such
        program on this device."""
        return None

    def resident(self, shape: Shape) -> int:
        """Programs of this shape that a multiprocessor runs at once."""
        raise NotImplementedError


@dataclass(frozen=True)
class HeadStack(Stack):
    """The query heads of a KV head."""

    converts: bool = False
    """Whether keys and values are stored in another dtype, so that a block of them passes through registers."""

    @staticmethod
    @cache
    def of(
        heads: int, kv_heads: int, dim: int, dtype: torch.dtype, deterministic: bool, stored: torch.dtype | None = None
    ) -> HeadStack:
        """stored: the dtype of keys and values; None: that of the queries. Raises ValueError for an unsupported dtype,
        number of heads or width."""
        _check_dtype(dtype)
        per_head = heads // kv_heads
        if per_head > MAX_HEADS:
            raise ValueError(
                f"{per_head} query heads share a KV head; the triton attention backend supports at most {MAX_HEADS}"
            )
        if dim > MAX_DIM:
            raise ValueError(
                f"heads of width {dim} need attention='reference'; the triton backend supports at most {MAX_DIM}"
            )
        return HeadStack(kv_heads, per_head, dim, dtype, deterministic, stored not in (None, dtype))

    @property
    def max_queries(self) -> int:
        # float32 is multiplied without matrix instructions, so a taller stack gains nothing.
        queries = 16 if self.dtype == torch.float32 else 64 if self.deterministic else 128
        if self.is_wide and queries > 16:  # as for latents, whose values are as wide
            queries //= 2
        return max(queries, power_of_two(self.per_group))

    def _shape(self, height: int) -> Shape:
        if self.is_wide:
            if self.dtype == torch.float32:
                return Shape(height, 16, warps=4, stages=1)
            stages = 1 if self.deterministic else 2 if height > 32 else 3
            return Shape(height, 32, warps=8 if height > 16 else 4, stages=stages)
        if self.dtype == torch.float32:
            return Shape(height, 32, warps=4, stages=2)
        wide = power_of_two(self.dim) > 128
        if wide and height <= 32 and not self.deterministic:
            return Shape(height, 32, warps=4, stages=3)
        warps = 8 if height > 64 or (wide and height == 64) else 4
        return Shape(height, 64, warps=warps, stages=2 if wide else 3)

    def narrowed(self, shape: Shape) -> Shape | None:
        narrows = shape.keys > 32 and shape.queries <= 64 and not self.deterministic
        return replace(shape, keys=32) if narrows else None

    def widened(self, shape: Shape, device: torch.device) -> Shape | None:
        if shape.keys != 64 or shape.queries > 32 or self.deterministic or self.converts:
            return None
        wide = replace(shape, keys=128)
        return wide if self._shared(wide) <= shared_memory(device) else None

    def resident(self, shape: Shape) -> int:
        """Shared memory is the limit, or registers."""
        by_registers = 4 if shape.queries <= 16 else 3 if shape.warps == 4 else 1
        return max(1, min(by_registers, SHARED_MEMORY // (self._shared(shape) + RESERVED)))

    def _shared(self, shape: Shape) -> int:
        """Bytes of shared memory in which a program keeps its queries and the blocks being loaded, of which the smaller
        matrix instructions need one less, but pass weights through it. Without tails: spans that have them have many
        rows, and so queries for which blocks are not long, unless heads are narrow (`ExpandingLatents.least_rows`)."""
        is_small = shape.queries < 64
        elements = (shape.queries + (shape.stages - is_small) * 2 * shape.keys) * padded(self.dim)
        if is_small:
            elements += shape.queries * shape.keys
        return elements * self.dtype.itemsize


class LatentStack(Stack):
    """Heads that share a latent row, as many as a tile has room for and equally many in each group."""

    @staticmethod
    @cache
    def of(heads: int, rank: int, dtype: torch.dtype, deterministic: bool) -> LatentStack:
        """Raises ValueError for an unsupported dtype."""
        _check_dtype(dtype)
        room = LatentStack(1, heads, rank, dtype, deterministic).max_queries
        per_group = max(size for size in range(1, room + 1) if heads % size == 0)
        return LatentStack(heads // per_group, per_group, rank, dtype, deterministic)

    @property
    def max_queries(self) -> int:
        """The sum of a tile's weighted latents must fit into registers, and with fixed splits also into shared memory,
        on its way into the workspace in the midst of a program."""
        return 16 if self.dtype == torch.float32 else 32 if self.deterministic else 64

    def _shape(self, height: int) -> Shape:
        """For published rows, which have 576 numbers."""
        keys, stages = (16, 2) if self.dtype == torch.float32 else (32, 3)
        return Shape(height, keys, warps=8 if height > 16 else 4, stages=stages)

    def narrowed(self, shape: Shape) -> Shape | None:
        return None

    def resident(self, shape: Shape) -> int:
        """For published sizes, registers are the limit."""
        return 2 if shape.queries == 16 else 1


@lru_cache(maxsize=1024)
def make_plan(
    stack: Stack,
    tiles: int,
    rows_per_tile: int,
    max_keys: int,
    window: int | None,
    device: torch.device,
    programs: int | None = None,
    shape: Shape | None = None,
    filled_tiles: int | None = None,
) -> Plan:
    """How `paged_attention` will launch with these arguments."""
    assert 1 <= rows_per_tile <= stack.max_rows, f"{rows_per_tile} rows per tile; at most {stack.max_rows} are possible"
    # Fixed splits need a workspace for every tile, however few have rows.
    busy = tiles if filled_tiles is None or stack.deterministic else filled_tiles
    groups, processors = busy * stack.groups, multiprocessors(device)
    if shape is None:
        shape = _fitted(stack, rows_per_tile, groups, device)
    # A tile's keys within its window; the window may begin anywhere in a split.
    span = max_keys if window is None else min(max_keys, window + rows_per_tile + MAX_DRAFT_ROWS)
    least = max(MIN_KEYS, shape.keys)
    if programs is None and 2 * groups > processors:
        least = MIN_KEYS_BUSY
    elif programs is None and stack.is_tall(rows_per_tile) and not stack.deterministic:
        least = MIN_KEYS_TALL
    shares, splits = (-(-span // keys) + (window is not None) for keys in (least, SPLIT_KEYS))
    floats = tiles * stack.groups * rows_per_tile * stack.per_group * (stack.dim + 2)
    if programs is None:
        programs = max(1, _room(stack, shape, processors) // groups)
        if stack.deterministic and splits * floats > WORKSPACE_LIMIT:
            programs = 1
    programs = min(programs, shares)
    merging = (MERGING_WIDE if stack.is_wide else MERGING) / shape.keys
    if stack.deterministic:
        programs = min(programs, splits)
    else:
        blocks = -(-span // shape.keys)
        soonest = max(1, round((blocks * merging) ** 0.5))  # blocks of a split, as in `splits_of`
        room = max(1, SHARED_WORKSPACE // floats)
        programs = splits = min(programs, -(-blocks // soonest), room)
    if programs == 1:
        splits = 0
    unit = SPLIT_KEYS // shape.keys if stack.deterministic else 0
    return Plan(shape, unit, programs, splits, splits * floats, least // shape.keys, merging)


def _fitted(stack: Stack, rows_per_tile: int, groups: int, device: torch.device) -> Shape:
    """The shape with which so many groups of queries are attended to soonest."""
    shape, processors = stack.shape(rows_per_tile), multiprocessors(device)
    wide, narrow = stack.widened(shape, device), stack.narrowed(shape)
    if wide:
        room = _room(stack, wide, processors)
        if room // groups * groups >= FILLED * room:
            return wide
    if narrow and processors * stack.resident(shape) < groups <= processors * stack.resident(narrow):
        return narrow  # so that no program waits for another to end
    return shape


def _room(stack: Stack, shape: Shape, processors: int) -> int:
    """Programs of this shape, on all processors, among which keys are divided."""
    return int(processors * min(SHARING, stack.resident(shape)))


def forms(stack: Stack, device: torch.device) -> Iterator[tuple[int, Shape, int]]:
    """(rows_per_tile, shape, programs) of a launch of every binary that chains need, whatever the step."""
    for exponent in range(stack.max_rows.bit_length()):
        shape = stack.shape(1 << exponent)
        shapes = [each for each in (shape, stack.narrowed(shape), stack.widened(shape, device)) if each]
        yield from ((1 << exponent, each, programs) for each in shapes for programs in (1, 2))


def padded(width: int) -> int:
    """Width of a block of heads or tails: matrix instructions need at least 16."""
    return max(16, power_of_two(max(width, 1)))


def power_of_two(number: int) -> int:
    """The smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()


def _check_dtype(dtype: torch.dtype) -> None:
    if dtype not in DTYPES:
        raise ValueError(f"the triton attention backend cannot compute in {dtype}; use reference, or another dtype")
