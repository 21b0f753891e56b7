"""A launch that few rows of latent attention share, against those that it replaces, bit for bit."""

from __future__ import annotations

import torch

from stridelm.kernels.head_products import head_products
from stridelm.kernels.latent_queries import latent_queries
from stridelm.kernels.latent_rows import rope_and_store_latent
from stridelm.kernels.ops import LatentRope
from stridelm.kernels.plain_fp8 import E4M3

POSITIONS = 50


def check_queries(
    rows: int, heads: int, rank: int, rope_dim: int, width: int, interleaved: bool, dtype: torch.dtype, device: str
) -> None:
    """Entries, rotated queries and absorbed ones, for pools in the model's dtype and in eight bits. width: of a head's
    query without its rotated part."""
    numbers = torch.Generator().manual_seed(rows)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=numbers).to(device, dtype)

    made = noise(rows, heads * (width + rope_dim) + rank + rope_dim)  # as a model passes them: parts of one product
    q, rows_NC = made.split((heads * (width + rope_dim), rank + rope_dim), dim=1)
    q_NHD, turned_NHK = q.view(rows, heads, -1).split((width, rope_dim), dim=2)
    keys_HDR = noise(heads, width + 8, rank)[:, :width] * width**-0.5
    angles = torch.rand(2, POSITIONS, rope_dim // 2, generator=numbers).to(device) * 6
    positions = torch.randint(0, POSITIONS, (rows,), generator=numbers).to(device)
    slots = torch.randperm(2 * rows, generator=numbers)[:rows].to(device)
    rope = LatentRope(positions, angles[0].cos(), angles[1].sin(), noise(rank), 1e-6, interleaved)
    for stored, scale in ((dtype, 1.0), (E4M3, 0.5)):
        pools = [torch.zeros(2 * rows, rank + rope_dim, device=device).to(stored) for _ in range(2)]
        got = latent_queries(q_NHD, keys_HDR, turned_NHK, rows_NC, rope, pools[0], slots, scale)
        turned = rope_and_store_latent(turned_NHK, rows_NC, rope, pools[1], slots, scale)
        assert torch.equal(got[0], head_products(q_NHD, keys_HDR))
        assert torch.equal(got[1], turned)
        assert torch.equal(*(pool.float() for pool in pools)) and bool(pools[0].float().any())
