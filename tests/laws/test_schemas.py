"""What comes out under a schema or a regular expression satisfies it, by readers that share no code with the engine."""

from __future__ import annotations

import re
from pathlib import Path
from random import Random
from typing import Any

import pytest

from fuzz.regexes import random_regex
from fuzz.schemas import judge, random_schema
from stridelm import LLM, SamplingParams
from stridelm.draft import DRAFTERS

PARTS, REQUESTS = 8, 250
LONGEST = 48


@pytest.fixture(scope="module")
def llm(speaking: Path) -> LLM:
    return LLM(str(speaking), dtype="float32", max_num_seqs=32, num_pages=512, page_size=8)


@pytest.mark.parametrize("part", range(PARTS))
def test_outputs_satisfy_what_was_asked(llm: LLM, part: int) -> None:
    """Random weights at temperature 1, random schemas and expressions out of those that are accepted, every drafter
    that can run: no finished output is wrong, and most are finished."""
    draw = Random(part)
    able = [name for name in DRAFTERS if DRAFTERS.get(name).why_not(llm.engine.loaded.target) is None]
    asked: list[tuple[dict[str, Any], SamplingParams]] = []
    while len(asked) < REQUESTS:
        grammar = {"json": random_schema(draw)} if draw.random() < 0.6 else {"regex": random_regex(draw)}
        params = SamplingParams(
            max_tokens=LONGEST, seed=len(asked), structured_outputs=grammar, speculation={"drafter": draw.choice(able)}
        )
        try:
            llm.engine.grammars.compile(grammar)
        except ValueError:
            continue
        asked.append((grammar, params))
    prompts = [[draw.randrange(3, 290) for _ in range(draw.randint(1, 8))] for _ in asked]
    outputs = llm.generate(prompts, [params for _, params in asked])
    finished = 0
    for (grammar, _), output in zip(asked, outputs, strict=True):
        sample = output.outputs[0]
        assert sample.finish_reason in ("stop", "length"), (grammar, sample)
        if sample.finish_reason == "stop":
            finished += 1
            if "json" in grammar:
                assert judge(grammar["json"], sample.text) is None, (grammar, sample.text)
            else:
                assert re.fullmatch(grammar["regex"], sample.text), (grammar, sample.text)
    assert finished > REQUESTS / 2
