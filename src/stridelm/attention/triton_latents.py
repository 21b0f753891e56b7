"""Attention over latent rows by the Triton kernel.

Rows attend to latents as they are stored, with absorbed expansions. Where equal bits are not promised, long chunks of
prompts are an exception: the latents that they see are expanded into keys and values for each head
(attention/expanded.py).
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from stridelm.attention.base import AttentionBackend, Entries, LatentInput
from stridelm.attention.expanded import ExpandingLatents
from stridelm.attention.paged_step import PagedStep, launch_forms, stack_of
from stridelm.batch import Geometry
from stridelm.cache.layout import LatentKV
from stridelm.kernels.attention_plan import MAX_DIM
from stridelm.kernels.head_products import FEW_ROWS, MANY_ROWS, head_products
from stridelm.kernels.latent_queries import latent_queries
from stridelm.kernels.ops import Ops


class TritonLatents(ExpandingLatents):
    lead: ClassVar[float] = 0.375
    """64 rows of published models, with which expanded entries are 1.1x to 1.3x as fast on an H100, and 128 rows 1.1x
    to 2.2x (benchmarks/gpu_kernels.py latent_ways): wide products, as those with latents, reach less of its rate."""

    def __init__(self, backend: AttentionBackend, geometry: Geometry) -> None:
        super().__init__(backend, geometry)
        self._step = PagedStep(backend, geometry)

    @classmethod
    def check(cls, state: LatentKV, dtype: torch.dtype, deterministic: bool) -> None:
        stack_of(state, dtype, deterministic)

    @classmethod
    def can_expand(cls, state: LatentKV) -> bool:
        assert state.expands is not None
        key, value = state.expands
        return key == value <= MAX_DIM

    @classmethod
    def warm_up(
        cls, state: LatentKV, dtype: torch.dtype, deterministic: bool, page_size: int, device: torch.device
    ) -> None:
        q_NHR, turned_NHK = (
            torch.zeros(1, state.heads, width, dtype=dtype, device=device) for width in (state.rank, state.rope_dim)
        )
        pool = (page_size, 1, state.rank + state.rope_dim)
        rows_PGC = torch.zeros(pool, dtype=state.stored or dtype, device=device)
        entries: dict[str, Any] = {"keys_PGD": rows_PGC, "values_PGD": None, "turned_NHT": turned_NHK}
        launch_forms(state, deterministic, page_size, q_NHR, **entries)
        if not deterministic and cls.least_rows(state) is not None:
            cls.warm_up_expanded(state, dtype, page_size, device)

    @classmethod
    def warm_up_expanded(cls, state: LatentKV, dtype: torch.dtype, page_size: int, device: torch.device) -> None:
        """Launch every kernel that steps need of which some rows attend to expanded entries."""
        least, as_heads = cls.least_rows(state), state.as_heads(state.heads)
        assert least is not None

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        keys_PHD, values_PHD = zeros(page_size, state.heads, 2 * as_heads.key_dim).chunk(2, dim=2)
        entries = {
            "keys_PGD": keys_PHD,
            "values_PGD": values_PHD,
            "turned_NHT": zeros(1, state.heads, state.rope_dim),
            "tails_PT": zeros(page_size, state.rank + state.rope_dim)[:, state.rank :],
        }
        q_NHD = zeros(1, state.heads, as_heads.key_dim + state.rope_dim)[:, :, : as_heads.key_dim]
        for each in (q_NHD, q_NHD.contiguous()):  # all of a step's queries, and those of some spans
            launch_forms(as_heads, False, page_size, each, least, **entries)
        if dtype.itemsize == 2:
            # The few rows of other spans are absorbed by themselves, and not as in steps of which none are expanded.
            keys_HDR = zeros(state.heads, 2 * as_heads.key_dim, state.rank)[:, : as_heads.key_dim]
            for rows in (FEW_ROWS, MANY_ROWS):
                head_products(zeros(rows, state.heads, as_heads.key_dim), keys_HDR)

    def mix(
        self,
        state: LatentKV,
        inputs: LatentInput,
        entries: Entries,
        slots_N: torch.Tensor,
        ops: Ops,
        wanted_M: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Few rows take one launch less, with the same bits."""
        keys_HDR = inputs.expansion.absorbs_few(inputs.q_NHD)
        if keys_HDR is None or wanted_M is not None or self.expands_some(state):
            return super().mix(state, inputs, entries, slots_N, ops, wanted_M)
        latents = entries["latents"]
        made = inputs.turned_NHK, inputs.rows_NC, inputs.rope, latents, slots_N, state.key_scale
        queries = latent_queries(inputs.q_NHD, keys_HDR, *made)
        return inputs.expansion.values(self.attend(state, *queries, latents))

    def attend(
        self, state: LatentKV, q_NHR: torch.Tensor, turned_NHK: torch.Tensor, latents_PC: torch.Tensor
    ) -> torch.Tensor:
        return self._step.run(state, q_NHR, keys_PGD=latents_PC[:, None], values_PGD=None, turned_NHT=turned_NHK)

    def attend_expanded(
        self,
        state: LatentKV,
        q_MHD: torch.Tensor,
        turned_MHK: torch.Tensor,
        both_LHX: torch.Tensor,
        tails_LK: torch.Tensor,
    ) -> torch.Tensor:
        keys, values = both_LHX.chunk(2, dim=2)
        entries = {"keys_PGD": keys, "values_PGD": values, "turned_NHT": turned_MHK, "tails_PT": tails_LK}
        return self._step.run(state.as_heads(q_MHD.shape[1]), q_MHD, **entries)
