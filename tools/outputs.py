"""An engine's outputs with every drafter and rule: recorded before a change and compared after it, bit for bit.

    python tools/outputs.py --save before.json
    python tools/outputs.py --against before.json

The built-in model completes four prompts with each drafter that can run, under each of its rules, greedy and sampled,
in float32 and bfloat16. On a GPU the deterministic mode is recorded. Outputs are specific to a machine: another
processor or card may round differently, so make both recordings on the same one. To record another checkout, put its
`src` into PYTHONPATH.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import stridelm
from stridelm import LLM, SamplingParams
from stridelm.draft import DRAFTERS
from stridelm.verify import RULES

PROMPTS = (
    "def fibonacci(n):\n",
    "class Stack:\n    def __init__(self):\n        self.items = []\n",
    "import os\n\n\ndef walk(path):\n",
    "numbers = [1, 2, 3, 1, 2, 3, 1, 2, 3, 1,",
)
WITH_NUMBER = {"synthetic": "synthetic:2.5", "synthetic-trust": "synthetic-trust:1.7"}
"""Rules that need a number -> how they are requested."""
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "seed": 3},
    "sampled": {"temperature": 1.0, "seed": 7},
    "edited": {"temperature": 0.8, "seed": 11, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.1, "top_k": 50},
}


def record(device: str, dtype: str, max_tokens: int, rules: Sequence[str]) -> Iterator[tuple[str, list[list[int]]]]:
    """Pairs of a configuration's name and the ids of each prompt's output."""
    options: dict[str, Any] = {"deterministic": True} if device == "cuda" else {}
    llm = LLM(device=device, dtype=dtype, max_model_len=512, max_num_seqs=8, **options)
    for name in DRAFTERS:
        drafter = DRAFTERS.get(name)
        why = drafter.why_not(llm.engine.intake.target)
        if why is not None:
            print(f"{name}: left out, {why}", file=sys.stderr)
            continue
        for rule in rules or RULES:
            if not RULES.get(rule).works_with(drafter.rules, drafter.branches):
                continue
            speculation = {"drafter": name, "acceptance": WITH_NUMBER.get(rule, rule)}
            for way, sampling in PARAMS.items():
                params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, speculation=speculation, **sampling)
                llm.engine.forget()
                try:
                    outputs = llm.generate(list(PROMPTS), params)
                except ValueError as error:  # a rule that has no effect on this drafter's drafts
                    print(f"{name} under {rule}: {error}", file=sys.stderr)
                    break
                yield f"{dtype} {name} {rule} {way}", [list(out.outputs[0].token_ids) for out in outputs]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rule", action="append", default=[], help="only this acceptance rule; may be repeated")
    parser.add_argument("--max-tokens", type=int, default=48)
    args = parser.parse_args()
    print(f"{stridelm.__file__}, torch {torch.__version__}", file=sys.stderr)
    found: dict[str, list[list[int]]] = {}
    for dtype in ("float32", "bfloat16"):
        found |= record(args.device, dtype, args.max_tokens, args.rule)
    if args.save is not None:
        args.save.write_text(json.dumps(found), encoding="utf-8")
    print(f"{len(found)} configurations recorded")
    if args.against is None:
        return 0
    before = json.loads(args.against.read_text(encoding="utf-8"))
    differ = [name for name in sorted({*found, *before}) if found.get(name) != before.get(name)]
    for name in differ:
        print(f"differs: {name}")
    print(f"{len(differ)} of {len(before)} differ")
    return 1 if differ else 0


if __name__ == "__main__":
    raise SystemExit(main())
