"""Grammars, the outputs that they allow, and checks shared by the CPU's tests and the GPU's."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any

from stridelm import SamplingParams
from stridelm.draft import DRAFTERS
from stridelm.verify import RULES
from support.checks.identity import check_identity, tree_speculations
from support.doubles.stand import Job, Stand, accepted, all_speculations, speculation

SCHEMA = {
    "type": "object",
    "properties": {"id": {"type": "integer"}, "tags": {"type": "array", "items": {"enum": ["a", "bb"]}, "maxItems": 2}},
    "required": ["id", "tags"],
}
TAG = {
    "type": "structural_tag",
    "format": {
        "type": "tag",
        "begin": "<n>",
        "content": {"type": "json_schema", "json_schema": {"type": "integer"}},
        "end": "</n>",
    },
}
Check = Callable[[str], bool]


def is_item(text: str) -> bool:
    value = json.loads(text)
    return set(value) == {"id", "tags"} and isinstance(value["id"], int) and set(value["tags"]) <= {"a", "bb"}


def balanced(text: str) -> bool:
    half = len(text) // 2
    return text == "(" * half + "x" + ")" * half


def is_tagged(text: str) -> bool:
    begin, value, end = text[:3], text[3:-4], text[-4:]
    return (begin, end) == ("<n>", "</n>") and isinstance(json.loads(value), int)


GRAMMARS: dict[str, tuple[dict[str, Any], Check]] = {
    "json": ({"json": SCHEMA}, is_item),
    "json_object": ({"json_object": True}, lambda text: isinstance(json.loads(text), dict)),
    "regex": ({"regex": "[0-9]{2,6}-(ab|abc|b)+"}, lambda text: bool(re.fullmatch("[0-9]{2,6}-(ab|abc|b)+", text))),
    "choice": ({"choice": ["yes", "yesterday", "né"]}, lambda text: text in ("yes", "yesterday", "né")),
    "grammar": ({"grammar": 'root ::= "(" root ")" | "x"'}, balanced),
    "structural_tag": ({"structural_tag": TAG}, is_tagged),
}
MORE: dict[str, dict[str, Any]] = {
    "nothing": {},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.4},
    "truncation": {"top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "logprobs": {"logprobs": 2, "logit_bias": {5: 2.0}},
}
LONGEST = 28


def jobs_of(name: str, temperature: float, kinds: list[dict[str, Any]]) -> list[Job]:
    """One job for each speculation; prompts and other parameters alternate."""
    draw = random.Random(f"{name} {temperature}")
    jobs = []
    for i, kind in enumerate(kinds):
        prompt = [draw.randrange(3, 290) for _ in range(draw.randint(2, 20))]
        more = MORE[sorted(MORE)[i % len(MORE)]]
        params = SamplingParams(
            temperature=temperature, seed=i, max_tokens=LONGEST, structured_outputs=GRAMMARS[name][0], **more
        )
        jobs.append(Job(prompt, params, kind))
    return jobs


def check_grammar(stand: Stand, name: str, temperature: float) -> None:
    """Every drafter at every depth, chains and trees, half of them at each temperature, in one batch with requests that
    have no grammar: the output is plain decoding's, and a finished output is accepted by the grammar."""
    kinds = [*all_speculations(stand), *tree_speculations()][int(temperature) :: 2]
    # A choice is over after a few tokens: more of them are made, so that some of their drafts are accepted.
    jobs = jobs_of(name, temperature, 2 * kinds if name == "choice" else kinds)
    free = [Job(job.prompt, SamplingParams(temperature=temperature, seed=9, max_tokens=12)) for job in jobs[:3]]
    outputs = check_identity(stand, [*jobs, *free], max_num_batched_tokens=64)
    ended = [out.outputs[0].text for out in outputs[: len(jobs)] if out.outputs[0].finish_reason == "stop"]
    assert all(GRAMMARS[name][1](text) for text in ended)
    assert len(ended) > len(jobs) // 3 or name.startswith("json")
    assert accepted(outputs[: len(jobs)]) > 0


def check_rule(stand: Stand, name: str, rule: str) -> None:
    """With every drafter that the rule can decide: finished outputs are accepted by the grammar."""
    able = [DRAFTERS.get(drafter) for drafter in DRAFTERS]
    able = [kind for kind in able if kind.why_not(stand.target) is None]
    fit = [kind for kind in able if RULES.get(rule).works_with(kind.rules, kind.branches)]
    outputs = stand.run(jobs_of(name, 1.0, [speculation(stand, kind.name, rule=rule) for kind in fit]))
    ended = [out.outputs[0].text for out in outputs if out.outputs[0].finish_reason == "stop"]
    assert {out.outputs[0].finish_reason for out in outputs} <= {"stop", "length"}
    assert all(GRAMMARS[name][1](text) for text in ended) and (ended or name == "json")
