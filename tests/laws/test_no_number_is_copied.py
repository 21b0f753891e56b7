"""The host waits for no device while requests are admitted, read their prompts and decode, as far as a CPU can tell.

`table[slot] = number` makes a tensor of the number on the host and copies it, and a copy from the host's memory returns
when the device has done all that was launched before. `fill_` does not. tests/gpu/test_gpu_steady.py asks CUDA itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from stridelm import SamplingParams
from stridelm.draft import DRAFTERS
from support.checks.identity import prompts
from support.doubles.bounds import LaggingStand, bounds_registered
from support.doubles.poison import KINDS

TWINS = ("/stridelm/kernels/", "/stridelm/attention/")
"""Code that runs on a CPU in place of kernels."""


class Numbers(TorchDispatchMode):
    """Notes where a number is assigned to a part of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.places: set[str] = set()

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if operation is torch.ops.aten.lift_fresh.default and not args[0].dim():
            frame = sys._getframe(1)
            while "/torch/" in frame.f_code.co_filename and frame.f_back is not None:
                frame = frame.f_back
            place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            if not any(twin in place for twin in TWINS):
                self.places.add(place)
        return operation(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def stand(checkpoint: Callable[..., Path]) -> Iterator[LaggingStand]:
    with bounds_registered():
        yield LaggingStand(checkpoint("qwen3", tie_word_embeddings=True), "float32")


@pytest.mark.parametrize("params", [{}, {"temperature": 0.7, "presence_penalty": 0.5, "logit_bias": {3: 1.0}}])
@pytest.mark.parametrize(
    "kinds", [*([kind] for kind in KINDS), KINDS], ids=lambda kinds: "-".join(map(str, kinds[0].values()))
)
def test_no_number_is_copied(stand: LaggingStand, kinds: list[dict[str, Any]], params: dict[str, Any]) -> None:
    engine = stand.llm(page_size=4).engine
    for i, prompt in enumerate(prompts(stand, max(3, len(kinds)))):
        asked = SamplingParams(**params, seed=i, max_tokens=9, ignore_eos=True, speculation=kinds[i % len(kinds)])
        engine.add(str(i), prompt, asked)
    with Numbers() as seen:
        while engine.busy:
            engine.step()
    on_host = {f"/draft/{kind['drafter']}/" for kind in kinds if DRAFTERS.get(kind["drafter"]).host_bound}
    assert not {place for place in seen.places if not any(folder in place for folder in on_host)}


def test_an_assignment_is_seen() -> None:
    table = torch.zeros(4, 2)
    with Numbers() as seen:
        table[1].fill_(3)
        assert not seen.places
        table[1, 0] = 3
        table[torch.arange(2)] = 3
    assert len(seen.places) == 2
