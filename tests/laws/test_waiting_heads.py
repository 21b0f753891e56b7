"""While nothing is drafted a drafter's own KV may be left to a later step: what is there afterwards is the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from stridelm import SamplingParams
from stridelm.cache.layout import FULL
from stridelm.draft import DRAFTERS
from stridelm.draft.head_drafter import HeadDrafter
from stridelm.engine.engine import Engine
from stridelm.engine.kinds import Kind
from stridelm.schedule.depth import NOBODY, Configured, Others
from stridelm.schedule.limits import HOST_PATIENCE, PATIENCE
from stridelm.schedule.step_shape import StepShape, shape_of
from stridelm.types import Follow, Request, Span
from support.checks.identity import prompts
from support.doubles.bounds import LaggingStand, bounds_registered
from support.doubles.replays import replays
from support.doubles.stand import Stand

HEADS = [name for name in DRAFTERS if issubclass(DRAFTERS.get(name), HeadDrafter)]
DEPTH = 2
CAPTURED = "captured"
DEVICES = ("in flight", CAPTURED)
WAYS = ("at once", *DEVICES)


class Script(Configured):
    """Drafts as it is told."""

    def __init__(self, wanted: Callable[[Request], bool], *, drafts: bool = True) -> None:
        """drafts: whether prompts are read at once."""
        self._wanted, self._drafts = wanted, drafts
        self.late: list[int] = []
        """Of each step that landed: the most rows that a drafter's KV lacked."""
        self.waited = 0
        """Steps that left theirs to a later one."""
        self.shapes: list[StepShape] = []

    def drafts(self, requests: int) -> bool:
        return self._drafts

    def depths(self, requests: Sequence[Request], others: Others = NOBODY) -> Sequence[int]:
        return [DEPTH if self._wanted(request) else 0 for request in requests]

    def landed(self, spans: Sequence[Span], accepted: Sequence[int], seconds: float | None) -> None:
        self.late.append(max(span.behind for span in spans))
        self.waited += spans[0].follow is Follow.LATER
        self.shapes.append(shape_of(spans))
        assert not any(span.depth and span.behind for span in spans), "drafted with entries missing"


@pytest.fixture(scope="module")
def stands(checkpoint: Callable[..., Path]) -> Iterator[dict[str, Stand]]:
    path = checkpoint("qwen3", tie_word_embeddings=True)
    with bounds_registered():
        lagging = LaggingStand(path, "float32")
        yield {"at once": Stand(path, "float32"), "in flight": lagging, CAPTURED: lagging}


def start(
    stands: dict[str, Stand], way: str, drafter: str, wanted: Callable[[Request], bool], *, drafts: bool = True
) -> tuple[Engine, Script]:
    engine = stands[way].llm(drafter=drafter, depth="auto", page_size=4, max_num_seqs=4).engine
    if way == CAPTURED:
        replays(engine)
    script = Script(wanted, drafts=drafts)
    engine.steps.planner.depths = script
    return engine, script


def add(engine: Engine, stand: Stand, count: int, length: int) -> list[Request]:
    params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
    return [engine.add(str(i), prompt, params) for i, prompt in enumerate(prompts(stand, count, seed=3))]


def entries(engine: Engine, drafter: str, request: Request) -> list[torch.Tensor]:
    """What the drafter has stored for the request's tokens, and the state that its next draft grows from."""
    head = engine.drafters.get(drafter)
    assert isinstance(head, HeadDrafter)
    pages, size = engine.ledger.table(request, FULL), engine.config.page_size
    last = request.computed - head.head.num_modules
    rows = [page * size + at for page in pages for at in range(size)][:last]
    return [
        *(tensor[rows] for tensor in head._runner.pool.tensors),
        head._hidden[request.slot],
        head._ready[request.slot],
    ]


def assert_caught_up(late: Engine, following: Engine, drafter: str, pairs: Sequence[tuple[Request, Request]]) -> None:
    """The drafter lacks nothing of each pair's first request, and has what it has of the second, bit for bit."""
    for one, two in pairs:
        assert one.token_ids == two.token_ids and not one.behind
        for got, wanted in zip(entries(late, drafter, one), entries(following, drafter, two), strict=True):
            assert torch.equal(got, wanted)


def assert_drafts_alike(late: Engine, following: Engine, pairs: Sequence[tuple[Request, Request]]) -> None:
    """From here to the end of all requests."""
    while late.busy:
        late.step()
        following.step()
    for one, two in pairs:
        assert one.output_ids == two.output_ids
        assert (one.stats.drafted, one.stats.accepted) == (two.stats.drafted, two.stats.accepted)


def captured(engine: Engine) -> tuple[Kind, ...]:
    assert engine.capture is not None
    return engine.capture.kinds


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("drafter", HEADS)
def test_nothing_is_lost(stands: dict[str, Stand], way: str, drafter: str) -> None:
    """A head that waited and has caught up has the entries, bit for bit, of one that followed every step."""
    stand = stands[way]
    drafting = False
    waiting, script = start(stands, way, drafter, lambda request: drafting)
    following, other = start(stands, way, drafter, lambda request: drafting)
    following.steps.planner.waits.patience = 0
    patience = waiting.steps.planner.waits.patience
    assert patience == (HOST_PATIENCE if way == "at once" else PATIENCE)
    length = patience + 44
    pairs = list(zip(add(waiting, stand, 3, length), add(following, stand, 3, length)))
    for steps in (9, patience + 7, 4):
        drafting = False
        for engine in (waiting, following):
            for _ in range(steps):
                engine.step()
        drafting = True
        waiting.step()  # catches up
        drafting = False
        following.step()
        for engine in (waiting, following):
            engine.steps.land_all()
        assert_caught_up(waiting, following, drafter, pairs)
    assert max(script.late) == patience and script.waited > patience and not other.waited
    assert way != CAPTURED or {(kind.waits, kind.behind) for kind in captured(waiting)} >= {
        (True, 0),
        (False, PATIENCE),
    }


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("drafter", HEADS)
def test_identity(stands: dict[str, Stand], way: str, drafter: str) -> None:
    """Depths that come and go change no token, and drafts follow again after each pause."""
    stand = stands[way]
    engine, script = start(stands, way, drafter, lambda request: len(request.output_ids) % 23 > 18)
    requests = add(engine, stand, 7, 70)
    while engine.busy:
        engine.step()
    params = SamplingParams(temperature=0.0, max_tokens=70, ignore_eos=True)
    for request in requests:
        assert request.output_ids == stand.tokens(request.prompt_ids, params)
    assert script.waited and all(request.stats.drafted for request in requests)


@pytest.mark.parametrize("drafter", HEADS)
def test_others_go_on_waiting(stands: dict[str, Stand], drafter: str) -> None:
    """On a host, while some requests read their prompts or draft. What they are to have in the end, they have."""
    stand = stands["at once"]
    eager: list[Request] = []
    engine, _ = start(stands, "at once", drafter, lambda request: request in eager)
    following, _ = start(stands, "at once", drafter, lambda request: False)
    following.steps.planner.waits.patience = 0
    (patient, twin), behind = (add(each, stand, 1, 60)[0] for each in (engine, following)), 0
    for number in range(3):
        for _ in range(4):
            engine.step()
            behind += 1
            assert patient.behind in (behind - 1, behind)  # the first step reads its prompt
        behind = patient.behind
        params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
        eager.append(engine.add(f"other-{number}", [1, 2, 3 + number], params))
    assert patient.behind == 11 and sum(request.stats.drafted for request in eager) > 0
    eager.append(patient)
    engine.step()
    assert not patient.behind
    while len(twin.output_ids) < len(patient.output_ids):
        following.step()
    assert twin.output_ids == patient.output_ids
    for got, wanted in zip(entries(engine, drafter, patient), entries(following, drafter, twin), strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("drafter", HEADS)
def test_padding_never_waits(stands: dict[str, Stand], drafter: str) -> None:
    """Steps that wait are replayed with padding, and the step that catches up runs beside a prompt, without any. Were
    the padding's rows counted, the next replay would look for their outputs behind its own rows."""
    stand, drafting = stands[CAPTURED], False
    engine, script = start(stands, CAPTURED, drafter, lambda request: drafting)
    requests = add(engine, stand, 3, 40)
    for _ in range(PATIENCE - 2):
        engine.step()
    drafting = True
    engine.add("newcomer", [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=1))
    while engine.busy:
        engine.step()
        head = engine.drafters.get(drafter)
        assert isinstance(head, HeadDrafter)
        assert not head._tail.all[1][-1].item()
    assert script.waited and any(kind.waits and kind.requests == 4 for kind in captured(engine))
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    assert [request.output_ids for request in requests] == [stand.tokens(each.prompt_ids, params) for each in requests]


@pytest.mark.parametrize("drafter", HEADS)
def test_pages_are_named_once_they_are_whole(stands: dict[str, Stand], drafter: str) -> None:
    """A request finds no page by its drafter's KV that lacks some of it."""
    stand, way = stands["at once"], "at once"
    engine, _ = start(stands, way, drafter, lambda request: False)
    (first,) = add(engine, stand, 1, PATIENCE - 2)
    while engine.busy:
        engine.step()
    again = engine.add("again", first.token_ids, SamplingParams(temperature=0.0, max_tokens=4))
    engine.step()
    assert again.stats.cached_tokens <= len(first.prompt_ids)


@pytest.mark.parametrize("drafter", HEADS)
@pytest.mark.parametrize("chunk", [5, 64])
def test_prompts_wait(stands: dict[str, Stand], drafter: str, chunk: int) -> None:
    """On a host, whole or in chunks, while nothing is drafted. A head that reads them later has the entries, bit for
    bit, of one that read them at once, and what is drafted then is the same."""
    stand, drafting = stands["at once"], False
    waiting, _ = start(stands, "at once", drafter, lambda request: drafting, drafts=False)
    following, _ = start(stands, "at once", drafter, lambda request: drafting)
    following.steps.planner.waits.patience = 0
    for engine in (waiting, following):
        engine.steps.planner.rows.most = engine.steps.planner.rows.now = chunk
    pairs = list(zip(add(waiting, stand, 2, 40), add(following, stand, 2, 40)))
    while any(one.computed <= len(one.prompt_ids) for one, _ in pairs):
        for engine in (waiting, following):
            engine.step()
    assert all(one.behind == one.computed for one, _ in pairs)
    drafting = True
    waiting.step()  # catches up
    drafting = False
    following.step()
    assert_caught_up(waiting, following, drafter, pairs)
    drafting = True
    assert_drafts_alike(waiting, following, pairs)


@pytest.mark.parametrize("way", DEVICES)
@pytest.mark.parametrize("drafter", HEADS)
@pytest.mark.parametrize("chunk", [7, 64])
def test_prompts_are_read_at_rest(stands: dict[str, Stand], way: str, drafter: str, chunk: int) -> None:
    """On a device, while nothing is drafted: all requests count as a row behind, and what is there after the next
    catch-up is the same, bit for bit, as is what is drafted then."""
    stand, drafting = stands[way], False
    resting, script = start(stands, way, drafter, lambda request: drafting, drafts=False)
    following, _ = start(stands, way, drafter, lambda request: drafting)
    following.steps.planner.waits.patience = 0
    for engine in (resting, following):
        engine.steps.planner.rows.most = engine.steps.planner.rows.now = chunk
    ones, twos = add(resting, stand, 2, 60), add(following, stand, 2, 60)

    def step(times: int) -> None:
        for _ in range(times):
            resting.step()
            following.step()

    step(1)
    assert [one.behind for one in ones] == [1, 0 if chunk == 7 else 1]
    while any(one.computed <= len(one.prompt_ids) for one in ones):
        step(1)
    step(3)
    assert all(one.behind > 1 for one in ones) and script.waited
    assert not any(shape.behind for shape in script.shapes), "a step that only reads on would tell nothing of prompts"
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    for number in range(2):  # a few steps before the catch-up, and right before it
        for engine, requests in ((resting, ones), (following, twos)):
            requests.append(engine.add(f"late-{number}", [3, 2, 1, 4 + number], params))
        step(1)
        assert [one.behind for one in ones] == [1] * len(ones)
        step(3 * (1 - number))
    drafting = True
    resting.step()  # catches up
    drafting = False
    following.step()
    for engine in (resting, following):
        engine.steps.land_all()
    assert any(shape.prompt and shape.behind > len(ones) for shape in script.shapes)
    pairs = list(zip(ones, twos, strict=True))
    assert_caught_up(resting, following, drafter, pairs)
    drafting = True
    assert_drafts_alike(resting, following, pairs)


@pytest.mark.parametrize("way", DEVICES)
@pytest.mark.parametrize("drafter", HEADS)
def test_nobody_rests_beside_a_depth_of_its_own(stands: dict[str, Stand], way: str, drafter: str) -> None:
    """Such a request would have to wait a step for the others before it drafts; and while it drafts, steps may be
    captured ones, which are of one kind. A plain request does not matter."""
    stand = stands[way]
    engine, script = start(stands, way, drafter, lambda request: request.id == "fixed", drafts=False)
    adaptive, _ = add(engine, stand, 2, 60)

    def asked(name: str, **speculation: object) -> Request:
        params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, speculation=speculation)
        return engine.add(name, [3, 2, 1], params)

    engine.step()
    assert adaptive.behind == 1
    plain = asked("plain", drafter="none")
    engine.step()
    assert adaptive.behind == 1 and not plain.behind
    fixed = asked("fixed", depth=DEPTH)
    engine.step()
    while len(fixed.output_ids) < 30:
        assert not adaptive.behind
        engine.step()
    assert fixed.stats.drafted and not script.waited
    while engine.busy:
        engine.step()
    assert fixed.output_ids[:37] == plain.output_ids[:37]


@pytest.mark.parametrize("drafter", HEADS)
def test_prompts_that_begin_alike_are_read(stands: dict[str, Stand], drafter: str) -> None:
    """Pages of a prompt that waits are found by plain requests alone. The first request that finds them so reads its
    prompt at once, so those after it find all pages."""
    stand = stands["at once"]
    engine, _ = start(stands, "at once", drafter, lambda request: False, drafts=False)
    (prompt,) = prompts(stand, 1, seed=3)
    prompt = (prompt * 20)[:19]

    def asked(name: str, **speculation: str) -> Request:
        params = SamplingParams(temperature=0.0, max_tokens=6, speculation=speculation or None)
        request = engine.add(name, prompt, params)
        engine.step()
        return request

    first = asked("first")
    assert first.behind == 19 and not first.stats.cached_tokens
    plain = asked("plain", drafter="none")
    assert plain.stats.cached_tokens == 16
    second = asked("second")
    assert second.rereads and not second.behind and not second.stats.cached_tokens
    third = asked("third")
    assert not third.rereads and third.stats.cached_tokens == 16 and third.behind == 3
    while engine.busy:
        engine.step()
    assert first.output_ids == plain.output_ids == second.output_ids == third.output_ids


def test_prompts_wait_only_where_nothing_is_drafted(stands: dict[str, Stand]) -> None:
    """Not while a depth stands for as many requests as there are, nor of a request with a depth of its own, nor if they
    are longer than what is kept for them."""
    stand, drafter = stands["at once"], HEADS[0]
    engine, script = start(stands, "at once", drafter, lambda request: False, drafts=False)
    long = engine.add("long", [1] * (HOST_PATIENCE + 1), SamplingParams(temperature=0.0, max_tokens=9))
    (short,) = add(engine, stand, 1, 9)
    params = SamplingParams(temperature=0.0, max_tokens=9, speculation={"depth": DEPTH})
    fixed = engine.add("fixed", short.prompt_ids, params)
    engine.step()
    assert not long.behind and short.behind == len(short.prompt_ids) and not fixed.behind
    script._drafts = True
    late = engine.add("late", short.prompt_ids[1:], SamplingParams(temperature=0.0, max_tokens=9))
    engine.step()
    assert not late.behind and short.behind == len(short.prompt_ids) + 1
