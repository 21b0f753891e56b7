"""A checkpoint's recommended defaults for parameters that a request omits: generation_config.json, read as in vLLM.

`auto` is the checkpoint's own file, `vllm` neutral defaults, and anything else a directory that holds such a file. The
end-of-text ids in the file are part of the model, not a recommendation: text/tokenizer.py reads them in every case.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stridelm.params import SamplingParams
from stridelm.text.tokenizer import read_json

logger = logging.getLogger(__name__)

FILE = "generation_config.json"
HEEDED = {
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")},
    "max_new_tokens": "max_tokens",
}
"""Parameter name in the file -> name in SamplingParams."""


@dataclass(frozen=True)
class GenerationDefaults:
    """values: by SamplingParams' names. most_tokens: upper limit on max_tokens for every request. source: where the
    values come from."""

    values: Mapping[str, Any] = field(default_factory=dict)
    most_tokens: int | None = None
    source: str = "vLLM's neutral defaults"

    def fill(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Parameters of a request, completed with the defaults. max_tokens None counts as omitted, and stays None
        without a recommendation: the context is the limit then."""
        filled = {**self.values, **{name: value for name, value in given.items() if name != "max_tokens"}}
        if "max_tokens" in given:
            max_tokens = given["max_tokens"]
            filled["max_tokens"] = self.values.get("max_tokens") if max_tokens is None else max_tokens
        if self.most_tokens is not None:
            max_tokens = filled.get("max_tokens")
            filled["max_tokens"] = self.most_tokens if max_tokens is None else min(max_tokens, self.most_tokens)
        return filled

    def tell(self) -> None:
        """Log the defaults in one line, if there are any."""
        if self.values:
            named = ", ".join(f"{name} {value}" for name, value in self.values.items())
            cut = "" if self.most_tokens is None else f", and no request gets more than {self.most_tokens} tokens"
            logger.warning(
                "defaults for parameters that a request omits: %s (%s)%s; for neutral ones set generation_config vllm",
                named,
                self.source,
                cut,
            )


def read_generation_config(which: str, model: Path) -> GenerationDefaults:
    """The defaults that `which` names, for the checkpoint at `model`.

    If a directory is given, its max_new_tokens is also a limit that no request may exceed; in the checkpoint's own file
    it is only a default. Raises ValueError for a file that cannot be read, values out of range,
    or a directory without the file.
    """
    if which == "vllm":
        return GenerationDefaults()
    path = (model if which == "auto" else Path(which)) / FILE
    if which != "auto" and not path.is_file():
        raise ValueError(
            f"generation_config {which}: there is no {FILE}; name a directory that holds one, auto or vllm"
        )
    content = read_json(path)
    values = {ours: content[name] for name, ours in HEEDED.items() if content.get(name) is not None}
    try:
        settled = SamplingParams(**values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}; correct the file, or start with generation_config vllm") from error
    values = {name: getattr(settled, name) for name in values}
    limit = values.get("max_tokens") if which != "auto" else None
    return GenerationDefaults(values, limit, str(path))
