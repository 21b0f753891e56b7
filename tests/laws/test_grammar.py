"""Grammars are exact at every row: with any drafter, the output is that of plain decoding under the same grammar, and
the grammar accepts it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stridelm import LLM, SamplingParams
from stridelm.batch import ForwardBatch
from stridelm.engine.step import Flight
from stridelm.grammar import share
from stridelm.grammar.compiler import Grammars
from stridelm.grammar.guide import NOTHING_LEFT, allowed
from stridelm.grammar.share import MaskShare
from stridelm.params import Speculation
from stridelm.run.eager import Logits
from stridelm.text.tokenizer import Tokenizer
from stridelm.types import Request, Status
from stridelm.verify import RULES
from support.checkpoints.models import EOS
from support.checks.grammar import GRAMMARS, check_grammar, check_rule, jobs_of
from support.checks.identity import check_identity
from support.doubles.bounds import LaggingStand, bounds_registered
from support.doubles.stand import Stand
from support.doubles.tree_drafter import registered

pytest.importorskip("llguidance")


@pytest.fixture(scope="module", autouse=True)
def _trees() -> Iterator[None]:
    with registered():
        yield


@pytest.fixture(scope="module")
def stand(speaking: Path) -> Stand:
    return Stand(speaking, "float32", options={"skip_tokenizer_init": False})


@pytest.fixture(scope="module")
def lagging(speaking: Path) -> Iterator[Stand]:
    with bounds_registered():
        yield LaggingStand(speaking, "float32", options={"skip_tokenizer_init": False})


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", GRAMMARS)
def test_identity(stand: Stand, name: str, temperature: float) -> None:
    check_grammar(stand, name, temperature)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", GRAMMARS)
def test_identity_in_flight(lagging: Stand, name: str, temperature: float) -> None:
    check_grammar(lagging, name, temperature)


@pytest.mark.parametrize("drafter", ["none", "mtp"])
def test_steps_overlap(lagging: Stand, drafter: str) -> None:
    """Requests with grammars are in every step, and the step before lands while the device runs the forward pass."""
    llm, order = lagging.llm(), []
    runner, land = llm.engine.runner, llm.engine.steps.land
    forward = runner.forward

    def forwarding(batch: ForwardBatch) -> Logits:
        order.append(f"forward {len(batch.spans)}")
        return forward(batch)

    def landing(flight: Flight) -> None:
        order.append("land")
        land(flight)

    runner.forward = forwarding  # type: ignore[method-assign]
    llm.engine.steps.land = landing  # type: ignore[method-assign]
    params = SamplingParams(temperature=0, max_tokens=6, structured_outputs={"regex": "[a-z]{40}"}, seed=0)
    speculation = {"drafter": drafter, **({} if drafter == "none" else {"depth": 1})}
    outputs = llm.generate([[7, 8], [9, 10, 11]], replace(params, speculation=speculation))
    assert all(len(out.outputs[0].token_ids) == 6 for out in outputs)
    assert order[:4] == ["forward 2", "forward 2", "land", "forward 2"]


@pytest.mark.parametrize("name", ["json", "regex"])
@pytest.mark.parametrize("stands", ["stand", "lagging"])
def test_pages_run_out(request: pytest.FixtureRequest, stands: str, name: str) -> None:
    """A preempted request that resumes parses its output again and continues with the same tokens."""
    stand = request.getfixturevalue(stands)
    jobs = jobs_of(name, 1.0, [{"drafter": "ngram", "depth": 3, "prompt_lookup_min": 1}] * 10)
    llm = stand.llm(page_size=4, num_pages=32)
    check_identity(stand, jobs, llm=llm)
    assert llm.engine.stats.preemptions


@pytest.mark.parametrize("rule", [rule for rule in RULES if not RULES.get(rule).simulated])
@pytest.mark.parametrize("name", ["json", "choice"])
@pytest.mark.parametrize("stands", ["stand", "lagging"])
def test_every_rule(request: pytest.FixtureRequest, stands: str, name: str, rule: str) -> None:
    """With every rule, including lossy ones and trusted windows."""
    check_rule(request.getfixturevalue(stands), name, rule)


@pytest.mark.parametrize("stands", ["stand", "lagging"])
def test_requests_that_sit_out_lose_nothing(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, stands: str
) -> None:
    """While others run, a tenant's grammars have hardly a request per step here: every output is what it is alone."""
    stand = request.getfixturevalue(stands)
    llm, asked = stand.llm(), []
    for number in range(9):
        tenant, guided = f"client {number % 3}", number % 3 > 0
        grammar = {"regex": "[a-z]{12}"} if guided else None
        params = SamplingParams(
            temperature=1, seed=number, max_tokens=24, structured_outputs=grammar, ignore_eos=not guided
        )
        asked.append((f"{number}", [7 + number, 8], params, tenant))
    alone = {id: llm.generate([prompt], params)[0].outputs[0].token_ids for id, prompt, params, _ in asked}
    monkeypatch.setattr(share, "STEP_S", 0.0)
    monkeypatch.setattr(share, "SHARE", 1.0)
    requests = [llm.engine.add(id, prompt, params, tenant=tenant) for id, prompt, params, tenant in asked]
    rested = 0
    while llm.engine.busy:
        llm.engine.step()
        rested += sum(one.resting for one in requests if one.status is Status.RUNNING)
    assert rested > 20
    assert {one.id: one.output_ids for one in requests} == alone
    llm.check()


def test_masks_are_what_may_follow(speaking: Path) -> None:
    """Token by token against all texts of the grammar, at the output's end and along draft paths after it."""
    words = ["yes", "yesterday", "né"]
    tokenizer = Tokenizer.load(speaking)
    grammars = Grammars(tokenizer, 300, [EOS])
    raw = {token: tokenizer.hf.backend_tokenizer.decode([token]) for token in range(290)}
    params = SamplingParams(structured_outputs={"choice": words})
    request = Request("r", [5, 6], params, Speculation())
    guide = grammars.guide(request, MaskShare())
    for output, path in ((), ()), ((), tokenizer.encode("y")), (tokenizer.encode("ye"), tokenizer.encode("ste")):
        request.output_ids[:] = output
        guide = grammars.guide(request, MaskShare())
        guide.catch_up()
        for _ in range(2):  # computing a mask leaves no state behind
            mask = guide.mask(path)
            assert mask is not None
            before = tokenizer.decode([*output, *path])
            ascii = [token for token in raw if raw[token] and raw[token].isascii()]
            may = {token for token in ascii if any(word.startswith(before + raw[token]) for word in words)}
            if before in words:
                may.add(EOS)
            got = {t for t in torch.nonzero(allowed(mask[None], 300)[0]).flatten().tolist() if raw.get(t, "").isascii()}
            assert got == may, before


def test_a_broken_path_masks_nothing(speaking: Path) -> None:
    grammars = Grammars(Tokenizer.load(speaking), 300, [EOS])
    request = Request("r", [5], SamplingParams(structured_outputs={"choice": ["yes"]}), Speculation())
    guide = grammars.guide(request, MaskShare())
    wrong = Tokenizer.load(speaking).encode("n")
    first = guide.mask(())
    assert guide.mask(wrong) is None
    again = guide.mask(())
    assert first is not None and again is not None and torch.equal(again, first)


def test_no_token_is_left(stand: Stand) -> None:
    """A request whose parameters forbid all that the grammar allows ends, and its error says so."""
    params = SamplingParams(temperature=0, structured_outputs={"choice": ["q"]}, bad_words=["q"])
    sample = stand.llm().generate([[7, 8]], params)[0].outputs[0]
    assert (sample.finish_reason, sample.stop_reason, sample.text) == ("abort", NOTHING_LEFT, "")


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({}, "one of"),
        ({"regex": "a", "json_object": True}, "one of"),
        ({"regexp": "a"}, "regexp"),
        ("a", "mapping"),
        ({"regex": 3}, "text"),
        ({"choice": []}, "empty"),
        ({"choice": [""]}, "empty"),
        ({"json": {"enum": []}}, "enum"),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "minimum"),
        ({"json": "{"}, "JSON"),
        ({"json": {"a": float("nan")}}, "JSON"),
        ({"regex": "("}, "unterminated"),
        ({"grammar": "nope"}, "list of rules"),
    ],
    ids=str,
)
def test_refusals(stand: Stand, asked: Any, message: str) -> None:
    """Refused before anything runs, and nothing is held."""
    llm = stand.llm()
    with pytest.raises(ValueError, match=message):
        llm.generate([[7, 8]], SamplingParams(structured_outputs=asked))
    llm.check()
    assert not llm.engine.busy


@pytest.mark.parametrize("more", [{"ignore_eos": True}, {"min_tokens": 3}])
def test_grammar_alone_ends_the_output(more: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="where the output ends"):
        SamplingParams(structured_outputs={"regex": "a"}, **more)


def test_needs_a_tokenizer(speaking: Path) -> None:
    llm = LLM(str(speaking), drafter="none", skip_tokenizer_init=True, num_pages=32)
    with pytest.raises(ValueError, match="tokenizer"):
        llm.generate([[7]], SamplingParams(structured_outputs={"regex": "a"}))
