"""Random outputs under a random schema, regular expression or grammar, judged by readers that share no code with the
engine: `jsonschema`, `re`, and a recogniser that applies rules by definition.

The matcher alone plays, over a vocabulary of the 256 bytes: thousands of outputs take the time of one case.
"""

from __future__ import annotations

import re
from random import Random
from typing import Any

from fuzz.found import Found
from fuzz.regexes import random_grammar, random_regex
from fuzz.schemas import judge, random_schema
from stridelm.grammar.ebnf import ROOT, read_ebnf
from support.checks.grammar_bytes import matcher, random_output
from support.oracles.recognise import matches

OUTPUTS = 4
LONGEST = 12
"""Characters of an output that the recogniser reads."""


def check_outputs(seed: int) -> int:
    """Returns how many outputs were judged; none if the grammar was refused. Raises Found."""
    draw = Random(seed)
    kind = draw.choice(("json", "json", "regex", "grammar"))
    asked: Any = {"json": random_schema, "regex": random_regex, "grammar": random_grammar}[kind](draw)
    try:
        start = matcher({kind: asked})
    except ValueError:
        return 0
    judged = 0
    for _ in range(OUTPUTS):
        output = random_output(start, draw)
        if output is not None and (why := _wrong(kind, asked, output.decode())):
            raise Found(f"outputs {kind}", f"seed {seed}: {asked!r} has {output!r}: {why}")
        judged += output is not None
    return judged


def _wrong(kind: str, asked: Any, text: str) -> str | None:
    if kind == "json":
        return judge(asked, text)
    if kind == "regex":
        return None if re.fullmatch(asked, text) else "re does not match it"
    rules = read_ebnf(asked)
    return None if len(text) > LONGEST or matches(rules[ROOT], text, rules) else "the rules do not match it"
