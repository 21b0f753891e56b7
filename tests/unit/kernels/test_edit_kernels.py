"""The kernels that edit logits, run by Triton's interpreter: bit for bit like torch."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from stridelm import SamplingParams
from stridelm.engine import capture
from stridelm.engine.capture import Capture
from stridelm.engine.kinds import CLASSES, Kind
from stridelm.engine.stats import EngineStats
from stridelm.engine.ways import Ways
from stridelm.kernels.draw import PADDING
from stridelm.kernels.edit import BLOCK
from stridelm.params import Speculation
from stridelm.sample.table import Feature, SamplingTable
from stridelm.schedule import Budget
from stridelm.types import Request, Span, StepPlan
from support.checks.draw_kernels import TRUNCATED
from support.checks.edit_kernels import ALL, EDITS, KINDS, make_case
from support.doubles.interpreter import INTERPRETED

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SAMPLED = ({"temperature": 0.8}, {"temperature": 0.0}, *TRUNCATED[5:])


# Logits


@INTERPRETED
@pytest.mark.parametrize("vocab", [1, 61, 1500])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mixed_rows(dtype: torch.dtype, vocab: int) -> None:
    """Rows of all kinds, including draft nodes and padding."""
    for seed in range(3):
        make_case(seed, vocab, dtype=dtype).check()


@INTERPRETED
@pytest.mark.parametrize("name", EDITS)
def test_one_edit_alone(name: str) -> None:
    """With and without a draft, and without a known bound on the histories. Each edit changes something."""
    for drafted in (True, False):
        case = make_case(5, 200, kinds=((name,), ()), drafted=drafted)
        case.check()
        plain = [row for row, slot in enumerate(case.slots) if slot != 0]
        edited = case.edited()
        assert torch.equal(edited[plain], case.logits[plain]) and not torch.equal(edited, case.logits)
        replace(case, rows=replace(case.rows, longest=None)).check()


@INTERPRETED
def test_histories_and_lists_of_several_blocks() -> None:
    """Programs that share a row: one history ends at the very end of a block, and its draft begins in the next."""
    most = 2 * BLOCK.value
    assert make_case(0, 300, kinds=[ALL]).table.bias_ids.shape[1] < BLOCK.value
    case = make_case(0, 3000, kinds=(ALL, ("repetition",), ("frequency",)), longest=most, listed=BLOCK.value + 9)
    assert case.table.stop_ids.shape[1] > BLOCK.value and int(case.sampler.history.known[0]) == most
    case.check()


@INTERPRETED
def test_counts_are_large() -> None:
    """One token, repeated for the whole length of the history, in prompt and output."""
    case = make_case(1, 50, kinds=(("repetition", "frequency"), ("presence",)), longest=700)
    case.sampler.history.tokens.fill_(7)
    case.check()
    changed = (case.edited() != case.logits).nonzero()[:, 1].unique().tolist()
    assert 7 in changed


@INTERPRETED
def test_a_row_does_not_depend_on_its_neighbours() -> None:
    case = make_case(2, 400, dtype=torch.bfloat16)
    whole = case.edited()
    for index in ([0], [len(case.slots) - 1], list(range(0, len(case.slots), 3))):
        assert torch.equal(case.part(index).edited(), whole[index])


@INTERPRETED
def test_paths_that_are_not_live_may_name_anything() -> None:
    """Garbage in the path of a row that is not read is not used as an index; nor is a position."""
    case = make_case(3, 90)
    extra = case.rows.extra
    assert extra is not None
    odd = case.real[::2]
    wild = extra.clone()
    wild[odd] = torch.tensor([2**40, 90, -7, 3, 91])
    positions = case.rows.positions.clone()
    positions[odd] = 2**33
    wilder = replace(case, rows=replace(case.rows, extra=wild, positions=positions))
    even = case.real[1::2]
    assert torch.equal(wilder.edited()[even], case.edited()[even])


@INTERPRETED
def test_the_beginning_of_an_output() -> None:
    """With empty output no word matches across the prompt's edge, whatever stands before and after it."""
    case = make_case(4, 30, kinds=[ALL] * 4, longest=9, rows_each=1, drafted=False, padding=0)
    case.table.prompt_len.copy_(case.sampler.history.known)
    case.check()


# Tokens


@INTERPRETED
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tokens_are_the_samplers(dtype: torch.dtype) -> None:
    """Edited or not, greedy, sampled and truncated, in one batch; padding gets no token."""
    for seed, stream in ((0, 0), (1, 3)):
        case = make_case(seed, 300, dtype=dtype, others=SAMPLED, rows_each=1)
        got = case.drawn(stream)
        assert torch.equal(got[case.real], case.twin(stream))
        assert {int(got[row]) for row in range(len(got)) if case.slots[row] < 0} == {PADDING}


@INTERPRETED
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_rows_beside_edited_ones_draw_the_same(dtype: torch.dtype) -> None:
    """From the float32 copy as from the original logits, with truncation and without."""
    kinds = [() for _ in TRUNCATED] + [ALL]
    case = make_case(7, 500, kinds=kinds, others=(*TRUNCATED, {}), dtype=dtype, rows_each=2)
    free = [row for row, slot in enumerate(case.slots) if slot != len(TRUNCATED)]
    alone = case.part(free)
    assert not any(case.table.features(slot) & Feature.EDITED for slot in alone.slots)
    assert torch.equal(case.drawn()[free], alone.drawn())


@INTERPRETED
def test_probabilities() -> None:
    """Of edited rows and others, truncated and greedy: the same as torch's for the same logits."""
    for edited, dtype in ((False, torch.bfloat16), (True, torch.float32)):
        kinds = [() for _ in TRUNCATED] + [ALL] * edited
        case = make_case(7, 200, kinds=kinds, others=(*TRUNCATED, {}), dtype=dtype, rows_each=1)
        real = case.part(case.real)
        got = case.sampler.probabilities(case.logits, case.rows, case.slots)[case.real]
        assert torch.equal(got, case.plain.probabilities(real.logits, real.rows, real.slots))


@INTERPRETED
def test_argmax() -> None:
    """The same tokens as in torch, sampled or not, with and without edits."""
    for edited, dtype in ((False, torch.bfloat16), (True, torch.float32)):
        kinds = [() for _ in TRUNCATED] + [ALL] * edited
        case = make_case(7, 200, kinds=kinds, others=(*TRUNCATED, {}), dtype=dtype, rows_each=1)
        real = case.part(case.real)
        wanted = case.plain.processed(real.logits, real.rows, real.slots).argmax(-1)
        assert torch.equal(case.plain.argmax(real.logits, real.rows, real.slots), wanted)
        got = case.sampler.argmax(case.logits, case.rows, case.slots)
        assert torch.equal(got[case.real], wanted) and int(got.min()) >= 0


@INTERPRETED
def test_a_captured_step_serves_other_requests() -> None:
    """Only device tensors determine who uses what: launched for no slot, as a captured step is, with features that
    stand for all; then parameters, tables and rows change."""
    case, other = make_case(9, 150), make_case(10, 150, longest=30, listed=4)

    def launched() -> torch.Tensor:
        return case.sampler._edited(case.logits, case.rows, case.slots, Feature.EDITED & ~Feature.GRAMMAR)

    assert torch.equal(launched()[case.real], case.wanted())
    case.become(other)
    assert torch.equal(launched()[other.real], other.wanted()) and torch.equal(case.wanted(), other.wanted())


def test_the_cases_matter() -> None:
    """Guards the tests above: words match in the output, across it and the draft, and some do not; a bias and a
    stop id fall on the same token, and rows of a request differ."""
    case = make_case(0, 61)
    assert {slot for slot in case.slots if slot < 0} == {-1}
    assert len({case.table.features(slot) for slot in range(len(KINDS))}) == 6
    wanted = case.wanted()
    only_words = [i for i, row in enumerate(case.real) if case.slots[row] == 1]
    hits = wanted[only_words].isinf()
    assert bool(hits.any(1).all()) and not bool((hits == hits[0]).all())
    assert int((case.table.bad_ends[1] > 0).sum()) > int(hits.sum(1).max())


# Captured steps


PLAIN = Speculation(drafter="none", acceptance="exact")


class Recorder:
    """Stands in for a Graph."""

    made: ClassVar[list[tuple[Kind, Request]]] = []
    is_captured = True

    def __init__(self, device: Any, sampling: Any, kind: Kind, ways: Ways, pool: Any) -> None:
        self.made.append((kind, ways.like))

    def replay(self, *inputs: Any) -> object:
        return self


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Kind, Request]]:
    """(kind, request it is captured for) of each capture."""
    monkeypatch.setattr(Recorder, "made", [])
    monkeypatch.setattr(capture, "Graph", Recorder)
    return Recorder.made


def step_of(table: SamplingTable, *asked: dict[str, Any]) -> StepPlan:
    """A step of decoding requests, whose parameters are written to the table."""
    spans = []
    for slot, params in enumerate(asked):
        request = Request(str(slot), [1, 2], SamplingParams(**params), PLAIN, slot=slot)
        table.set(slot, request, [3], params.get("bad_words_token_ids", ()))
        spans.append(Span(request, 1, 1))
    return StepPlan(tuple(spans))


def capture_of(table: SamplingTable) -> Capture:
    device: Any = SimpleNamespace(tokens=SimpleNamespace(tokens=torch.zeros(3, 100)))
    unused: Any = None
    return Capture(device, table, unused, None, unused, Budget(64, 3), EngineStats(), shallow=False)


def test_few_graphs_serve_all_parameters(made: list[tuple[Kind, Request]]) -> None:
    """One graph for requests that are greedy, sampled or truncated, and one for everything else."""
    table = SamplingTable(3, 50)
    grown = Request("wide", [1], SamplingParams(logit_bias={3: 1.0}), Speculation(), slot=2)
    table.set(2, grown, [3])
    steps = capture_of(table)

    def features(one: dict[str, Any], other: dict[str, Any]) -> Feature:
        assert steps.replay(step_of(table, one, other)) is not None
        return made[-1][0].features

    greedy = {"temperature": 0.0}
    assert features(greedy, greedy) == features({}, greedy) == features({}, {}) == CLASSES[0] and len(made) == 1
    assert features({"top_p": 0.5}, {}) == features({"min_p": 0.1}, {"top_k": 3}) == CLASSES[0] and len(made) == 1
    assert features({"presence_penalty": 1.0}, {}) == features({"logit_bias": {4: 1.0}}, {"top_p": 0.5}) == CLASSES[1]
    assert len(made) == 2


def test_a_graph_for_everything_looks_back(made: list[tuple[Kind, Request]]) -> None:
    """Whoever it was captured for: the stand-ins read histories, as any request in such a step may."""
    table = SamplingTable(3, 50)
    capture_of(table).replay(step_of(table, {"logit_bias": {3: 1.0}}))
    ((kind, like),) = made
    assert not like.params.uses_history
    assert all(span.request.params.uses_history for span in kind.stand_ins(like, 100))


def test_why_a_step_is_not_captured(made: list[tuple[Kind, Request]]) -> None:
    table = SamplingTable(3, 50)
    steps = capture_of(table)
    plan = step_of(table, {}, {})
    assert steps.replay(replace(plan, spans=(replace(plan.spans[0], real=3), plan.spans[1]))) is None
    other = replace(plan.spans[1].request, speculation=replace(PLAIN, acceptance="typical"))
    steps.replay(replace(plan, spans=(plan.spans[0], replace(plan.spans[1], request=other))))
    assert steps._stats.uncaptured == {"prompt": 1, "mixed_speculation": 1} and not made
    assert steps.replay(step_of(table, {"logprobs": 1}, {})) is not None


def test_a_list_that_grew_is_captured_anew(made: list[tuple[Kind, Request]]) -> None:
    """A graph reads the lists that it was captured with, so it is not replayed once one of them is a new tensor; a step
    that reads none of them is unaffected."""
    table = SamplingTable(3, 50)
    steps = capture_of(table)

    def run(**params: Any) -> int:
        steps.replay(step_of(table, params))
        return len(made)

    few, many = {3: 1.0}, dict.fromkeys(range(20), 1.0)
    assert run() == 1 and run(logit_bias=few) == 2
    read = table.bias
    assert run(logit_bias={4: 2.0, 5: 1.0}) == 2 and table.bias is read
    assert run(logit_bias=many) == 3 and table.bias is not read
    assert run(logit_bias=few) == 3 and run(top_p=0.5) == 3 and run() == 3
    assert run(logit_bias=few, bad_words_token_ids=[[1, 2, 3]]) == 4
    assert run(logit_bias=few) == 4
    assert run(min_tokens=2) == 5
