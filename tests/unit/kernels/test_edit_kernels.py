"""The kernels that edit logits, run by Triton's interpreter: bit for bit like torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from stridelm import SamplingParams
from stridelm.attention import BACKENDS
from stridelm.engine import capture
from stridelm.engine.capture import Capture
from stridelm.engine.kinds import Kind
from stridelm.kernels import STEP_OPS
from stridelm.kernels.draw import PADDING
from stridelm.kernels.edit import BLOCK
from stridelm.params import Speculation
from stridelm.sample.rows import Rows
from stridelm.sample.table import Feature, SamplingTable
from stridelm.schedule import Budget
from stridelm.types import Request, Span, StepPlan
from stridelm.verify import exact
from support.checks.draw_kernels import TRUNCATED
from support.checks.edit_kernels import ALL, EDITS, KINDS, make_case
from support.checks.identity import check_identity, mixed_jobs, trusting_neighbours
from support.doubles.bounds import BoundsAttention
from support.doubles.interpreter import INTERPRETED
from support.doubles.stand import Stand
from support.doubles.tree_drafter import registered

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
def test_likeliest() -> None:
    """The same tokens as in torch, sampled or not, with and without edits."""
    for edited, dtype in ((False, torch.bfloat16), (True, torch.float32)):
        kinds = [() for _ in TRUNCATED] + [ALL] * edited
        case = make_case(7, 200, kinds=kinds, others=(*TRUNCATED, {}), dtype=dtype, rows_each=1)
        real = case.part(case.real)
        wanted = case.plain.processed(real.logits, real.rows, real.slots).argmax(-1)
        assert torch.equal(case.plain.likeliest(real.logits, real.rows, real.slots), wanted)
        got = case.sampler.likeliest(case.logits, case.rows, case.slots)
        assert torch.equal(got[case.real], wanted) and int(got.min()) >= 0


@INTERPRETED
def test_a_captured_step_serves_other_requests() -> None:
    """Only device tensors determine who uses what: launched for no slot, as a captured step is, with features that
    stand for all; then parameters, tables and rows change."""
    case, other = make_case(9, 150), make_case(10, 150, longest=30, listed=4)
    case.table.assume(Feature.EDITED)

    def launched() -> torch.Tensor:
        return case.sampler._edited(case.logits, case.rows, case.slots, case.table.features(-1))

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


class Recorder:
    """Stands in for a Graph."""

    made: ClassVar[list[tuple[Kind, Request]]] = []
    is_captured = True

    def __init__(self, device: Any, sampling: Any, kind: Kind, like: Request, pool: Any) -> None:
        self.made.append((kind, like))
        self.run = SimpleNamespace(table=torch.zeros(kind.requests))

    def replay(self, *inputs: Any) -> None:
        pass


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Kind, Request]]:
    """(kind, request it is captured for) of each capture."""
    monkeypatch.setattr(Recorder, "made", [])
    monkeypatch.setattr(capture, "Graph", Recorder)
    monkeypatch.setattr(capture, "replace", lambda run, **changes: run)
    return Recorder.made


def step_of(table: SamplingTable, *asked: dict[str, Any]) -> StepPlan:
    """A step of decoding requests, whose parameters are written to the table."""
    spans = []
    for slot, params in enumerate(asked):
        request = Request(str(slot), [1, 2], SamplingParams(**params), Speculation(), slot=slot)
        table.set(slot, request, [3], params.get("bad_words_token_ids", ()))
        spans.append(Span(request, 1, 1))
    return StepPlan(tuple(spans))


def capture_of(table: SamplingTable) -> Capture:
    device: Any = SimpleNamespace(tokens=SimpleNamespace(tokens=torch.zeros(3, 100)))
    unused: Any = None
    return Capture(device, table, unused, None, unused, Budget(64, 3))


def test_edited_steps_are_captured(made: list[tuple[Kind, Request]]) -> None:
    """One graph for all with the same features; it is captured for a request that reads histories if any does."""
    table = SamplingTable(3, 50)
    steps = capture_of(table)
    bias: dict[str, Any] = {"logit_bias": {3: 1.0}}
    for number in range(2):
        assert steps.replay(step_of(table, {}, {"presence_penalty": 1.0 + number}, bias)) is not None
    ((kind, like),) = made
    assert kind.features == Feature.PENALTIES | Feature.BIAS | Feature.SAMPLED and like.id == "1"
    steps.replay(step_of(table, {}, bias))
    assert [request.id for _, request in made] == ["1", "0"]


def test_a_list_that_grew_is_captured_anew(made: list[tuple[Kind, Request]]) -> None:
    """A graph reads the lists that it was captured with, so it is not replayed once one of them is a new tensor; a step
    that reads none of them is unaffected."""
    table = SamplingTable(3, 50)
    steps = capture_of(table)

    def run(**params: Any) -> int:
        steps.replay(step_of(table, params))
        return len(made)

    few, many = {3: 1.0}, dict.fromkeys(range(20), 1.0)
    assert run(presence_penalty=1.0) == 1 and run(logit_bias=few) == 2
    read = table.bias
    assert run(logit_bias={4: 2.0, 5: 1.0}) == 2 and table.bias is read
    assert run(logit_bias=many) == 3 and table.bias is not read
    assert run(logit_bias=few) == 3 and run(presence_penalty=0.5) == 3
    assert run(logit_bias=few, bad_words_token_ids=[[1, 2, 3]]) == 4
    assert run(logit_bias=few) == 5
    assert run(min_tokens=2) == 6


# In an engine


@pytest.fixture
def lagging() -> Iterator[str]:
    """An attention backend with which an engine on a CPU plans on bounds."""
    BACKENDS.add("bounds", BoundsAttention)
    with registered():
        yield "bounds"
    BACKENDS.remove("bounds")


@INTERPRETED
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_an_engine_says_the_same(
    checkpoint: Callable[..., Path], lagging: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trees and chains that the kernels draw from and walk down, all rows of a step at once, give plain decoding's
    output in torch; also beside a trusted window, which emits what it emits alone."""
    stand = Stand(checkpoint("qwen3", tie_word_embeddings=True), "float32")
    features = ["repetition_penalty", "bad_words", "min_tokens", "frequency_penalty", "logit_bias", "nothing"]
    jobs = mixed_jobs(stand, 6, temperature, features, seed=2)
    lossy = trusting_neighbours(stand, temperature)[:1] if temperature else []
    for job in [*jobs, *lossy]:
        job.params = replace(job.params, max_tokens=9, min_tokens=min(job.params.min_tokens, 9), presence_penalty=0.3)
    llm = stand.llm(attention=lagging, page_size=4)
    sampler = llm.engine.device.verifier._sampler
    drawn, with_extra = sampler.draw, []

    def draw(logits: torch.Tensor, rows: Rows, slots: list[int], stream: int = 0) -> torch.Tensor:
        with_extra.append(rows.extra is not None)
        return drawn(logits, rows, slots, stream)

    monkeypatch.setattr(sampler, "draw", draw)
    monkeypatch.setattr(sampler, "ops", STEP_OPS.get("triton")())
    if not lossy:
        monkeypatch.setattr(exact, "_drawn_rows", None)
    check_identity(stand, jobs, lossy, llm=llm)
    assert any(with_extra)
