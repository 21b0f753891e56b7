"""A grammar that does not return is abandoned, and ends only its own request."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from stridelm import LLM, SamplingParams
from stridelm.faults import RequestFault
from stridelm.params import Speculation
from stridelm.sample import grammar, grammar_watch
from stridelm.sample.grammar import FREE_S, TOO_SLOW, Guide
from stridelm.sample.grammar_watch import MAX_LEFT_BEHIND, GrammarWatch
from stridelm.types import Request

pytest.importorskip("xgrammar")
QUICK, SLOW, ROTTEN = 0, 1, 2
AMBIGUOUS = 'root ::= a a a a a a a a\na ::= b | b a | a a\nb ::= [a-z] | [a-z] b | b b | ""'
"""Its masks take longer and longer to compute: over a second after some 60 tokens."""


class Matcher:
    """A matcher as far as Guide uses one: blocked until it is released, raising or quick."""

    def __init__(self, kind: int) -> None:
        self.kind, self.gate = kind, threading.Event()

    def is_terminated(self) -> bool:
        return False

    def fill_next_token_bitmask(self, mask: torch.Tensor) -> bool:
        if self.kind == SLOW:
            self.gate.wait(60)
        if self.kind == ROTTEN:
            raise LookupError("rotten")
        mask.fill_(7)
        return True


@pytest.fixture
def matchers() -> Iterator[list[Matcher]]:
    made = [Matcher(kind) for kind in (QUICK, SLOW, QUICK, SLOW, QUICK, ROTTEN)]
    yield made
    for matcher in made:
        matcher.gate.set()


def guides(matchers: list[Matcher]) -> list[Guide]:
    return [
        Guide(matcher, Request(str(i), [1], SamplingParams(), Speculation()), 1) for i, matcher in enumerate(matchers)
    ]


def test_the_slow_are_left_behind(matchers: list[Matcher], monkeypatch: pytest.MonkeyPatch) -> None:
    """Other requests of the step get their masks; slow ones are marked broken and not used again; their threads end."""
    monkeypatch.setattr(grammar_watch, "PATIENCE_S", 0.05)
    watch, mine = GrammarWatch(), guides(matchers[:5])
    masks = watch.masks([(guide, ()) for guide in mine])
    assert [None if mask is None else mask.tolist() for mask in masks] == [[7], None, [7], None, [7]]
    assert [guide.broken for guide in mine] == [None, TOO_SLOW, None, TOO_SLOW, None]
    assert watch.masks([(guide, ()) for guide in mine])[1::2] == [None, None]
    assert not watch.crowded and len(watch._left_behind) == 2
    for matcher in matchers:
        matcher.gate.set()
    for worker in watch._left_behind:
        worker.join(10)
    assert not watch.crowded and not watch._left_behind


def test_a_crowd_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_watch, "PATIENCE_S", 0.01)
    watch, slow = GrammarWatch(), [Matcher(SLOW) for _ in range(MAX_LEFT_BEHIND)]
    for guide in guides(slow):
        assert not watch.crowded
        watch.masks([(guide, ())])
    assert watch.crowded
    for matcher in slow:
        matcher.gate.set()


def test_a_matcher_that_raises(matchers: list[Matcher]) -> None:
    """The error names its request."""
    with pytest.raises(RequestFault) as caught:
        GrammarWatch().masks([(guide, ()) for guide in guides([matchers[0], matchers[5]])])
    assert caught.value.request.id == "1" and isinstance(caught.value.__cause__, LookupError)


def test_slow_masks_add_up(matchers: list[Matcher], monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks that are each just quick enough still end their request once their total time is too long."""
    monkeypatch.setattr(grammar, "DEBT_S", 5 * FREE_S)
    [guide] = guides([matchers[0]])

    def slow(self: Matcher, mask: torch.Tensor) -> bool:
        time.sleep(2.5 * FREE_S)
        return bool(mask.fill_(7).any())

    monkeypatch.setattr(Matcher, "fill_next_token_bitmask", slow)
    made = 0
    while guide.broken is None:
        guide.mask(())
        made += 1
    assert guide.broken == TOO_SLOW and 2 <= made <= 4


def test_the_engine_goes_on() -> None:
    """A real grammar that becomes slow midway ends its request with a reason, and the other gets every token."""
    llm = LLM(drafter="none", max_model_len=512)
    tokenizer = llm.engine.tokenizer
    assert tokenizer is not None
    free = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    forced = dict.fromkeys(tokenizer.eos_ids, -100.0) | {tokenizer.encode("a")[0]: 100.0}
    ambiguous = SamplingParams(
        temperature=0.0, max_tokens=400, logit_bias=forced, structured_outputs={"grammar": AMBIGUOUS}
    )
    [wanted] = llm.generate("def f(x):", free)
    got, slow = (output.outputs[0] for output in llm.generate(["def f(x):", "x"], [free, ambiguous]))
    assert got.token_ids == wanted.outputs[0].token_ids
    assert (slow.finish_reason, slow.stop_reason) == ("abort", TOO_SLOW) and "aaa" in slow.text
    llm.check()
