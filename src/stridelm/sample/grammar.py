"""Grammars: which tokens are allowed at a row, given the tokens before it (xgrammar, arXiv 2411.15100).

A Guide is one request's grammar and a matcher that has read the request's output. Like every history, the matcher's
state belongs to the row: for a draft row it reads on along the row's path, fills the mask, and is rolled back by as
many tokens. So a rejected draft leaves nothing behind, and rows of a tree, of a window and of plain decoding are masked
alike.
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

import numpy as np
import torch

from stridelm.params import StructuredOutputs
from stridelm.text.tokenizer import Tokenizer
from stridelm.types import Request

CACHE_BYTES = 256 << 20
"""Memory for caching compiled grammars: half of it is xgrammar's cache, for parts of grammars, and half of it is
`Remembered`, for whole ones."""
MAX_SPACE = 16
"""Most white space between two parts of JSON: without a limit, an unsure model may emit it endlessly."""
FREE_S, DEBT_S = 0.02, 1.0
"""The whole step waits while a mask is made, usually for 50 microseconds. The time that each of a request's masks takes
beyond FREE_S adds up; at DEBT_S the request is ended."""
TRIED, SLOW_TRIAL_S = 48, 0.25
"""Tokens that a trial generates, and how long the mask of each may take."""
NOTHING_LEFT = "the grammar and the other parameters left no token"
TOO_SLOW = "the grammar takes too long to follow; make it simpler"
WORD = 32
"""Tokens per word of a mask."""


class Grammars:
    """Compiles the grammars of requests."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]) -> None:
        """eos_ids: tokens that end a text; once a grammar is complete, only they are allowed.

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
            raise ValueError(f"structured outputs are not available with this tokenizer: {error}") from error
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_limit_bytes=CACHE_BYTES // 2)
        self._words = -(-vocab_size // WORD)
        self._compiled = Remembered(CACHE_BYTES // 2)

    def compile(self, given: StructuredOutputs | Mapping[str, Any]) -> Any:
        """Raises ValueError for an invalid grammar, or one that nothing matches. Called from several threads."""
        spec = StructuredOutputs.of(given)
        compiled = self._compiled.get(spec)
        if compiled is None:
            compiled = self._compile(spec)
            self._compiled.put(spec, compiled)
        return compiled

    def guide(self, request: Request) -> Guide:
        """A new Guide, for one admission of a request."""
        assert request.params.structured_outputs is not None
        return Guide(self._matcher(self.compile(request.params.structured_outputs)), request, self._words)

    def try_out(self, asked: StructuredOutputs) -> None:
        """Compile a grammar and generate some random tokens by it. Raises ValueError also if that is slow, even if
        compiling was not: the grammar may be too ambiguous to follow."""
        matcher, draw = self._matcher(self.compile(asked)), random.Random(0)
        mask = torch.full((1, self._words), -1, dtype=torch.int32)
        for _ in range(TRIED):
            began = time.perf_counter()
            matcher.fill_next_token_bitmask(mask)
            if time.perf_counter() - began > SLOW_TRIAL_S:
                raise ValueError(f"structured_outputs: {TOO_SLOW}")
            tokens = np.flatnonzero(np.unpackbits(mask.numpy().view(np.uint8), bitorder="little"))
            if not len(tokens) or not matcher.accept_token(int(draw.choice(tokens))) or matcher.is_terminated():
                return

    def _matcher(self, compiled: Any) -> Any:
        return self._xgrammar.GrammarMatcher(
            compiled, override_stop_tokens=self._eos_ids or None, terminate_without_stop_token=not self._eos_ids
        )

    def _compile(self, spec: StructuredOutputs) -> Any:
        try:
            compiled = self._compile_kind(spec)
        except (RuntimeError, ValueError) as error:  # xgrammar raises both
            raise ValueError(f"structured_outputs: the {spec.kind} cannot be followed: {_reason(error)}") from error
        mask = torch.zeros(1, self._words, dtype=torch.int32)
        if self._matcher(compiled).fill_next_token_bitmask(mask) and not mask.any():
            raise ValueError(f"structured_outputs: nothing can match the {spec.kind}; allow something")
        return compiled

    def _compile_kind(self, spec: StructuredOutputs) -> Any:
        if spec.json is not None:
            assert isinstance(spec.json, str)
            return self._compiler.compile_json_schema(spec.json, max_whitespace_cnt=MAX_SPACE)
        if spec.json_object:
            return self._compiler.compile_json_schema(
                '{"type": "object"}', strict_mode=False, max_whitespace_cnt=MAX_SPACE
            )
        if spec.regex is not None:
            return self._compiler.compile_regex(spec.regex)
        if spec.choice is not None:
            words = " | ".join(json.dumps(word) for word in spec.choice)
            return self._compiler.compile_grammar(f"root ::= {words}")
        if spec.structural_tag is not None:
            assert isinstance(spec.structural_tag, str)
            return self._compiler.compile_structural_tag(_mapping(spec.structural_tag))
        assert spec.grammar is not None
        return self._compiler.compile_grammar(spec.grammar)


class Remembered:
    """An LRU cache of compiled grammars, limited in bytes: one may have two hundred or two hundred million."""

    def __init__(self, most_bytes: int) -> None:
        self._max_bytes = most_bytes
        self._lock = threading.Lock()
        self._entries: OrderedDict[StructuredOutputs, Any] = OrderedDict()
        self.bytes = 0

    def get(self, asked: StructuredOutputs) -> Any | None:
        with self._lock:
            if asked in self._entries:
                self._entries.move_to_end(asked)
            return self._entries.get(asked)

    def put(self, asked: StructuredOutputs, compiled: Any) -> None:
        """Evict the least recently used as needed; a grammar larger than the whole cache is not stored."""
        size = compiled.memory_size_bytes
        with self._lock:
            if asked in self._entries or size > self._max_bytes:
                return
            self._entries[asked] = compiled
            self.bytes += size
            while self.bytes > self._max_bytes:
                self.bytes -= self._entries.popitem(last=False)[1].memory_size_bytes


class Guide:
    """A request's grammar, with a matcher that follows its output."""

    def __init__(self, matcher: Any, request: Request, words: int) -> None:
        self._matcher = matcher
        self._request = request
        self._words = words
        self._read = 0
        """Output tokens that the matcher has read."""
        self._debt = 0.0
        """Seconds that masks have taken beyond FREE_S each."""
        self.broken: str | None = None
        """Why the output can no longer follow the grammar. From then on the matcher is not touched: it may still be in
        use on an abandoned thread."""

    @property
    def request(self) -> Request:
        """The request that the grammar belongs to."""
        return self._request

    def catch_up(self) -> None:
        """Read the output tokens that are new since the last call."""
        output = self._request.output_ids
        while self._read < len(output) and self.broken is None and not self.ended:
            if self._matcher.accept_token(output[self._read]):
                self._read += 1
            else:
                self.broken = NOTHING_LEFT

    @property
    def ended(self) -> bool:
        """Whether no further token is allowed."""
        return self.broken is None and bool(self._matcher.is_terminated())

    @property
    def read(self) -> int:
        """Tokens of the request, prompt and output, that the matcher is past."""
        return len(self._request.prompt_ids) + self._read

    def mask(self, path: Sequence[int]) -> torch.Tensor | None:
        """[ceil(V / 32)] int32 on the host, one bit per token, lowest first: the tokens allowed after the output and
        `path`. None if any token is allowed, or if the grammar does not allow such a path."""
        if self.broken is not None:
            return None
        accepted, began = 0, time.perf_counter()
        for token in path:
            if self.ended or not self._matcher.accept_token(token):
                break
            accepted += 1
        mask = torch.empty(1, self._words, dtype=torch.int32)
        masked = False
        if accepted == len(path) and not self.ended:
            masked = self._matcher.fill_next_token_bitmask(mask)
        if accepted:
            self._matcher.rollback(accepted)
        self._debt += max(0.0, time.perf_counter() - began - FREE_S)
        if self._debt > DEBT_S:
            self.broken = TOO_SLOW
        return mask[0] if masked else None


def _mapping(text: str) -> dict[str, Any]:
    """The parsed JSON object. Parsed here, because xgrammar's error would repeat the text."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object")
    return value


def _reason(error: Exception) -> str:
    """xgrammar's message, without the time, the source file, the failed condition and the input."""
    noise = r"^\[[\d:]+\] \S+: |Check failed: \(.*?\) is false: |The JSON string is.*"
    text = re.sub(noise, "", str(error).strip(), flags=re.DOTALL)
    return text.strip()[:200] or type(error).__name__


def allowed(masks_GW: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """[G, V] bool of masks [G, ceil(V / 32)] int32, on the device of the masks."""
    bits = torch.arange(WORD, dtype=torch.int32, device=masks_GW.device)
    return ((masks_GW[:, :, None] >> bits) & 1).view(len(masks_GW), -1)[:, :vocab_size].bool()
