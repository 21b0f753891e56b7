"""Attention over paged KV by FlashInfer's kernels (https://github.com/flashinfer-ai/flashinfer): an optional backend
for GPUs, also used for comparison. Kernels are compiled at their first use, which takes minutes and a CUDA compiler.

The pool already has FlashInfer's paged layout. A step in which every row sees itself and all that is stored before it
is plain causal attention; any other step gets a mask, one bit for each row and entry of its span. Windows count
positions. In a plain step those are storage indices, and FlashInfer applies the window; otherwise the mask does.

On a GPU a batch contains every draft row, so a span's rows are its request's storage from `start` on.

Legend: R spans.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch

from stridelm.attention.base import AttentionBackend, HeadsMixer
from stridelm.attention.host_view import HostView
from stridelm.batch import Geometry
from stridelm.cache.layout import HeadsKV

DTYPES = (torch.float16, torch.bfloat16)
HEAD_DIMS = (64, 128, 256)
WORKSPACE = 256 << 20
"""Bytes for partial results of rows whose keys are split. The largest plan on a GPU of 132 multiprocessors takes 17 MiB
for each query head of a KV head."""
LONG = 64
"""Up to this many rows per span, a step uses FlashInfer's kernels for decode, `fa2`: they put the query heads of a KV
head into one tile, and split keys. The kernels that it chooses for prompts on Hopper, `fa3`, do neither, in tiles of
128 rows."""


class FlashInferHeads(HeadsMixer):
    """One step, planned when its first layer of each kind runs."""

    def __init__(self, backend: AttentionBackend, geometry: Geometry) -> None:
        assert isinstance(backend, FlashInferAttention)
        self.backend, self.view = backend, HostView.of(geometry)
        self.causal = is_causal(self.view)
        self._planned: dict[HeadsKV, Any] = {}

    @classmethod
    def check(cls, state: HeadsKV, dtype: torch.dtype, deterministic: bool) -> None:
        super().check(state, dtype, deterministic)
        if dtype not in DTYPES:
            raise ValueError(f"the flashinfer backend runs in float16 and bfloat16, not in {dtype}; set dtype")
        if state.stored is not None:
            raise ValueError(
                "the flashinfer backend reads KV in the model's dtype; leave kv_cache_dtype at 'auto', or use "
                "attention='triton'"
            )
        if state.key_dim not in HEAD_DIMS:
            raise ValueError(
                f"the flashinfer backend has head sizes {', '.join(map(str, HEAD_DIMS))}, not {state.key_dim}; "
                "use attention='triton'"
            )

    def attend(
        self, state: HeadsKV, q_NHD: torch.Tensor, keys_PGD: torch.Tensor, values_PGD: torch.Tensor
    ) -> torch.Tensor:
        if state not in self._planned:
            self._planned[state] = self._plan(state, q_NHD)
        q_NHD = q_NHD.contiguous()
        paged = (-1, self.view.geometry.page_size, state.kv_heads, state.key_dim)
        pool = (keys_PGD.view(paged), values_PGD.view(paged))
        out: torch.Tensor = self._planned[state].run(q_NHD, pool, out=torch.empty_like(q_NHD))
        return out

    def _plan(self, state: HeadsKV, q_NHD: torch.Tensor) -> Any:
        device = q_NHD.device
        tables = paged_tables(self.view, state.group)
        sight: dict[str, Any]
        if self.causal:
            kernels = "auto" if max(self.view.counts) > LONG else "fa2"
            sight = {"causal": True, "window_left": -1 if state.window is None else state.window - 1}
        else:
            kernels = "fa2"  # the only ones that take a mask
            sight = {"custom_mask": visible(self.view, state.window)}
            tables = tuple(table.to(device) for table in tables)  # the mask is packed by them, on its own device
        wrapper = self.backend.wrapper(state, kernels, device)
        wrapper.plan(
            *tables,
            state.heads,
            state.kv_heads,
            state.key_dim,
            self.view.geometry.page_size,
            sm_scale=state.scale,
            q_data_type=q_NHD.dtype,
            kv_data_type=q_NHD.dtype,
            **sight,
        )
        return wrapper


class FlashInferAttention(AttentionBackend):
    """A step is valid until the next one is prepared: FlashInfer keeps one plan for each kind of layer."""

    device = "cuda"
    mixers: ClassVar = {HeadsKV: FlashInferHeads}

    def __init__(self, deterministic: bool) -> None:
        """Raises ValueError if `deterministic`: FlashInfer splits a row's keys depending on the other rows."""
        if deterministic:
            raise ValueError(
                "the flashinfer backend cannot promise equal bits; use attention='triton', or deterministic=False"
            )
        super().__init__(deterministic)
        self._workspace: torch.Tensor | None = None
        self._wrappers: dict[tuple[HeadsKV, str], Any] = {}

    def wrapper(self, state: HeadsKV, kernels: str, device: torch.device) -> Any:
        """The object that plans and runs layers like this. All share one workspace, as they run one after another."""
        if (state, kernels) not in self._wrappers:
            from flashinfer import BatchPrefillWithPagedKVCacheWrapper

            if self._workspace is None:
                self._workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=device)
            wrapper = BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD", backend=kernels)
            self._wrappers[state, kernels] = wrapper
        return self._wrappers[state, kernels]


def paged_tables(view: HostView, group: str) -> tuple[torch.Tensor, ...]:
    """On the host, int32: ([R + 1] first row of each span, [R + 1] first index of each span in the page ids, the page
    ids [sum of pages], [R] entries on each span's last page). The last element of the first two is the total."""
    ends = np.add(view.starts, view.counts)
    pages = -(-ends // view.geometry.page_size)
    ids = [table[:count] for table, count in zip(view.tables(group), pages, strict=True)]
    columns = (
        np.cumsum([0, *view.counts]),
        np.cumsum([0, *pages]),
        np.concatenate(ids),
        ends - (pages - 1) * view.geometry.page_size,
    )
    return tuple(torch.from_numpy(column.astype(np.int32)) for column in columns)


def is_causal(view: HostView) -> bool:
    """Whether every valid row sees itself and all that is stored before it. Padding rows do not count: their results
    are never read. Waits for the device if the step has draft rows."""
    if view.counts == view.reals:
        return True
    chain = (2 << view.geometry.draft_rows.clamp(min=0)) - 1
    return bool(((view.geometry.ancestors == chain) | (view.geometry.ancestors == 0)).all())


def visible(view: HostView, window: int | None) -> torch.Tensor:
    """[sum over the spans of rows x entries] bool: whether a row sees an entry of its request, span by span and row by
    row. A padding row sees itself and the real entries within the window."""
    device = view.geometry.positions.device
    ends = np.add(view.starts, view.counts)
    bases = np.repeat(np.add(view.starts, view.reals), view.counts)
    base = torch.from_numpy(bases).to(device)[:, None]
    own, position = view.geometry.draft_rows[:, None], view.geometry.positions[:, None]
    draft = torch.arange(max(np.subtract(view.counts, view.reals)), device=device)
    storage = torch.arange(max(ends) + len(draft), device=device)
    real = storage < torch.where(own < 0, position + 1, base)
    path = ((view.geometry.ancestors[:, None] >> draft) & 1) == 1
    if window is not None:
        real &= storage > position - window
        path &= path.flip(1).cumsum(1).flip(1) <= window  # a path's rows follow one another in position
    seen = real.scatter_(1, base + draft, path | (draft == own))
    spans = zip(seen.split(view.counts), ends, strict=True)
    return torch.cat([rows[:, :end].flatten() for rows, end in spans])
