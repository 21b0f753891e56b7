"""instructor: each mode, whole and in parts. Prints what each read, as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import instructor
import openai

from clients.asked import QUESTION, SAMPLING, Place

client = openai.OpenAI(base_url=sys.argv[1], api_key="none", max_retries=0)
asked: dict[str, Any] = {
    "model": "built-in", "messages": [{"role": "user", "content": QUESTION}], "max_retries": 0, **SAMPLING
}  # fmt: skip
found: dict[str, Any] = {}
for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
    patched = instructor.from_openai(client, mode=mode)
    found[mode.name] = patched.chat.completions.create(response_model=Place, **asked).model_dump()
    *_, last = patched.chat.completions.create_partial(response_model=Place, **asked)
    found[f"{mode.name} partial"] = last.model_dump()
print(json.dumps(found))
