"""Imports everything that is left of a package without one drafter or rule, completes a prompt with it, and prints the
output of each drafter as JSON.

Run as a process of its own: python -m support.checks.survivors PACKAGE CHECKPOINT DELETED OPTION...

PACKAGE: where Stride must be imported from. DELETED: the drafter or rule. OPTION: the options that only it had.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import sys
from pathlib import Path

import stridelm
from stridelm import LLM, SamplingParams
from stridelm.config import EngineConfig
from stridelm.draft import DRAFTERS
from stridelm.options import known, settings
from stridelm.verify import RULES


def main() -> None:
    package, checkpoint, deleted, *options = sys.argv[1:]
    assert Path(stridelm.__path__[0]) == Path(package), stridelm.__path__
    for module in pkgutil.walk_packages(stridelm.__path__, "stridelm."):
        importlib.import_module(module.name)
    for registry in (DRAFTERS, RULES):
        assert deleted not in registry, list(registry)
        for name in registry:
            registry.get(name)
    assert not set(options) & {*known(), *settings(EngineConfig)}
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    outputs = []
    for drafter in ("none", "auto"):
        llm = LLM(
            model=checkpoint, drafter=drafter, dtype="float32", skip_tokenizer_init=True, num_pages=64, strict=True
        )
        outputs.append(list(llm.generate([[5, 6, 7, 5, 6, 7, 5, 6]], params)[0].outputs[0].token_ids))
        llm.check()
    print(json.dumps(outputs))


if __name__ == "__main__":
    main()
