"""Run as a process of its own, since a process compiles nothing twice: starts an engine and prints as JSON how many
kernels were compiled ahead (null: none were looked for) and in all, how many tensors without memory are left, and some
tokens.

    python -m support.doubles.started CONFIG [--one-by-one]

CONFIG: fields of EngineConfig as JSON.
"""

from __future__ import annotations

import gc
import json
import sys

from torch._subclasses.fake_tensor import FakeTensor

from stridelm import SamplingParams
from stridelm.config import EngineConfig
from stridelm.engine import start
from stridelm.engine.engine import Engine
from stridelm.kernels import compilations

PROMPT = [5, 6, 7, 5, 6, 7, 5, 6]


def main() -> None:
    config = EngineConfig(**json.loads(sys.argv[1]))
    ahead: int | None = None
    compile_ahead = start.compile_ahead

    def counted(config: EngineConfig) -> None:
        nonlocal ahead
        compile_ahead(config)
        ahead = compilations.count()

    start.compile_ahead = counted
    engine = Engine(config) if "--one-by-one" in sys.argv else start.start(config)
    request = engine.add("a", PROMPT, SamplingParams(max_tokens=12, temperature=1.0, seed=1, ignore_eos=True))
    while engine.busy:
        engine.step()
    gc.collect()
    left = sum(isinstance(each, FakeTensor) for each in gc.get_objects())
    print(json.dumps({"ahead": ahead, "all": compilations.count(), "left": left, "tokens": request.output_ids}))


if __name__ == "__main__":
    main()
