"""The model of a checkpoint through transformers, in float64, and its verdict on an output.

It shares no code with the engine: weights are read by transformers, parameters follow fuzz.definitions, ends and text
fuzz.endings. An exact request is checked teacher-forced: one forward pass over prompt and output gives every row that a
token was drawn from, and each token must be the best in its row.

Legend: T tokens, V vocabulary, H hidden width.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM, logging

from fuzz.definitions import Params, Row, drawn, drawn_scores, may_be, row_of
from fuzz.eight_bits import in_eight_bits
from fuzz.endings import Alphabet, Ending, ending
from fuzz.grammars import allowed

logging.set_verbosity_error()
logging.disable_progress_bar()
MARGINS = {"float64": 2e-5, "float32": 1e-4, "float32 on a GPU": 1e-3}
"""Maximum deviation of the engine's logits from the oracle's, relative to the largest. transformers does not compute
everything in float64 (norms, softmax and rotations are in float32)."""


class Oracle:
    """The reference for one checkpoint directory, with weights or KV in eight bits by the engine's options."""

    def __init__(self, path: Path, eight_bits: frozenset[str] = frozenset()) -> None:
        self.path = path
        self.config: dict[str, Any] = json.loads((path / "config.json").read_text())
        options: dict[str, Any] = {"dtype": torch.float64, "attn_implementation": "eager"}
        options["experts_implementation"] = "eager"  # the only one in float64
        if self.config["model_type"] == "mimo":  # not in transformers; without its extra modules it is a qwen2
            fields = {name: value for name, value in self.config.items() if name != "model_type"}
            model = Qwen2ForCausalLM.from_pretrained(path, config=Qwen2Config(**fields), **options)
        else:
            model = AutoModelForCausalLM.from_pretrained(path, **options)
        self._model = (in_eight_bits(model, eight_bits) if eight_bits else model).eval()
        self._heard = lru_cache(maxsize=512)(self._listen)

    @cached_property
    def alphabet(self) -> Alphabet | None:
        return Alphabet(self.path) if (self.path / "tokenizer.json").is_file() else None

    @cached_property
    def eos_ids(self) -> tuple[int, ...]:
        ids = self.config.get("eos_token_id")
        return () if ids is None else tuple(ids) if isinstance(ids, list) else (ids,)

    @torch.inference_mode()
    def _listen(self, ids: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        """([T, V] logits, [T, H] states after the final norm)."""
        states = self._model.model(torch.tensor([ids]), use_cache=False).last_hidden_state
        return self._scores(states)[0].numpy(), states[0].numpy()

    def _scores(self, states: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._model.lm_head(states)
        cap = self.config.get("final_logit_softcapping")
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        return self._heard(tuple(ids))[0]

    def states(self, ids: Sequence[int]) -> np.ndarray:
        return self._heard(tuple(ids))[1]

    @torch.inference_mode()
    def last_logits(self, texts: Sequence[Sequence[int]]) -> np.ndarray:
        """[N, V] after each of several texts, which may differ in length; padding follows all real tokens."""
        longest = max(map(len, texts))
        ids = torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts])
        states = self._model.model(ids, use_cache=False).last_hidden_state
        last = torch.tensor([len(text) - 1 for text in texts])
        return self._scores(states[torch.arange(len(texts)), last]).numpy()

    def settled(self, params: Params) -> dict[str, Any]:
        """The parameters with bad words as ids: each word as it is and after a space."""
        forbidden = [list(ids) for ids in params.get("bad_words_token_ids") or ()]
        for word in params.get("bad_words") or ():
            assert self.alphabet is not None
            forbidden += [ids for space in ("", " ") if (ids := self.alphabet.encode(space + word.lstrip()))]
        return {**params, "bad_words_token_ids": forbidden}

    def row(self, logits: np.ndarray, prompt: Sequence[int], output: Sequence[int], params: Params, dtype: str) -> Row:
        """The row for these logits after prompt and output. params: settled."""
        own = () if self.alphabet is None or self.alphabet.eos_id is None else (self.alphabet.eos_id,)
        held_back = {*own, *self.eos_ids, *(params.get("stop_token_ids") or ())}
        margin = MARGINS[dtype] * max(1.0, float(np.abs(logits).max()))
        if params.get("structured_outputs"):
            assert self.alphabet is not None
            mask = allowed(params["structured_outputs"], self.alphabet, output, len(logits))
            logits = np.where(mask, logits, -np.inf)
        return row_of(logits, prompt, output, params, sorted(held_back), margin)

    def draw(
        self,
        logits: np.ndarray,
        prompt: Sequence[int],
        output: Sequence[int],
        params: Params,
        sample: int,
        dtype: str,
    ) -> int | None:
        """The token after prompt and output; None if too close to call."""
        row = self.row(logits, prompt, output, params, dtype)
        return drawn(row, drawn_scores(row, params, sample, len(prompt) + len(output)))

    def misdrawn(
        self, prompt: Sequence[int], output: Sequence[int], params: Params, sample: int, dtype: str
    ) -> str | None:
        """A message on the first token that plain decoding cannot have drawn; None if there is none."""
        params = self.settled(params)
        logits = self.logits([*prompt, *output])
        for index, token in enumerate(output):
            row = self.row(logits[len(prompt) + index - 1], prompt, output[:index], params, dtype)
            scores = drawn_scores(row, params, sample, len(prompt) + index)
            if not may_be(row, scores, token):
                best = int(scores.argmax())
                return f"token {index} is {token}, scored {scores[token]:.6g}; {best} has {scores[best]:.6g}"
        return None

    def ending(self, prompt: Sequence[int], output: Sequence[int], params: Params, context: int, text: bool) -> Ending:
        return ending(prompt, output, params, self.eos_ids, context, self.alphabet if text else None)

    def mislogged(
        self, ids: Sequence[int], first: int, entries: Sequence[Mapping[int, Any]], top: int, params: Params, dtype: str
    ) -> str | None:
        """A message on the first wrong log-probability. entries: of the tokens from position `first` on."""
        logits = self.logits(ids)
        for index, entry in enumerate(entries):
            x, token = logits[first + index - 1], ids[first + index]
            margin = 4 * MARGINS[dtype] * max(1.0, float(np.abs(x).max()))
            logs = x - x.max() - np.log(np.exp(x - x.max()).sum())
            order = np.sort(logs)[::-1]
            fault = _entry_fault(entry, token, logs, order, min(top, len(x)), params, margin)
            if fault is not None:
                return f"log-probabilities of position {first + index}: {fault}"
        return None


def _entry_fault(
    entry: Mapping[int, Any],
    token: int,
    logs: np.ndarray,
    order: np.ndarray,
    top: int,
    params: Params,
    margin: float,
) -> str | None:
    chosen = params.get("logprob_token_ids") or ()
    if next(iter(entry)) != token:
        return f"the first entry is {next(iter(entry))}, not {token}"
    if missing := [t for t in chosen if t not in entry]:
        return f"{missing} were requested but are missing"
    if len(entry) < top or len(entry) > 1 + top + len(chosen):
        return f"there are {len(entry)}"
    for shown, value in entry.items():
        if abs(value.logprob - logs[shown]) > margin:
            return f"{shown} has {value.logprob}, should have {logs[shown]}"
        low, high = 1 + int((order > logs[shown] + margin).sum()), int((order >= logs[shown] - margin).sum())
        if value.rank is None:
            if shown not in chosen or (low <= top and high <= top):
                return f"{shown} has no rank"
        elif not low <= value.rank <= high:
            return f"{shown} has rank {value.rank}, should have {low} to {high}"
    return None


@lru_cache(maxsize=64)
def oracle_of(path: Path, eight_bits: frozenset[str] = frozenset()) -> Oracle:
    """The oracle of a directory, loaded once."""
    return Oracle(path, eight_bits)
