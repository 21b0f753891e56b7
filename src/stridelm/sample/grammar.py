"""Grammars: which tokens may stand at a row, given what stands before it (xgrammar, arXiv 2411.15100).

A Guide is one request's grammar and a matcher that has read the request's output. Like every history it belongs to the
row: for a draft row the matcher reads on along the row's path, says what may follow, and is taken back by as much. So
a rejected draft leaves nothing behind, and rows of a tree, of a window and of plain decoding are masked alike.
"""

from __future__ import annotations

import json
import random
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from stridelm.params import StructuredOutputs
from stridelm.text.tokenizer import Tokenizer
from stridelm.types import Request

CACHE_BYTES = 256 << 20
"""Memory that compiled grammars may keep, so that those asked for again need not be compiled: half of it is
xgrammar's, for their parts, and half of it ours, for whole ones."""
MAX_SPACE = 16
"""Most white space between two parts of JSON: a model that is unsure may go on with it for ever."""
FREE_S, DEBT_S = 0.02, 1.0
"""Everybody else waits while a mask is made. Usual are 50 microseconds; what a request's masks take beyond the first of
these adds up, and ends it at the second."""
TRIED, SLOW_TRIAL_S = 48, 0.25
"""Tokens that a trial goes on for, and how long each may take."""
NOTHING_LEFT = "the grammar and the other parameters left no token"
TOO_SLOW = "the grammar takes too long to follow; make it simpler"
WORD = 32
"""Tokens in a word of a mask."""


class Grammars:
    """Compiles what requests ask for."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]) -> None:
        """eos_ids: tokens that end a text; where a grammar is complete, they alone may follow.

        Raises ValueError if xgrammar is not installed or cannot read the tokenizer.
        """
        try:
            import xgrammar
        except ImportError as error:
            raise ValueError("structured outputs need xgrammar: pip install xgrammar") from error
        self._xgrammar: Any = xgrammar
        self._eos_ids = [token for token in eos_ids if 0 <= token < vocab_size]
        try:
            info = xgrammar.TokenizerInfo.from_huggingface(
                tokenizer.hf, vocab_size=vocab_size, stop_token_ids=self._eos_ids or None
            )
        except (ValueError, RuntimeError) as error:
            raise ValueError(f"structured outputs are not to be had with this tokenizer: {error}") from error
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_limit_bytes=CACHE_BYTES // 2)
        self._words = -(-vocab_size // WORD)
        self._remembered = Remembered(CACHE_BYTES // 2)

    def compile(self, given: StructuredOutputs | Mapping[str, Any]) -> Any:
        """Raises ValueError for what is no grammar, or one that nothing matches. Called from several threads."""
        asked = StructuredOutputs.of(given)
        compiled = self._remembered.get(asked)
        if compiled is None:
            compiled = self._compile(asked)
            self._remembered.put(asked, compiled)
        return compiled

    def guide(self, request: Request) -> Guide:
        """For one admission of a request."""
        assert request.params.structured_outputs is not None
        return Guide(self._matcher(self.compile(request.params.structured_outputs)), request, self._words)

    def try_out(self, asked: StructuredOutputs) -> None:
        """Compile it and follow it for a while, wherever chance leads. Raises ValueError too if that is slow, which
        compiling it may not have been: what may follow is ambiguous in too many ways."""
        matcher, draw = self._matcher(self.compile(asked)), random.Random(0)
        mask = torch.full((1, self._words), -1, dtype=torch.int32)
        for _ in range(TRIED):
            began = time.perf_counter()
            matcher.fill_next_token_bitmask(mask)
            if time.perf_counter() - began > SLOW_TRIAL_S:
                raise ValueError(f"structured_outputs: {TOO_SLOW}")
            may = torch.nonzero(allowed(mask, self._words * WORD)[0]).flatten().tolist()
            if not may or not matcher.accept_token(draw.choice(may)) or matcher.is_terminated():
                return

    def _matcher(self, compiled: Any) -> Any:
        return self._xgrammar.GrammarMatcher(
            compiled, override_stop_tokens=self._eos_ids or None, terminate_without_stop_token=not self._eos_ids
        )

    def _compile(self, asked: StructuredOutputs) -> Any:
        try:
            compiled = self._compiled(asked)
        except (RuntimeError, ValueError) as error:  # xgrammar's own errors are both
            raise ValueError(f"structured_outputs: the {asked.kind} cannot be followed: {_reason(error)}") from error
        mask = torch.zeros(1, self._words, dtype=torch.int32)
        if self._matcher(compiled).fill_next_token_bitmask(mask) and not mask.any():
            raise ValueError(f"structured_outputs: nothing can match the {asked.kind}; allow something")
        return compiled

    def _compiled(self, asked: StructuredOutputs) -> Any:
        if asked.json is not None:
            assert isinstance(asked.json, str)
            return self._compiler.compile_json_schema(asked.json, max_whitespace_cnt=MAX_SPACE)
        if asked.json_object:
            return self._compiler.compile_json_schema(
                '{"type": "object"}', strict_mode=False, max_whitespace_cnt=MAX_SPACE
            )
        if asked.regex is not None:
            return self._compiler.compile_regex(asked.regex)
        if asked.choice is not None:
            words = " | ".join(json.dumps(word) for word in asked.choice)
            return self._compiler.compile_grammar(f"root ::= {words}")
        if asked.structural_tag is not None:
            assert isinstance(asked.structural_tag, str)
            return self._compiler.compile_structural_tag(_mapping(asked.structural_tag))
        assert asked.grammar is not None
        return self._compiler.compile_grammar(asked.grammar)


class Remembered:
    """Compiled grammars, those asked for last, up to so many bytes: one may have two hundred or two hundred million."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._found: OrderedDict[StructuredOutputs, Any] = OrderedDict()
        self.bytes = 0

    def get(self, asked: StructuredOutputs) -> Any | None:
        with self._lock:
            if asked in self._found:
                self._found.move_to_end(asked)
            return self._found.get(asked)

    def put(self, asked: StructuredOutputs, compiled: Any) -> None:
        """Forget the oldest as far as is needed; one that is too large for all of the room is not kept."""
        size = compiled.memory_size_bytes
        with self._lock:
            if asked in self._found or size > self._most_bytes:
                return
            self._found[asked] = compiled
            self.bytes += size
            while self.bytes > self._most_bytes:
                self.bytes -= self._found.popitem(last=False)[1].memory_size_bytes


class Guide:
    """A request's grammar, as far as its output goes."""

    def __init__(self, matcher: Any, request: Request, words: int) -> None:
        self._matcher = matcher
        self._request = request
        self._words = words
        self._read = 0
        """Tokens of output that the matcher has read."""
        self._debt = 0.0
        """Seconds that masks have taken beyond what is free."""
        self.broken: str | None = None
        """Why the output can no longer be the grammar's. The matcher is not touched any more: it may still be at work
        on a thread that was left behind."""

    @property
    def request(self) -> Request:
        """Whose it is."""
        return self._request

    def catch_up(self) -> None:
        """Read what the output has gained."""
        output = self._request.output_ids
        while self._read < len(output) and self.broken is None and not self.ended:
            if self._matcher.accept_token(output[self._read]):
                self._read += 1
            else:
                self.broken = NOTHING_LEFT

    @property
    def ended(self) -> bool:
        """Nothing may follow any more."""
        return self.broken is None and bool(self._matcher.is_terminated())

    @property
    def read(self) -> int:
        """Tokens of the request, prompt and output, behind which the matcher stands."""
        return len(self._request.prompt_ids) + self._read

    def mask(self, path: Sequence[int]) -> torch.Tensor | None:
        """[ceil(V / 32)] int32 on the host, a bit a token, lowest first: what may stand behind the output and `path`.
        None where anything may, or where such a path cannot come about."""
        if self.broken is not None:
            return None
        taken, began = 0, time.perf_counter()
        for token in path:
            if self.ended or not self._matcher.accept_token(token):
                break
            taken += 1
        found = torch.empty(1, self._words, dtype=torch.int32)
        masked = False
        if taken == len(path) and not self.ended:
            masked = self._matcher.fill_next_token_bitmask(found)
        if taken:
            self._matcher.rollback(taken)
        self._debt += max(0.0, time.perf_counter() - began - FREE_S)
        if self._debt > DEBT_S:
            self.broken = TOO_SLOW
        return found[0] if masked else None


def _mapping(text: str) -> dict[str, Any]:
    """Read here, because xgrammar's error would repeat the text."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ValueError("it is no JSON object")
    return value


def _reason(error: Exception) -> str:
    """xgrammar's message, without the time, its source's file, the condition there and what it was given."""
    noise = r"^\[[\d:]+\] \S+: |Check failed: \(.*?\) is false: |The JSON string is.*"
    text = re.sub(noise, "", str(error).strip(), flags=re.DOTALL)
    return text.strip()[:200] or type(error).__name__


def allowed(masks_GW: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """[G, V] bool of masks [G, ceil(V / 32)] int32, wherever these are."""
    bits = torch.arange(WORD, dtype=torch.int32, device=masks_GW.device)
    return ((masks_GW[:, :, None] >> bits) & 1).view(len(masks_GW), -1)[:, :vocab_size].bool()
