"""Attention over paged KV by FlashInfer's kernels (https://github.com/flashinfer-ai/flashinfer): an optional backend
for GPUs, and a peer to compare with. Kernels are compiled at their first use, which takes minutes and a CUDA compiler.

The pool is FlashInfer's paged layout as it stands. A step in which every row sees all that is stored before it and
itself is plain causal attention; any other gets a mask, one bit for each row and entry of its span. Windows count
positions. In a plain step those are storage indices, and FlashInfer cuts the window; elsewhere the mask does.

On a GPU no draft row is left out of a batch, so a span's rows are its request's storage from `start` on.

Legend: R spans.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch

from stridelm.models.layers.decoder import LayerKV
from stridelm.types import DeviceGeometry, Geometry

DTYPES = (torch.float16, torch.bfloat16)
HEAD_DIMS = (64, 128, 256)
WORKSPACE = 256 << 20
"""Bytes for the parts of rows whose keys are split. The largest plan on a GPU of 132 processors takes 17 MiB for each
query head of a KV head."""
LONG = 64
"""Most rows of a span for which a step stays with FlashInfer's kernels for decode, `fa2`: they take the query heads of
a KV head into one tile, and split keys. Those it chooses for prompts on Hopper, `fa3`, do neither, in tiles of 128
rows."""


class FlashInferAttention:
    device: ClassVar[str | None] = "cuda"
    reads_device: ClassVar[bool] = False

    def __init__(self, deterministic: bool) -> None:
        """Raises ValueError if `deterministic`: where FlashInfer splits a row's keys depends on the other rows."""
        if deterministic:
            raise ValueError(
                "the flashinfer backend cannot promise equal bits; use attention='triton', or deterministic=False"
            )
        self._workspace: torch.Tensor | None = None
        self._wrappers: dict[tuple[LayerKV, str], Any] = {}

    def check(self, layout: tuple[LayerKV, ...], query_heads: int, dtype: torch.dtype) -> None:
        if dtype not in DTYPES:
            raise ValueError(f"the flashinfer backend runs in float16 and bfloat16, not in {dtype}; set dtype")
        for kv in layout:
            if kv.head_dim not in HEAD_DIMS:
                raise ValueError(
                    f"the flashinfer backend has head sizes {', '.join(map(str, HEAD_DIMS))}, not {kv.head_dim}; "
                    "use attention='triton'"
                )

    def prepare(
        self, geometry: Geometry | DeviceGeometry, layout: tuple[LayerKV, ...], query_heads: int
    ) -> PreparedFlashInfer:
        """Valid until the next call: FlashInfer keeps one plan for each kind of layer."""
        assert isinstance(geometry, Geometry)
        return PreparedFlashInfer(self, geometry, query_heads)

    def wrapper(self, kv: LayerKV, kernels: str, device: torch.device) -> Any:
        """The object that plans and runs layers like `kv`. They share one workspace, being used one after another."""
        if (kv, kernels) not in self._wrappers:
            from flashinfer import BatchPrefillWithPagedKVCacheWrapper

            if self._workspace is None:
                self._workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=device)
            wrapper = BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD", backend=kernels)
            self._wrappers[kv, kernels] = wrapper
        return self._wrappers[kv, kernels]


class PreparedFlashInfer:
    """One step, planned at the first layer of each kind."""

    def __init__(self, backend: FlashInferAttention, geometry: Geometry, query_heads: int) -> None:
        self.backend, self.geometry, self.query_heads = backend, geometry, query_heads
        self.causal = is_causal(geometry)
        self._planned: dict[LayerKV, Any] = {}

    def attend(
        self, kv: LayerKV, q_NHD: torch.Tensor, keys_PGD: torch.Tensor, values_PGD: torch.Tensor
    ) -> torch.Tensor:
        if kv not in self._planned:
            self._planned[kv] = self._plan(kv, q_NHD)
        q_NHD = q_NHD.contiguous()
        paged = (-1, self.geometry.page_size, kv.kv_heads, kv.head_dim)
        pool = (keys_PGD.view(paged), values_PGD.view(paged))
        out: torch.Tensor = self._planned[kv].run(q_NHD, pool, out=torch.empty_like(q_NHD))
        return out

    def _plan(self, kv: LayerKV, q_NHD: torch.Tensor) -> Any:
        device = q_NHD.device
        tables = paged_tables(self.geometry, kv.group)
        sight: dict[str, Any]
        if self.causal:
            kernels = "auto" if max(self.geometry.counts) > LONG else "fa2"
            sight = {"causal": True, "window_left": -1 if kv.window is None else kv.window - 1}
        else:
            kernels = "fa2"  # the others take no mask
            sight = {"custom_mask": visible(self.geometry, kv.window)}
            tables = tuple(table.to(device) for table in tables)  # the mask is packed by them, on its own device
        wrapper = self.backend.wrapper(kv, kernels, device)
        wrapper.plan(
            *tables,
            self.query_heads,
            kv.kv_heads,
            kv.head_dim,
            self.geometry.page_size,
            sm_scale=kv.head_dim**-0.5,
            q_data_type=q_NHD.dtype,
            kv_data_type=q_NHD.dtype,
            **sight,
        )
        return wrapper


def paged_tables(geometry: Geometry, group: str) -> tuple[torch.Tensor, ...]:
    """On the host, int32: ([R + 1] first row of each span, [R + 1] its first place among the page ids, the page ids
    [sum of pages], [R] entries on each span's last page). Last of both firsts is the end of all."""
    ends = np.add(geometry.starts, geometry.counts)
    pages = -(-ends // geometry.page_size)
    ids = [table[:count] for table, count in zip(geometry.page_tables[group], pages, strict=True)]
    columns = (
        np.cumsum([0, *geometry.counts]),
        np.cumsum([0, *pages]),
        np.concatenate(ids),
        ends - (pages - 1) * geometry.page_size,
    )
    return tuple(torch.from_numpy(column.astype(np.int32)) for column in columns)


def is_causal(geometry: Geometry) -> bool:
    """Whether every live row sees all that is stored before it, and itself. Rows of padding are asked nothing: what
    comes of them nobody reads. Waits for the device if the step has draft rows."""
    if geometry.counts == geometry.reals:
        return True
    chain = (2 << geometry.draft_rows.clamp(min=0)) - 1
    return bool(((geometry.ancestors == chain) | (geometry.ancestors == 0)).all())


def visible(geometry: Geometry, window: int | None) -> torch.Tensor:
    """[sum over the spans of rows x entries] bool: whether a row sees an entry of its request, span after span and row
    after row. A row of padding sees the real entries that the window leaves it, and its own."""
    device = geometry.positions.device
    ends = np.add(geometry.starts, geometry.counts)
    bases = np.repeat(np.add(geometry.starts, geometry.reals), geometry.counts)
    base = torch.from_numpy(bases).to(device)[:, None]
    own, position = geometry.draft_rows[:, None], geometry.positions[:, None]
    draft = torch.arange(max(np.subtract(geometry.counts, geometry.reals)), device=device)
    storage = torch.arange(max(ends) + len(draft), device=device)
    real = storage < torch.where(own < 0, position + 1, base)
    path = ((geometry.ancestors[:, None] >> draft) & 1) == 1
    if window is not None:
        real &= storage > position - window
        path &= path.flip(1).cumsum(1).flip(1) <= window  # a path's rows follow one another in position
    seen = real.scatter_(1, base + draft, path | (draft == own))
    spans = zip(seen.split(geometry.counts), ends, strict=True)
    return torch.cat([rows[:, :end].flatten() for rows, end in spans])
