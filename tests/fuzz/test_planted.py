"""What the fuzzer plays it also checks: a fault planted in the engine is found by a case, or a table, of its kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import stridelm.cache.layout as layout
import stridelm.cache.ledger as ledger
import stridelm.kernels.plain_fp8 as plain_fp8
import stridelm.schedule.adaptive as adaptive
from fuzz.cases import Ask, Case, Checkpoint
from fuzz.checks import check
from fuzz.distribution import Table, check_table
from fuzz.found import Found
from fuzz.play import _reference
from fuzz.random_requests import BYTE_IDS
from stridelm.cache.prefix import extend
from stridelm.engine.intake import Intake
from stridelm.grammar.guide import Guide
from stridelm.models.layers.rope import RopeSpec
from stridelm.types import Request, Span
from stridelm.verify.exact import Exact, draw_nodes, walk_and_append
from stridelm.verify.rule import VerifyInput

Plant = Callable[[pytest.MonkeyPatch], None]
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 3, "max_tokens": 14, "ignore_eos": True}
LONG = {**SAMPLED, "max_tokens": 60}
GREEDY = {**SAMPLED, "temperature": 0.0}
TEXT = (5, 6, 7, 8, 1, 2, 3) * 6
MASKED = {"drafter": "mask", "depth": "auto"}
FLAT = Checkpoint(scale=2.0)
AB = BYTE_IDS[ord("a")], BYTE_IDS[ord("b")]
SPEAKING = Checkpoint(variant="tied", vocab=300, scale=3.0, speaks=True)


def draws_wrongly(monkeypatch: pytest.MonkeyPatch, where: Callable[[Span], bool]) -> None:
    """Spans for which `where` holds draw the token after the right one at their first row."""

    def mutant(self: Exact, inputs: VerifyInput) -> Any:
        drawn_RK = draw_nodes(inputs)
        for row, span in enumerate(inputs.spans):
            if where(span):
                drawn_RK[row, 0] = (drawn_RK[row, 0] + 1) % inputs.logits_MV.shape[1]
        return walk_and_append(inputs, inputs.draft, drawn_RK)

    monkeypatch.setattr(Exact, "decide", mutant)


def shallow_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of drafts that are shallower than the request may draft."""
    draws_wrongly(monkeypatch, lambda span: 0 < span.depth < len(span.request.rows_by_depth) - 1)


def long_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """After 60 tokens."""
    draws_wrongly(monkeypatch, lambda span: len(span.request.output_ids) > 60)


def salts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages are named without the salt."""
    monkeypatch.setattr(ledger, "extend", lambda names, tokens, size, salt: extend(names, tokens, size, None))


def paces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A target rate cannot be kept."""

    def mutant(request: Request, tokens: int, seconds: float) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(adaptive, "keep_pace", mutant)


def masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft row has the mask of the request's last token."""
    mask = Guide.mask
    monkeypatch.setattr(Guide, "mask", lambda self, path: mask(self, []))


def rotations(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head with an odd number of pairs is rotated in the wrong order."""
    frequencies = RopeSpec.frequencies

    def mutant(self: RopeSpec) -> tuple[torch.Tensor, float]:
        each, factor = frequencies(self)
        return (each.flip(0) if len(each) % 2 else each), factor

    monkeypatch.setattr(RopeSpec, "frequencies", mutant)


def eight_bit_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest number is not that of e4m3."""
    monkeypatch.setattr(plain_fp8, "LARGEST", 400.0)


def eight_bit_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    """KV is stored in the other format of eight bits."""
    monkeypatch.setattr(layout, "EIGHT_BITS", torch.float8_e5m2)


CASES: dict[str, tuple[Plant, Case]] = {
    "a policy of the engine": (
        shallow_drafts,
        Case(FLAT, requests=(Ask(TEXT, LONG, MASKED),)),
    ),
    "a policy at random": (shallow_drafts, Case(FLAT, requests=(Ask(TEXT, LONG, MASKED),), policy=1)),
    "the default drafter": (
        shallow_drafts,
        Case(Checkpoint(heads=("model",)), {"drafter": "auto"}, (Ask(TEXT, LONG, {"depth": "auto"}),), policy=1),
    ),
    "long outputs": (long_outputs, Case(requests=(Ask(TEXT, {**LONG, "max_tokens": 64}),))),
    "salts": (
        salts,
        Case(requests=(Ask(TEXT, GREEDY), Ask(TEXT, {**GREEDY, "cache_salt": "mine"}, arrival=9))),
    ),
    "target rates": (
        paces,
        Case(FLAT, requests=(Ask(TEXT, {**LONG, "target_tps": 9.0}, MASKED),)),
    ),
    "grammars": (
        masks,
        Case(
            SPEAKING,
            requests=(
                Ask(
                    AB * 6,
                    {**SAMPLED, "ignore_eos": False, "structured_outputs": {"regex": "(ab){8}"}},
                    {"drafter": "ngram"},
                ),
            ),
        ),
    ),
    "uneven widths": (
        rotations,
        Case(Checkpoint("llama", "plain", widths=(33, 3, 1, 10, 41)), requests=(Ask(TEXT, {**GREEDY, "logprobs": 1}),)),
    ),
    **{
        option: (
            plant,
            Case(engine={"dtype": "float64", option: "fp8"}, requests=(Ask(TEXT, {**GREEDY, "logprobs": 1}),)),
        )
        for option, plant in (("quantization", eight_bit_weights), ("kv_cache_dtype", eight_bit_kv))
    },
}
"""What is played -> a fault, and a case of the kind that random_case draws."""


@pytest.fixture(autouse=True)
def _own_references() -> Iterator[None]:
    """A model may have been loaded before the fault was planted."""
    _reference.cache_clear()
    yield
    _reference.cache_clear()


@pytest.mark.parametrize("kind", CASES)
def test_a_case_finds_it(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The case is fine as long as nothing is planted."""
    plant, case = CASES[kind]
    check(case)
    _reference.cache_clear()
    plant(monkeypatch)
    with pytest.raises(Found):
        check(case)


def same_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where depths are chosen, a seed has the same noise again."""
    request = Intake.request

    def mutant(self: Intake, *args: Any, **kwargs: Any) -> Request:
        made = request(self, *args, **kwargs)
        made.renews_noise = False
        return made

    monkeypatch.setattr(Intake, "request", mutant)


TABLES: dict[str, tuple[Plant, Table]] = {
    "repeated seeds": (
        same_noise,
        Table(
            {"drafter": "mtp", "acceptance": "block", "depth": "auto"},
            Checkpoint(vocab=8, heads=("modules",)),
            rounds=2,
            tokens=2,
            allowed=(3, 4, 5),
        ),
    ),
}


@pytest.mark.parametrize("kind", TABLES)
def test_a_table_finds_it(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table is fine as long as nothing is planted."""
    plant, table = TABLES[kind]
    assert check_table(table) > 1e-4
    plant(monkeypatch)
    with pytest.raises(Found, match="distribution"):
        check_table(table)
