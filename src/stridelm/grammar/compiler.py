"""Compiles the grammars of requests (llguidance, docs/decisions/0012-grammars.md).

Whatever form a grammar comes in, it is read here by a reader of its own, which refuses what cannot be held, and written
out anew for llguidance. So a client's text is never interpreted by a library's dialect, and nothing is dropped with a
warning.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import numpy as np

from stridelm.grammar.cache import CACHE_BYTES, GrammarCache
from stridelm.grammar.ebnf import read_ebnf
from stridelm.grammar.expressions import MAX_NESTING, either, pattern, text
from stridelm.grammar.guide import TOO_SLOW, WORD, Compiled, Guide
from stridelm.grammar.json_schema import held_schema
from stridelm.grammar.lexemes import lark
from stridelm.grammar.python_regex import full_match
from stridelm.grammar.share import MaskShare
from stridelm.grammar.structural_tag import structural_tag
from stridelm.grammar.vocabulary import Vocabulary
from stridelm.params import StructuredOutputs
from stridelm.text.tokenizer import Tokenizer
from stridelm.types import Request

COMPILED_BYTES, PER_CHARACTER = 64 << 10, 64
"""What a compiled grammar is counted with, and for each of its characters."""
LIMITS: Mapping[str, Any] = {"step_max_items": 50_000, "max_lexer_states": 50_000, "verbose_errors": False}
"""Of the work for one mask and of a grammar's memory, in llguidance's units: the first is some 0.2 s."""
TRIED, MOST_TRIED, SLOW_TRIAL_S = 48, 1_000, 0.25
"""Tokens of a trial at which there is a choice, tokens in all, and how long the mask of each may take."""


class Grammars:
    """Compiles the grammars of requests."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos_ids: Sequence[int],
        cache: GrammarCache[StructuredOutputs] | None = None,
    ) -> None:
        """eos_ids: tokens that end a text; once a grammar is complete, only they are allowed. cache: shared by tenants.

        Raises ValueError if llguidance is not installed.
        """
        try:
            import llguidance
        except ImportError as error:
            raise ValueError("structured outputs need llguidance: pip install llguidance") from error
        self._llguidance: Any = llguidance
        self._vocabulary = Vocabulary(tokenizer, vocab_size, eos_ids)
        self._library = self._vocabulary.library()
        self._limits = llguidance.LLParserLimits(**LIMITS)
        self._words = -(-vocab_size // WORD)
        self._cache: GrammarCache[StructuredOutputs] = GrammarCache(CACHE_BYTES) if cache is None else cache

    def compile(self, given: StructuredOutputs | Mapping[str, Any], tenant: str = "") -> Compiled:
        """tenant: whose share of the cache the grammar takes. Called from several threads.

        Raises ValueError for an invalid grammar, one that nothing matches, and one that has been too slow to follow."""
        spec = StructuredOutputs.of(given)
        compiled: Compiled | None = self._cache.get(spec)
        if compiled is None:
            compiled = self._compile(spec)
            self._cache.put(spec, compiled, compiled.size, tenant)
        if compiled.broken is not None:
            raise ValueError(f"structured_outputs: {compiled.broken}")
        return compiled

    def guide(self, request: Request, share: MaskShare) -> Guide:
        """A new Guide, for one admission of a request. share: the engine's."""
        assert request.params.structured_outputs is not None
        return Guide(self.compile(request.params.structured_outputs), request, share)

    def try_out(self, asked: StructuredOutputs) -> int:
        """Compile a grammar and generate some random tokens by it. Returns its size in caches. Tokens that leave no
        choice do not count: what comes after a long fixed text is tried too.

        Raises ValueError also if that is slow, even if compiling was not: the grammar may be too ambiguous to follow.
        """
        compiled = self.compile(asked)
        matcher, draw, choices = compiled.matcher.deep_copy(), Random(0), 0
        first = self._vocabulary.first_bytes
        for _ in range(MOST_TRIED):
            began = time.perf_counter()
            mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
            if matcher.is_error() or time.perf_counter() - began > SLOW_TRIAL_S:
                raise ValueError(f"structured_outputs: {TOO_SLOW}")
            tokens = np.flatnonzero(np.unpackbits(mask, bitorder="little")[: len(first)])
            taken = bool(len(tokens)) and matcher.try_consume_tokens([int(draw.choice(tokens))])
            if matcher.is_error():
                raise ValueError(f"structured_outputs: {TOO_SLOW}")
            if not taken or matcher.is_stopped():
                break
            choices += len(np.unique(first[tokens])) > 1
            if choices == TRIED:
                break
        return compiled.size

    def _compile(self, spec: StructuredOutputs) -> Compiled:
        try:
            grammar = self._written(spec)
        except RecursionError:
            raise ValueError(f"structured_outputs: the {spec.kind} is nested too deep; make it simpler") from None
        except ValueError as error:
            raise ValueError(f"structured_outputs: the {spec.kind} cannot be followed: {error}") from error
        return self.compiled(grammar, spec.kind)

    def compiled(self, grammar: str, kind: str) -> Compiled:
        """A grammar in llguidance's syntax, made of one of this kind. Raises ValueError if it is refused there."""
        matcher = self._llguidance.LLMatcher(
            self._library, f'%llguidance {{"no_forcing": true}}\n{grammar}', log_level=0, limits=self._limits
        )
        if matcher.is_error():
            raise ValueError(f"structured_outputs: the {kind} cannot be followed: {_reason(matcher.get_error())}")
        trial = matcher.deep_copy()
        if not np.frombuffer(trial.compute_bitmask(), dtype=np.uint8).any() or trial.is_error():
            raise ValueError(f"structured_outputs: nothing can match the {kind}; allow something")
        size = COMPILED_BYTES + PER_CHARACTER * len(grammar)
        return Compiled(matcher, self._words, frozenset(self._vocabulary.eos_ids), size)

    def _written(self, spec: StructuredOutputs) -> str:
        """The grammar for llguidance. Raises ValueError for what cannot be held."""
        if spec.json is not None:
            assert isinstance(spec.json, str)
            return f"start: %json {held_schema(spec.json)}"
        if spec.json_object:
            return f"start: %json {held_schema(json.dumps({'type': 'object'}))}"
        if spec.regex is not None:
            return f"start: /{pattern(full_match(spec.regex))}/"
        if spec.choice is not None:
            return f"start: /{pattern(either([text(word) for word in spec.choice]))}/"
        if spec.structural_tag is not None:
            assert isinstance(spec.structural_tag, str)
            return structural_tag(_mapping(spec.structural_tag), self._vocabulary.special)
        assert spec.grammar is not None
        return lark(read_ebnf(spec.grammar))


def _mapping(text: str) -> dict[str, Any]:
    """The parsed JSON object. Parsed here, because the parser's error would repeat the text."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(f"it is nested more than {MAX_NESTING} levels deep") from None
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object")
    return value


def _reason(error: str) -> str:
    """llguidance's message, in one line, without options that are not ours."""
    line = " ".join(error.partition("<state>")[0].partition("%llguidance")[0].split())
    line = re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?", "", line)
    return line.removesuffix(" 1 |").removesuffix(" 2 |").strip()[:200]
