"""Rows to draw from, in Triton and in torch."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from stridelm.kernels.draw import draw, gumbel_of, noise_words
from stridelm.kernels.plain_step import PlainStepOps
from stridelm.kernels.step_ops import Cut
from stridelm.kernels.truncate import truncate
from stridelm.params import SamplingParams, Speculation
from stridelm.sample.rows import Rows
from stridelm.sample.sampler import Sampler
from stridelm.sample.table import Feature, SamplingTable
from stridelm.types import Request

KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 1.7, "min_p": 0.02},
    {"temperature": 0.8, "min_p": 0.3},
    {"temperature": 0.7, "min_p": 1.0},
)
"""Requests that need no history: greedy, sampled, and with min-p from loose to so tight that only the argmax stays."""

TRUNCATED: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "top_k": 3, "top_p": 0.5},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 0.6, "top_k": 40},
    {"temperature": 1.3, "top_p": 0.05},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.0, "top_p": 0.999},
    {"temperature": 1.1, "top_k": 17, "top_p": 0.8},
    {"temperature": 0.9, "min_p": 0.1, "top_k": 5},
    {"temperature": 1.5, "min_p": 0.001, "top_k": 100, "top_p": 0.97},
)
"""Requests with top-k and top-p, alone and together."""


@dataclass
class History:
    tokens: torch.Tensor
    known: torch.Tensor


def table_of(kinds: tuple[dict[str, Any], ...], vocab: int, device: str = "cpu", seed: int = 0) -> SamplingTable:
    """A slot for each kind of request, with seeds of all magnitudes."""
    rng = random.Random(seed)
    table = SamplingTable(len(kinds), vocab, device)
    for slot, params in enumerate(kinds):
        wide = rng.randrange(-(2**63), 2**63)
        table.set(slot, Request(str(slot), [0], SamplingParams(**params), Speculation(), seed=wide, sample_index=slot))
    return table


def make_logits(
    rows: int, vocab: int, dtype: torch.dtype, device: str = "cpu", seed: int = 0, step: float = 0.0
) -> torch.Tensor:
    """Random logits; step: round them to multiples of it, so that many tie."""
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3
    if step:
        logits = (logits / step).round() * step
    return logits.to(dtype).to(device)


def columns(table: SamplingTable) -> dict[str, torch.Tensor]:
    """The table's columns as the kernel takes them."""
    sampled = [Feature.SAMPLED in table.features(slot) for slot in range(len(table.seed))]
    return {
        "temperature_S": table.temperature,
        "seed_S": table.seed,
        "sample_index_S": table.sample_index,
        "sampled_S": torch.tensor(sampled, device=table.device),
        "log_min_p_S": table.log_min_p,
    }


def drawn(
    logits_MV: torch.Tensor, slots: list[int], positions_M: torch.Tensor, table: SamplingTable, **options: Any
) -> torch.Tensor:
    """The kernel's tokens."""
    slots_M = torch.tensor(slots, device=table.device)
    return draw(logits_MV, slots_M, positions_M, **{**columns(table), **options})


def sampler_of(table: SamplingTable) -> Sampler:
    """A sampler in torch, for requests whose history does not matter."""
    nothing = torch.zeros(len(table.seed), 4, dtype=torch.int64, device=table.device)
    return Sampler(table, History(nothing, nothing[:, 0]), PlainStepOps())


def twin(
    logits_MV: torch.Tensor,
    slots: list[int],
    positions_M: torch.Tensor,
    table: SamplingTable,
    stream: int | torch.Tensor = 0,
) -> torch.Tensor:
    """The tokens in torch."""
    rows = Rows(torch.tensor(slots, device=table.device), positions_M)
    return sampler_of(table).draw(logits_MV, rows, slots, stream)


def cut_of(logits_MV: torch.Tensor, slots: list[int], table: SamplingTable, **options: Any) -> Cut:
    """The kernels' truncation, with min-p, top-k and top-p."""
    names = ("temperature_S", "sampled_S", "log_min_p_S")
    params = {name: column for name, column in columns(table).items() if name in names}
    params |= {"top_k_S": table.top_k, "top_p_S": table.top_p, **options}
    return truncate(logits_MV, torch.tensor(slots, device=table.device), **params)


def kept_by(cut: Cut, scaled_MV: torch.Tensor) -> torch.Tensor:
    """[M, V] which of the scaled logits a cut keeps, as `draw` reads it."""
    depth_MV, edge_M1 = cut.peak_M[:, None] - scaled_MV, cut.edge_M[:, None]
    first_MV = torch.arange(scaled_MV.shape[1], device=scaled_MV.device) <= cut.last_M[:, None]
    return (scaled_MV >= cut.low_M[:, None]) & ((depth_MV < edge_M1) | ((depth_MV == edge_M1) & first_MV))


def check_kept(logits_MV: torch.Tensor, slots: list[int], table: SamplingTable) -> None:
    """In every sampled row the cut keeps exactly what the sampler keeps, ties included."""
    sampled = [row for row, slot in enumerate(slots) if Feature.SAMPLED in table.features(slot)]
    slots_M = torch.tensor(slots, device=table.device)
    rows = Rows(slots_M, torch.ones_like(slots_M))
    wanted = sampler_of(table).processed(logits_MV, rows, slots) > float("-inf")
    scaled = logits_MV.float() / table.temperature[slots_M, None]
    got = kept_by(cut_of(logits_MV, slots, table), scaled) & (scaled > float("-inf"))
    assert torch.equal(got[sampled], wanted[sampled])


@triton.jit(do_not_specialize=["position", "sample", "stream"])
def _noise_row(words, floats, seed, position, sample, stream, BLOCKS: tl.constexpr):
    word_T = noise_words(tl.load(seed), tl.arange(0, BLOCKS), position, sample, stream)
    token_T = tl.arange(0, 4 * BLOCKS)
    tl.store(words + token_T, word_T.to(tl.int64))
    tl.store(floats + token_T, gumbel_of(word_T))


def kernel_noise(
    seed: int, position: int, sample: int, stream: int, blocks: int, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """(integers, floats) of the noise for the first 4 * blocks tokens, as the kernel makes them; blocks: a power of
    two."""
    words = torch.empty(4 * blocks, dtype=torch.int64, device=device)
    floats = torch.empty(4 * blocks, dtype=torch.float32, device=device)
    _noise_row[(1,)](words, floats, torch.tensor([seed], device=device), position, sample, stream, BLOCKS=blocks)
    return words, floats
