"""A request is drafted by lookup while its text repeats itself and by the head otherwise, and each by its own."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest
import torch

from stridelm import LLM, SamplingParams
from stridelm.batch import Draft, ForwardBatch
from stridelm.bench.prompts import load_prompts
from stridelm.builtin import builtin_path
from stridelm.config import EngineConfig
from stridelm.draft import DRAFTERS
from stridelm.draft.base import Group, TargetInfo
from stridelm.draft.settle import best_drafter, settle
from stridelm.engine.load import describe_target
from stridelm.engine.outcome import Outcome
from stridelm.models.loader import load_config
from stridelm.params import Speculation
from stridelm.types import StepPlan

pytestmark = pytest.mark.skipif(not {"hybrid", "mtp", "ngram"} <= {*DRAFTERS}, reason="a drafter is not installed")

STORY = "Once upon a time there was a little girl who lived with her grandmother in a small house. Every morning she"
GREEDY = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)


@dataclass
class Watch:
    """Which source drafted for each request in each step, and what of it was accepted."""

    seen: dict[str, list[tuple[int, str, int, int]]] = field(default_factory=dict)
    """Request -> (known tokens, source, drafted, accepted)."""

    def __call__(self, plan: StepPlan, draft: Draft, batch: ForwardBatch, outcome: Outcome) -> None:
        for i, span in enumerate(plan.spans):
            if outcome.drafted[i]:
                source = span.request.sources[outcome.sources[i]]
                entry = (span.start + span.real, source, outcome.drafted[i], outcome.accepted[i])
                self.seen.setdefault(span.request.id, []).append(entry)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    made = LLM(device="cpu", depth=None, check_drafting=False, itl_target_ms=0)
    yield made
    made.check()


def serve(llm: LLM, prompts: list[list[int]], params: SamplingParams, drafter: str) -> tuple[list[list[int]], Watch]:
    """Outputs, and what was seen of them, in the order of the prompts."""
    llm.engine.forget()
    watch = llm.engine.tracer = Watch()
    requests = [
        llm.engine.add(f"{number} {drafter}", prompt, replace(params, speculation=drafter))
        for number, prompt in enumerate(prompts)
    ]
    while llm.engine.busy:
        llm.engine.step()
    llm.engine.tracer = None
    return [request.output_ids for request in requests], watch


def encode(llm: LLM, text: str) -> list[int]:
    assert llm.engine.tokenizer is not None
    return llm.engine.tokenizer.encode(text)


def share(steps: list[tuple[int, str, int, int]], source: str) -> float:
    return sum(step[1] == source for step in steps) / len(steps)


@pytest.fixture(scope="module")
def copied(llm: LLM) -> list[int]:
    """A text, what the model continues it with, and the text again: its continuation begins as a copy and goes on with
    something new."""
    text = encode(llm, load_prompts().prompts[0].text)[:80]
    [continuation], _ = serve(llm, [text], GREEDY, "none")
    return [*text, *continuation[:30], *text]


def test_each_request_by_its_own(llm: LLM, copied: list[int]) -> None:
    """Of two in one batch, the one that copies is drafted by lookup and its neighbour by the head."""
    _, watch = serve(llm, [copied, encode(llm, STORY)], GREEDY, "hybrid")
    copies, neighbours = watch.seen["0 hybrid"], watch.seen["1 hybrid"]
    assert share(copies[:4], "lookup") == 1
    assert share(neighbours[:4], "mtp") == 1


def test_it_switches_back(llm: LLM, copied: list[int]) -> None:
    """A text that stops repeating itself is drafted by the head again, and that as well as if it had always drafted."""
    params = replace(GREEDY, max_tokens=80)
    [plain], _ = serve(llm, [copied], params, "none")
    [output], watch = serve(llm, [copied], params, "hybrid")
    [same], always = serve(llm, [copied], params, "mtp")
    assert output == same == plain
    steps = watch.seen["0 hybrid"]
    first = next(number for number, step in enumerate(steps) if step[1] == "mtp")
    assert first >= 3 and share(steps[:first], "lookup") == 1
    after = list(itertools.takewhile(lambda step: step[1] == "mtp", steps[first:]))
    assert len(after) >= 4
    start, end = after[0][0], after[-1][0]
    there = [step for step in always.seen["0 mtp"] if start <= step[0] <= end]
    assert rate(after) >= rate(there) - 0.1


def rate(steps: list[tuple[int, str, int, int]]) -> float:
    """Share of the drafted tokens that were accepted."""
    return sum(step[3] for step in steps) / sum(step[2] for step in steps)


def test_sources_are_counted(llm: LLM, copied: list[int]) -> None:
    """A request's metrics say what came of each source, and both together are all of its drafts."""
    llm.engine.forget()  # which of them earlier requests were drafted by
    [output] = llm.generate([copied], replace(GREEDY, speculation="hybrid"))
    metrics = output.metrics
    assert metrics is not None and metrics.by_source.keys() == {"lookup", "mtp"}
    assert sum(counts.drafted for counts in metrics.by_source.values()) == metrics.drafted
    assert sum(counts.accepted for counts in metrics.by_source.values()) == metrics.accepted
    assert sum(counts.drafts for counts in metrics.by_source.values()) == metrics.reached_at[0]
    assert sum(counts.hits for counts in metrics.by_source.values()) == metrics.accepted_at[0]
    [alone] = llm.generate([copied], replace(GREEDY, speculation="mtp"))
    assert alone.metrics is not None and alone.metrics.by_source.keys() == {"mtp"}


def test_the_head_runs_only_where_it_drafts(llm: LLM, copied: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU its layers propose nothing for requests that lookup drafts for."""
    head, asked = llm.engine.drafters.get("mtp"), list[int]()
    propose = head.propose

    def counted(group: Group) -> Draft:
        asked.append(len(group.spans))
        return propose(group)

    monkeypatch.setattr(head, "propose", counted)
    _, watch = serve(llm, [copied, encode(llm, STORY)], GREEDY, "hybrid")
    drafts = [step for steps in watch.seen.values() for step in steps]
    assert sum(asked) <= sum(step[1] == "mtp" for step in drafts) + 2 < len(drafts)


def test_auto() -> None:
    """It is what `auto` means where a head and lookup can run; otherwise the best one drafter, and the reason is
    given."""
    target = built_in_target()
    assert settle(Speculation(), target).drafter == "hybrid"
    assert settle(Speculation("auto", depth=5), target).depth == 5
    for asked, drafter, why in (
        (Speculation(acceptance="rejection"), "mtp", "may change the output under acceptance rejection"),
        (Speculation(acceptance="synthetic:2.5"), "mtp", "drafts shorter than acceptance synthetic"),
        (Speculation(draft_topk=2), "mtp", "it has no draft_topk"),
        (Speculation(prompt_lookup_min=3), "mtp", "it has no prompt_lookup_min"),
    ):
        assert settle(asked, target).drafter == drafter
        assert why in best_drafter(asked, target)[1]
    without = replace(target, heads={})
    name, why = best_drafter(Speculation(), without)
    assert name == "mask" and "the best drafter here is mask" in why
    with pytest.raises(ValueError, match="the best drafter here is mask"):
        settle(Speculation("hybrid"), without)
    first = replace(target, heads={"eagle": target.heads["eagle"], "mtp": target.heads["mtp"]})
    assert DRAFTERS.get("hybrid").weights_of(first) == "eagle"


def built_in_target() -> TargetInfo:
    path = builtin_path()
    return describe_target(EngineConfig(), load_config(path), path, torch.device("cpu"))
