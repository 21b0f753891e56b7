"""Imported by every Python process that finds this folder first on its path: plants faults in the engine process. A
request with seed 666 raises when it emits, from its fifth token on; one with seed 667 whenever its rows are run."""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

TARGET = "stridelm.engine.engine"


class Planter(MetaPathFinder, Loader):
    """Loads the engine normally, and then wraps two of its methods."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != TARGET:
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


sys.meta_path.insert(0, Planter())
