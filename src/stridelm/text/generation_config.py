"""What a checkpoint's makers recommend for what a request leaves out: generation_config.json, read as vLLM reads it.

`auto` is the checkpoint's own file, `vllm` neutral defaults, and anything else a directory that holds one. Ends of
text, which the file names too, are the model's and no recommendation: text/tokenizer.py reads them whatever is chosen.
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
"""The file's name of a parameter -> SamplingParams'."""


@dataclass(frozen=True)
class GenerationDefaults:
    """values: by SamplingParams' names. most_tokens: what max_tokens is cut to, whoever asks for more. source: where
    they are from."""

    values: Mapping[str, Any] = field(default_factory=dict)
    most_tokens: int | None = None
    source: str = "vLLM's neutral defaults"

    def fill(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Parameters of a request, with what it leaves out. max_tokens None is left out, and stays so without a
        recommendation: the context is the limit then."""
        filled = {**self.values, **{name: value for name, value in given.items() if name != "max_tokens"}}
        if "max_tokens" in given:
            asked = given["max_tokens"]
            filled["max_tokens"] = self.values.get("max_tokens") if asked is None else asked
        if self.most_tokens is not None:
            wanted = filled.get("max_tokens")
            filled["max_tokens"] = self.most_tokens if wanted is None else min(wanted, self.most_tokens)
        return filled

    def tell(self) -> None:
        """One line, if there is anything to say: what a request gets that says nothing."""
        if self.values:
            named = ", ".join(f"{name} {value}" for name, value in self.values.items())
            cut = "" if self.most_tokens is None else f", and no request gets more than {self.most_tokens} tokens"
            logger.warning(
                "parameters that a request leaves out: %s (%s)%s; generation_config vllm leaves them neutral",
                named,
                self.source,
                cut,
            )


def read_generation_config(which: str, model: Path) -> GenerationDefaults:
    """The defaults that `which` names, for the checkpoint at `model`.

    With a directory of one's own max_new_tokens is a limit of the server's as well, which no request may exceed; a
    checkpoint's own is a default, that one may. Raises ValueError for a file that cannot be read, values out of range,
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
        raise ValueError(f"{path}: {error}; mend the file, or start with generation_config vllm") from error
    values = {name: getattr(settled, name) for name in values}
    most = values.get("max_tokens") if which != "auto" else None
    return GenerationDefaults(values, most, str(path))
