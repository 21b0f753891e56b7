"""An engine's start on a device that does nothing, to learn which kernels it launches.

Everything that decides on a launch is the host's own code with the real shapes, so there is no list of kernels to keep.
The engine of a rehearsal is thrown away, and with it every tensor without memory.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from stridelm.cache.transaction import Transaction
from stridelm.config import EngineConfig
from stridelm.engine.device_step import Land, Run
from stridelm.engine.engine import Engine
from stridelm.engine.load import load
from stridelm.engine.step import Device
from stridelm.engine.warm_up import Wave, warm_up_requests
from stridelm.models.layers.block import Block, LayerSpec, Stream, Tap
from stridelm.models.layers.linear import Storable, WeightFormat
from stridelm.progress import no_bars
from stridelm.run.dry import DryPool, dry
from stridelm.run.segments import Segments
from stridelm.types import StepPlan

FEW = 2
"""Requests of a wave that is rehearsed: those of a full step take longer than compiling what they alone launch."""


def rehearse(config: EngineConfig) -> None:
    """Launch everything that an engine launches until it is ready. To be called inside `compiling`, for a config whose
    weights are random."""
    # Nothing may be captured before the pool is replaced, and times say nothing.
    config = replace(config, capture="lazy", itl_target_ms=0)
    with dry(), no_bars(), _quietly():
        loaded = load(config, elastic=False)  # which asks the driver for memory
        _shorten(loaded.model.blocks)
        engine = Engine(config, loaded)
        sizes = loaded.target.vocab_size, loaded.target.max_length, engine.budget
        pool = DryPool()
        engine.capture_into(pool, Segments(engine.runner, pool, engine.tokens.tokens.shape[1]))
        engine.steps.device, engine.steps.lag = _OneTokenEach(engine.steps.device), 0
        engine.steps.timed_on = torch.device("cpu")
        assert engine.capture is not None
        engine.capture.at_start()
        loaded.attention.warm_up(config.page_size, loaded.device)
        engine.device.verifier.warm_up()
        engine.serve_own([wave for wave in warm_up_requests(*sizes, grammars=False) if _is_worth_it(wave)])


@dataclass
class _OneTokenEach:
    """A step whose outcome is made up, since nothing can be read: every request that decides gets one token."""

    device: Device

    def run(self, plan: StepPlan, transaction: Transaction, land: Land, *, detailed: bool = False) -> Run:
        run = self.device.run(plan, transaction, land, detailed=detailed)
        table = torch.zeros(len(plan.spans), run.table.shape[1], dtype=torch.int64)
        table[:, 0] = torch.tensor([span.decides for span in plan.spans])  # columns as of `StepOps.commit`
        table[:, 5] = torch.tensor([span.real for span in plan.spans])
        return replace(run, table=table)


def _is_worth_it(wave: Wave) -> bool:
    """Whether the host needs less time for these requests than it takes to compile what they alone launch."""
    return len(wave) <= FEW and not any(params.reads_rows for _, params in wave)


def _shorten(blocks: nn.ModuleList) -> None:
    """Skip layers that are like an earlier one, weight formats included: they would launch the same kernels."""
    seen: list[tuple[LayerSpec, list[WeightFormat]]] = []  # not hashable
    for block in blocks:
        assert isinstance(block, Block)
        like = block.spec, [part.format for part in block.modules() if isinstance(part, Storable)]
        if like in seen:
            block.forward = partial(_skip, block.layer)  # type: ignore[method-assign]
        seen.append(like)


def _skip(
    layer: int,
    stream: Stream,
    positions: torch.Tensor,
    mix: Any,
    tap: Tap | None = None,
    wanted_M: torch.Tensor | None = None,
) -> None:
    if tap is not None:
        tap(layer, stream.x)
    if wanted_M is not None:
        stream.settle()
        stream.keep(wanted_M)


@contextmanager
def _quietly() -> Iterator[None]:
    """What a rehearsal logs, the real start logs again."""
    logger = logging.getLogger("stridelm")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
