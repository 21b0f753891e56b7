"""The interface of a head that follows the target, and loading one from its directory.

Anything wrong with the weights is reported before the first token. Serving and training use the same classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from stridelm.attention.base import Mix
from stridelm.batch import States
from stridelm.cache.layout import LayerStates
from stridelm.draft.given import Given
from stridelm.kernels.ops import Ops
from stridelm.kernels.plain import PlainOps
from stridelm.models.fitting import fill
from stridelm.models.layers.compiled import make_ready
from stridelm.models.layers.decoder import DecoderSpec
from stridelm.models.layers.slots import ModelPart
from stridelm.models.loader import fill_randomly, formats_of, screaming
from stridelm.models.storage import Loading, storage_of, store
from stridelm.run.heads import TargetRuntime


class LoadableModule(ModelPart):
    """A module with a checkpoint of its own, whose row operations are replaced for serving."""

    ops: Ops

    def __init__(self) -> None:
        super().__init__()
        self.ops = PlainOps()


class DraftHead(LoadableModule):
    """Layers that read the target's hidden states (draft/head_drafter.py)."""

    spec: DecoderSpec
    """Describes its blocks."""
    taps: tuple[int, ...] = ()
    """Layers of the target whose inputs it `read`s, besides the final hidden states."""
    num_modules: int = 1
    """T modules; if there are several, each is applied once, in turn."""

    @property
    def layer_states(self) -> LayerStates:
        """One layer per module."""
        return self.spec.states()

    @property
    def taken_width(self) -> int:
        """W numbers of a row in what is `read`, side by side."""
        return self.spec.hidden_size

    def read(self, states: States) -> tuple[torch.Tensor, ...]:
        """The target's hidden states that are needed, of one width each: by default those after its final norm."""
        return (states.final,)

    def features(self, taken_NW: torch.Tensor) -> torch.Tensor:
        """[N, H] what the first module reads of what is `read` of some rows, side by side: by default just that."""
        return taken_NW

    def forward(
        self,
        module: int,
        ids_N: torch.Tensor,
        hidden_NH: torch.Tensor,
        positions_N: torch.Tensor,
        mix: Mix,
        wanted_M: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[N, H] what the next module, or the same one, reads; with `wanted_M`, [M, H] for these rows alone, for which
        `mix` returns values: the other rows only write their keys and values."""
        raise NotImplementedError

    def logits(self, hidden_MH: torch.Tensor, module: int = 0) -> torch.Tensor:
        """[M, V] over the target's vocabulary, from what this module returned."""
        raise NotImplementedError


L = TypeVar("L", bound=LoadableModule)


@dataclass(frozen=True)
class HeadSource:
    """Where a head's weights come from."""

    path: Path
    tensors: Callable[[torch.device], Iterator[tuple[str, torch.Tensor]]]
    """Yields them on a device; on the meta device, without their data."""
    ignorable: Callable[[str], bool] = lambda name: False
    """Which of them may be left out."""
    loading: Loading | None = None
    """What is done to quantised ones."""

    def fill(self, head: LoadableModule, device: torch.device) -> None:
        """Raises ValueError for tensors that are missing, unexpected or misshapen."""
        read = self.tensors(device)
        fill(head, read if self.loading is None else self.loading.stream(read), self.path, self.ignorable)


def check_head(head: LoadableModule, source: HeadSource | None, device: torch.device) -> None:
    """Raise ValueError if the weights do not fit a head on the meta device by their names and shapes, or if the device
    cannot multiply by their format. None: they are not read."""
    for form in formats_of(head):
        form.check(device)
    if source is not None:
        source.fill(head, torch.device("meta"))


def load_head(head: L, source: HeadSource | None, runtime: TargetRuntime) -> L:
    """Fill a head that was built on the meta device, and make it ready to serve. None: it is filled with small random
    numbers. Raises ValueError for what `check_head` refuses, and for weights that are not finite."""
    device = runtime.model.norm.device
    check_head(head, source, device)
    head = screaming(head, runtime.dtype, device)
    if source is not None:
        source.fill(head, device)
        check_finite(head, source.path)
    else:
        fill_randomly(head, lambda done: None)
    make_ready(head, deterministic=runtime.deterministic)
    head.ops = runtime.model.ops
    return head


def store_as_in(head: LoadableModule, source: Given, weighted: bool) -> Loading | None:
    """Give a head on the meta device the formats in which a directory stores it, and return what is done to its
    tensors on the way; None if nothing. weighted: whether its files count. Raises ValueError for quantised weights that
    are not supported."""
    storage = storage_of(source.config, source.path)
    return None if storage is None else store(head, storage, source.headers if weighted else None)


def check_finite(head: nn.Module, path: Path) -> None:
    """Raise ValueError naming the parameters that hold NaN or infinity."""
    wrong = [name for name, parameter in head.named_parameters() if not _is_finite(parameter)]
    if wrong:
        raise ValueError(
            f"the head in {path} has weights that are not finite: {', '.join(wrong[:8])}; copy it again; "
            "drafter='none' serves without it"
        )


def _is_finite(tensor: torch.Tensor) -> bool:
    return bool(torch.isfinite(tensor if tensor.itemsize > 1 else tensor.float()).all())
