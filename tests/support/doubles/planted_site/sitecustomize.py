"""Imported by every Python process that finds this folder first on its path: plants faults. A request with seed 666
raises when it emits, from its fifth token on; one with seed 667 whenever its rows are run; one with seed 668 when its
fifth token, or a later one, becomes text."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any


class Planter(MetaPathFinder, Loader):
    """Loads a module normally, and then calls `plant`."""

    def __init__(self, target: str, plant: Callable[[], None]) -> None:
        self.target, self.plant = target, plant

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != self.target:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        assert spec is not None and spec.loader is not None
        self.loader = spec.loader
        spec.loader = self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        self.plant()


def in_engine() -> None:
    from stridelm.engine.emit import Emitter
    from stridelm.run.eager import EagerRunner

    end_at, forward = Emitter._end_at, EagerRunner.forward

    def planted_end(self: Emitter, request: Any, *rest: Any) -> Any:
        if request.params.seed == 666 and len(request.output_ids) >= 5:
            raise LookupError("planted")
        return end_at(self, request, *rest)

    def planted_forward(self: EagerRunner, batch: Any) -> Any:
        if any(span.request.params.seed == 667 for span in batch.spans):
            raise LookupError("planted")
        return forward(self, batch)

    Emitter._end_at, EagerRunner.forward = planted_end, planted_forward  # type: ignore[assignment, method-assign]


def in_text() -> None:
    from stridelm.server.sample_text import SampleText

    read = SampleText.read

    def planted_read(self: SampleText, delta: Any) -> Any:
        if self.params.seed == 668 and self.end is None and self._output.tokens + len(delta.token_ids) >= 5:
            raise LookupError("planted")
        return read(self, delta)

    SampleText.read = planted_read  # type: ignore[method-assign]


sys.meta_path[:0] = [
    Planter("stridelm.engine.engine", in_engine),
    Planter("stridelm.server.sample_text", in_text),
]
