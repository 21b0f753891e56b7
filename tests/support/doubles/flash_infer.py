"""FlashInfer's paged prefill as documented, in torch: tests our backend's calls without a GPU."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from stridelm.attention import BACKENDS
from stridelm.attention.flash_infer import FlashInferAttention

NAME = "flashinfer"


class BatchPrefillWithPagedKVCacheWrapper:
    """Refuses what the real one refuses, and also what it would silently compute wrong."""

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", *, backend: str = "auto") -> None:
        assert float_workspace_buffer.dtype == torch.uint8 and kv_layout == "NHD" and backend in ("auto", "fa2")
        self.backend = backend

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        sm_scale: float,
        window_left: int = -1,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        tables = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        assert all(table.dtype == torch.int32 and table.dim() == 1 for table in tables)
        assert bool(((paged_kv_last_page_len >= 1) & (paged_kv_last_page_len <= page_size)).all())
        assert q_data_type == kv_data_type and q_data_type in (torch.float16, torch.bfloat16)
        rows, pages = qo_indptr.diff(), paged_kv_indptr.diff()
        assert len(paged_kv_indices) == int(paged_kv_indptr[-1])
        entries = (pages - 1) * page_size + paged_kv_last_page_len
        assert bool((entries >= rows).all())
        if custom_mask is None:
            assert causal
            spans = [torch.ones(n, L, dtype=torch.bool).tril(L - n) for n, L in zip(rows.tolist(), entries.tolist())]
        else:
            assert self.backend == "fa2" and custom_mask.dtype == torch.bool and window_left == -1 and not causal
            parts = custom_mask.split((rows * entries).tolist())
            spans = [part.view(n, -1) for n, part in zip(rows.tolist(), parts, strict=True)]
        if window_left >= 0:
            spans = [span.triu(span.shape[1] - span.shape[0] - window_left) for span in spans]
        self.spans = spans
        self.pages = paged_kv_indices.long().split(pages.tolist())
        self.shape = (int(rows.sum()), num_qo_heads, head_dim_qk)
        self.pool_shape = (page_size, num_kv_heads, head_dim_qk)
        self.dtype, self.scale = q_data_type, sm_scale

    def run(
        self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor], *, out: torch.Tensor
    ) -> torch.Tensor:
        assert q.shape == out.shape == self.shape and q.is_contiguous() and q.dtype == out.dtype == self.dtype
        assert all(pool.shape[1:] == self.pool_shape and pool.dtype == q.dtype for pool in paged_kv_cache)
        row = 0
        for seen, pages in zip(self.spans, self.pages, strict=True):
            own = slice(row, row + len(seen))
            keys, values = (
                pool[pages].flatten(0, 1)[: seen.shape[1]].float().repeat_interleave(q.shape[1] // pool.shape[2], 1)
                for pool in paged_kv_cache
            )
            scores = torch.einsum("nhd,lhd->nhl", q[own].float(), keys) * self.scale
            weights = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1)
            out[own] = torch.einsum("nhl,lhd->nhd", weights, values).to(out.dtype)
            row += len(seen)
        return out


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace FlashInfer with it, so that our backend runs on any device."""
    module: Any = ModuleType(NAME)
    module.BatchPrefillWithPagedKVCacheWrapper = BatchPrefillWithPagedKVCacheWrapper
    monkeypatch.setitem(sys.modules, NAME, module)
    monkeypatch.setattr(FlashInferAttention, "device", None)
    monkeypatch.setitem(BACKENDS._entries, NAME, FlashInferAttention)
