"""No request waits for the compiled loops that choose depths: an engine that is ready has read them all."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

PROGRAM = """
import sys
from numba.core.dispatcher import Dispatcher
from stridelm import LLM, SamplingParams
from stridelm.schedule import adaptive, rates

def loaded():
    modules = [module for name, module in sys.modules.items() if name.startswith("stridelm.schedule.")]
    loops = {id(loop): loop for module in modules for loop in vars(module).values() if isinstance(loop, Dispatcher)}
    return sum(len(loop.overloads) for loop in loops.values())

llm = LLM(sys.argv[1], skip_tokenizer_init=True, drafter="model", drafter_model=sys.argv[2], depth=2)
engine = llm.engine
before = loaded()
used = {**vars(adaptive), **vars(rates)}
loops = {name: loop for name, loop in used.items() if isinstance(loop, Dispatcher)}
assert len(loops) > 7 and all(loop.overloads for loop in loops.values()), loops
assert engine.adaptive is None and before > 10, before
asked = {"temperature": 0.0, "max_tokens": 400, "ignore_eos": True}
for drafter in ({"drafter": "model"}, {"drafter": "ngram", "prompt_lookup_min": 1}):
    asked["speculation"] = {**drafter, "depth": "auto"}
    for number, target in enumerate((None, 1e4, None)):
        engine.add(str(number), [1, 2, 3] * 9, SamplingParams(**asked, target_tps=target))
    engine.add("one that does not choose", [1, 2, 3], SamplingParams(max_tokens=5, speculation="off"))
    while engine.busy:
        engine.step()
    figures = engine.adaptive.figures
    assert figures.drafted and figures.seconds["predicted"], figures
    engine.adaptive.keep_costs()
assert loaded() == before, f"{loaded() - before} loops were loaded while requests waited"
"""


def test_none_is_loaded_late(checkpoint: Callable[..., Path]) -> None:
    """In a process of its own, since others may have loaded them. The first request that asks for depths to be chosen
    comes to an engine that was started without."""
    paths = [str(checkpoint("qwen3", tie_word_embeddings=tied)) for tied in (True, False)]
    done = subprocess.run([sys.executable, "-c", PROGRAM, *paths], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
