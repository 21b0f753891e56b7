"""What must hold for a case: every request is compared with plain decoding, the oracle and its rule.

exact       token for token what the request emits alone without a draft, and what the oracle draws
lossless    no token to which the target gives no probability (fuzz.distribution tests the frequencies)
lossy       each step what the rule makes of its draft; a trusted window also what the request emits alone
all         ends and text, log-probabilities and hidden states, a balanced ledger
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from fuzz.cases import Ask, Case
from fuzz.checkpoints import directory
from fuzz.endings import Ending
from fuzz.found import Found
from fuzz.grammars import NOTHING_LEFT, left_at
from fuzz.oracle import MARGINS, Oracle, oracle_of
from fuzz.play import Play, Said, alone, engine_options, play
from fuzz.random_requests import TREE, WINDOWS
from fuzz.replay import misjudged, possible

LOSSLESS = ("rejection", "block")
Complain = Callable[[str, str], Found]
"""(kind, message) -> the Found to raise."""


@dataclass
class Tally:
    """Counts of what was checked."""

    cases: int = 0
    tokens: int = 0
    refused: int = 0
    accepted: int = 0
    preemptions: int = 0
    replayed: int = 0
    requests: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(rule, drafter) -> requests."""

    def add(self, case: Case, played: Play) -> None:
        self.cases += 1
        self.refused += played.refused
        self.accepted += played.accepted
        self.preemptions += played.preemptions
        for ask, said in zip(case.requests, played.said):
            if said.request is not None:
                self.tokens += len(said.tokens)
                self.requests[ask.rule, ask.drafter] += 1


def check(case: Case, tally: Tally | None = None) -> None:
    """Run the case. Raises Found for the first violation."""
    tally = tally or Tally()
    truths = {}
    for index, ask in enumerate(case.requests):
        if ask.drafter == TREE:
            try:
                truths[index] = alone(case, ask).tokens
            except Found as found:
                if "ValueError" not in found.kind:
                    raise
    played = play(case, truths)
    tally.add(case, played)
    known = case.in_eight_bits if case.precision in MARGINS else frozenset()
    oracle = oracle_of(directory(case.checkpoint), known)
    for index, (ask, said) in enumerate(zip(case.requests, played.said)):
        if said.request is not None:
            _check_request(case, oracle, index, ask, said, tally)
    _check_salts(case, played)
    for stream in played.streams:
        if stream.ask.rule == "exact" and stream.ask.sample == 0:
            plain = alone(case, stream.ask)
            if stream.tokens != plain.tokens[: len(stream.tokens)] or not plain.text.startswith(stream.text):
                raise Found("stream", f"{stream} is not the start of {plain.tokens} {plain.text!r}")


def _check_salts(case: Case, played: Play) -> None:
    """The first request with a salt finds no page of another's."""
    if case.faults:  # streams have salts, too, and requests that start over find their own pages
        return
    for index, (ask, said) in enumerate(zip(case.requests, played.said)):
        salt, others = ask.params.get("cache_salt"), case.requests[:index] + case.requests[index + 1 :]
        if said.request is None or salt is None or said.request.stats.preemptions:
            continue
        alone = all(other.params.get("cache_salt") != salt for other in others)
        if alone and said.request.stats.cached_tokens:
            raise Found("salt", f"request {index} {ask}: found {said.request.stats.cached_tokens} tokens of others")


def _check_request(case: Case, oracle: Oracle, index: int, ask: Ask, said: Said, tally: Tally) -> None:
    def complain(kind: str, message: str) -> Found:
        return Found(kind, f"request {index} {ask}: {message}")

    assert said.request is not None
    if said.tokens != said.request.output_ids:
        raise complain("output", f"it received {said.tokens} but holds {said.request.output_ids}")
    if ask.rule == "exact" or ask.rule in WINDOWS:
        _check_alone(case, ask, said, complain)
    _check_ending(case, oracle, ask, said, complain)
    if case.precision not in MARGINS:
        return
    fault = None
    if ask.rule == "exact":
        fault = oracle.misdrawn(ask.prompt, said.tokens, ask.params, ask.sample, case.precision)
    elif ask.rule in LOSSLESS:
        fault = possible(oracle, ask.prompt, said.tokens, oracle.settled(ask.params), case.precision)
    elif case.traced:
        depth = said.request.speculation.depth or 0
        for look in said.looks:
            if look.decides and fault is None:
                tally.replayed += 1
                fault = misjudged(oracle, ask, look, case.precision, depth)
    if fault is not None:
        raise complain(ask.rule, fault)
    if ask.rule not in WINDOWS:
        _check_told(case, oracle, ask, said, complain)


def _check_alone(case: Case, ask: Ask, said: Said, complain: Complain) -> None:
    """Compare with plain decoding, or with the same window run alone. An aborted request emitted a prefix of it."""
    assert said.request is not None
    other = alone(case, ask, plain=ask.rule == "exact")
    assert other.request is not None
    length = len(said.tokens) if said.cut else None
    if said.tokens != other.tokens[:length]:
        raise complain("alone", f"{said.tokens} is not {other.tokens[:length]}, its output alone")
    if said.cut:
        if not other.text.startswith(said.text):
            raise complain("alone text", f"{said.text!r} is not a prefix of {other.text!r}")
        return
    ours = said.text, said.request.finish_reason, said.request.stop_reason
    theirs = other.text, other.request.finish_reason, other.request.stop_reason
    if ours != theirs:
        raise complain("alone end", f"{ours} is not {theirs}, its end alone")
    for told, wanted in ((said.logprobs, other.logprobs), (said.prompt_logprobs or [], other.prompt_logprobs or [])):
        shown = [[None if e is None else (list(e), [v.rank for v in e.values()]) for e in x] for x in (told, wanted)]
        if shown[0] != shown[1]:
            place = next((n for n, (a, b) in enumerate(zip(*shown)) if a != b), "their number")
            raise complain("alone logprobs", f"{shown[0]} is not {shown[1]}, at {place}")


def _context(config: dict[str, Any]) -> int:
    """As long as config.json says, or `factor` times as long as before it was stretched."""
    stated, rope = int(config["max_position_embeddings"]), config.get("rope_parameters") or {}
    before = {"linear": stated, "yarn": rope.get("original_max_position_embeddings") or stated}
    return max(stated, int(before.get(str(rope.get("rope_type")), 0) * (rope.get("factor") or 1)))


def _check_ending(case: Case, oracle: Oracle, ask: Ask, said: Said, complain: Complain) -> None:
    """It ends where its tokens require it, with their text."""
    assert said.request is not None
    speaks = not engine_options(case)["skip_tokenizer_init"]
    context = case.engine.get("max_model_len", _context(oracle.config))
    wanted = oracle.ending(ask.prompt, said.tokens, ask.params, context, speaks)
    if ask.params.get("structured_outputs"):
        assert oracle.alphabet is not None
        left = left_at(ask.params["structured_outputs"], oracle.alphabet, said.tokens)
        if left is not None and (left < wanted.tokens or wanted.reason in (None, "length")):
            ended = oracle.ending(ask.prompt, said.tokens[: left - 1], ask.params, context, speaks)
            wanted = Ending(left, "abort", NOTHING_LEFT, ended.text)
    if said.cut:
        if wanted.reason is not None or said.request.finish_reason != ("error" if said.failed else "abort"):
            raise complain("ending", f"it was cut short but should have ended as {wanted}")
        if wanted.text is not None and not wanted.text.startswith(said.text):
            raise complain("text", f"{said.text!r} is not a prefix of {wanted.text!r}")
        return
    got = len(said.tokens), said.request.finish_reason, said.request.stop_reason
    if got != (wanted.tokens, wanted.reason, wanted.stop):
        raise complain("ending", f"{said.tokens} ended as {got}, should end as {wanted}")
    if wanted.text is not None and said.text != wanted.text:
        raise complain("text", f"{said.tokens} gave {said.text!r}, should give {wanted.text!r}")


def _check_told(case: Case, oracle: Oracle, ask: Ask, said: Said, complain: Complain) -> None:
    """Log-probabilities and hidden states."""
    ids, prompt = [*ask.prompt, *said.tokens], len(ask.prompt)
    top = ask.params.get("logprobs")
    if top is not None:
        if len(said.logprobs) != len(said.tokens):
            raise complain("logprobs", f"{len(said.logprobs)} for {len(said.tokens)} tokens")
        fault = oracle.mislogged(ids, prompt, said.logprobs, top, ask.params, case.precision)
        if fault is not None:
            raise complain("logprobs", fault)
    top = ask.params.get("prompt_logprobs")
    if top is not None and said.tokens:
        entries = said.prompt_logprobs
        if entries is None or len(entries) != prompt or entries[0] is not None or None in entries[1:]:
            raise complain("prompt_logprobs", f"{entries} for a prompt of {prompt}")
        told = [entry for entry in entries[1:] if entry is not None]
        fault = oracle.mislogged(ids, 1, told, top, ask.params, case.precision)
        if fault is not None:
            raise complain("prompt_logprobs", fault)
    if ask.params.get("return_hidden_states") and said.tokens:
        states, wanted = torch.cat(said.states).double().numpy(), oracle.states(ids)[:-1]
        close = MARGINS[case.precision] * max(1.0, float(np.abs(wanted).max())) * 4
        if states.shape != wanted.shape or float(np.abs(states - wanted).max()) > close:
            raise complain("hidden_states", f"{states.shape} should be {wanted.shape}, or differ by too much")
