"""Law 6: KV is a transaction, and free + cached + held == total, whatever happens in between."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from stridelm import LLM, SamplingParams
from stridelm.cache.ledger import Ledger
from stridelm.faults import EngineFault
from stridelm.params import Speculation
from stridelm.types import Request, Span
from support.checks.identity import FEATURES, LENGTH, check_identity, mixed_jobs, prompts, sampling, teach
from support.doubles.stand import Job, Stand, all_speculations, assert_same
from support.doubles.tree_drafter import registered


def request(name: str, prompt: list[int], **params: Any) -> Request:
    return Request(name, prompt, SamplingParams(**params), Speculation())


def balance(ledger: Ledger) -> None:
    for counts in ledger.counts().values():
        assert counts["free"] + counts["cached"] + counts["held"] == counts["total"]


class Requests(RuleBasedStateMachine):
    """Requests arrive, run steps that are committed or abandoned, and leave; page groups with different needs, prompts
    over a small alphabet."""

    @initialize(
        size=st.integers(1, 5),
        total=st.integers(4, 24),
        window=st.integers(1, 9),
        caching=st.booleans(),
        seed=st.integers(0, 2**30),
    )
    def start(self, size: int, total: int, window: int, caching: bool, seed: int) -> None:
        groups = {"main": total, "other": total + 3, "sliding": total - 1}
        self.ledger = Ledger(
            groups, size, windows={"main": None, "sliding": window}, prefix_caching=caching, strict=True
        )
        self.window = window
        self.running: list[Request] = []
        self.rng = random.Random(seed)
        self.names = 0

    @rule(length=st.integers(1, 14), scored=st.booleans())
    def admit(self, length: int, scored: bool) -> None:
        """A new request starts after the longest cached prefix of full pages, at least one token short of all."""
        prompt = [self.rng.randrange(2) for _ in range(length)]
        one = request(str(self.names), prompt, prompt_logprobs=1 if scored else None)
        self.names += 1
        before = self.ledger.counts()
        hit, idle = self.ledger.match(one)
        assert self.ledger.counts() == before, "a look-up changed something"
        available = self.ledger.available()
        self.ledger.admit(one)
        self.running.append(one)
        assert one.computed == hit < one.known and hit % self.ledger.page_size == 0
        assert self.ledger.available().cover(available - idle)
        assert not (scored and hit), "rows that are to be scored must be run"

    @precondition(lambda self: self.running)
    @rule(drafts=st.integers(0, 6), outcome=st.sampled_from(("commit", "leave", "raise")))
    def step(self, drafts: int, outcome: str) -> None:
        """Slots up to every span's bound; commit keeps the path and gives back the rest, no commit gives back all."""
        spans = self._spans(drafts)
        if not spans:
            return
        before, ends = self._picture(), [span.end - span.draft for span in spans]
        try:
            with self.ledger.reserve(spans) as transaction:
                for span, lease in zip(spans, transaction.leases):
                    assert len(lease.tables["main"]) == -(-span.end // self.ledger.page_size)
                if outcome == "raise":
                    raise KeyError("in the middle of a step")
                if outcome == "commit":
                    kept = [self.rng.randint(0, span.draft) for span in spans]
                    transaction.commit(kept)
        except KeyError:
            assert outcome == "raise"
        if outcome != "commit":
            assert self._picture() == before
            return
        for span, end, rows in zip(spans, ends, kept):
            one = span.request
            # The verifier would have appended these: accepted tokens and the one after them.
            one.output_ids += [self.rng.randrange(2) for _ in range(max(0, one.computed - one.known) + 1)]
            assert one.computed == end + rows
            whole = -(-one.computed // self.ledger.page_size)
            assert all(self.ledger.table(one, "main")) and len(self.ledger.table(one, "main")) == whole
            # Of the sliding group, exactly the pages that the next row sees.
            seen = range(max(0, one.computed - self.window + 1), one.computed)
            needed = {index // self.ledger.page_size for index in seen}
            held = {i for i, page in enumerate(self.ledger.table(one, "sliding")) if page}
            assert needed <= held <= needed | {(one.computed - self.window + 1) // self.ledger.page_size}

    def _spans(self, drafts: int) -> list[Span]:
        spans, spare = [], min(self.ledger.available())
        for one in self.rng.sample(self.running, self.rng.randint(1, len(self.running))):
            owed = one.known - one.computed
            real = self.rng.randint(1, owed)
            span = Span(one, one.computed, real, draft=drafts if real == owed else 0, decides=real == owed)
            need = self.ledger.pages_for(span.end) - self.ledger.table_length(one)
            if need <= spare:
                spare -= need
                spans.append(span)
        return spans

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """Finishing, aborting or preempting gives back at least what the planner was promised."""
        one = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        promised, available = self.ledger.reclaimable(one), self.ledger.available()
        self.ledger.release(one)
        assert one.computed == 0
        assert self.ledger.available().cover(available + promised)

    @rule(data=st.data(), group=st.sampled_from(("main", "other", "sliding")))
    def resize(self, data: st.DataObject, group: str) -> None:
        """A group gets pages, or loses some that no request holds, free ones first; pages keep their names."""
        place = list(self.ledger.counts()).index(group)
        before, available = self.ledger.counts()[group], self.ledger.available()[place]
        total = data.draw(st.integers(max(1, before["total"] - available), before["total"] + 5))
        held = {one.id: [page > 0 for page in self.ledger.table(one, group)] for one in self.running}
        renamed = self.ledger.resize(group, total)
        after = self.ledger.counts()[group]
        lost = max(0, before["total"] - total)
        assert after["total"] == total and after["held"] == before["held"]
        assert after["cached"] == before["cached"] - max(0, lost - before["free"])
        assert all(new <= total < old for old, new in renamed.items())
        assert len(set(renamed.values())) == len(renamed)
        for one in self.running:
            table = self.ledger.table(one, group)
            assert [page > 0 for page in table] == held[one.id] and max(table, default=0) <= total

    @rule()
    def flush(self) -> None:
        """Flushing the cache frees it, and later hits find only what was written later."""
        self.ledger.flush()
        assert all(counts["cached"] == 0 for counts in self.ledger.counts().values())

    @invariant()
    def nothing_is_lost(self) -> None:
        """The balance holds at every moment."""
        if hasattr(self, "ledger"):
            self.ledger.check(self.running)
            balance(self.ledger)

    def teardown(self) -> None:
        if hasattr(self, "ledger"):
            for one in self.running:
                self.ledger.release(one)
            assert all(counts["held"] == 0 for counts in self.ledger.counts().values())

    def _picture(self) -> tuple[Any, ...]:
        """Everything that a step may change. Which idle page was evicted to make room is not undone."""
        counts = self.ledger.counts()
        held = {group: counts[group]["held"] for group in counts}
        tables = [list(self.ledger.table(one, group)) for one in self.running for group in counts]
        return held, tables, [one.computed for one in self.running], self.ledger.available()


TestRequests = Requests.TestCase
TestRequests.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


def run(ledger: Ledger, one: Request) -> list[int]:
    """Admit a request and commit all its known tokens. Returns its pages."""
    ledger.admit(one)
    with ledger.reserve([Span(one, one.computed, one.known - one.computed)]) as transaction:
        transaction.commit([0])
    return list(ledger.table(one, "main"))


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 40), st.integers(1, 6))
@settings(max_examples=150, deadline=None)
def test_hit_gives_the_same_pages(prompt: list[int], common: int, size: int) -> None:
    """Equal prefixes share the same pages, as far as they are equal and full, and no further."""
    ledger = Ledger({"main": 200}, size)
    first = run(ledger, request("a", prompt))
    other = prompt[:common] + [7] + prompt[common:]
    second = request("b", other)
    shared = min(common, len(prompt)) // size
    assert ledger.match(second)[0] == shared * size
    assert run(ledger, second)[:shared] == first[:shared]
    assert not set(ledger.table(second, "main")[shared:]) & set(first)


def test_oldest_goes_first() -> None:
    """When pages run out, the one idle for longest is evicted first; within one request, its tail before its head."""
    ledger = Ledger({"main": 6}, 2)
    old, young = request("old", [1, 2, 3, 4, 5, 6]), request("young", [9, 8, 7, 6])
    for one in (old, young):
        run(ledger, one)
        ledger.release(one)
    assert ledger.counts()["main"] == {"free": 1, "cached": 5, "held": 0, "total": 6}
    expected_old = [4, 4, 2, 0, 0, 0]
    for taken, (left_old, left_young) in enumerate(zip(expected_old, (2, 2, 2, 2, 2, 0)), start=1):
        hog = request(f"hog-{taken}", [50 + taken])
        run(ledger, hog)
        assert ledger.match(request("x", [1, 2, 3, 4, 5, 6]))[0] == left_old
        assert ledger.match(request("y", [9, 8, 7, 6]))[0] == left_young


def test_used_again_is_young_again() -> None:
    """A hit makes a page recent: pages without a hit are evicted before it."""
    ledger = Ledger({"main": 4}, 2)
    a, b = request("a", [1, 1, 1]), request("b", [2, 2, 2])
    for one in (a, b, request("again", [1, 1, 1])):
        run(ledger, one)
        ledger.release(one)
    run(ledger, request("hog", [5] * 5))
    assert ledger.match(request("x", [1, 1, 1]))[0] == 2
    assert ledger.match(request("y", [2, 2, 2]))[0] == 0


def test_commit_only_once() -> None:
    """A transaction commits once; then it is closed."""
    ledger = Ledger({"main": 4}, 2)
    one = request("a", [1, 2, 3])
    ledger.admit(one)
    with ledger.reserve([Span(one, one.computed, 3)]) as transaction:
        transaction.commit([0])
        with pytest.raises(AssertionError, match="once"):
            transaction.commit([0])


def corrupt_count(ledger: Ledger, one: Request) -> None:
    ledger._pages["main"]._free.pop()


def corrupt_hold(ledger: Ledger, one: Request) -> None:
    ledger._pages["main"]._holders[ledger.table(one, "main")[0]] += 1


def corrupt_table(ledger: Ledger, one: Request) -> None:
    ledger.table(one, "main").pop()
    ledger._leases[one.id].length -= 1


def corrupt_length(ledger: Ledger, one: Request) -> None:
    ledger._leases[one.id].length += 1


def corrupt_lease(ledger: Ledger, one: Request) -> None:
    ledger.admit(request("stray", [1, 2]))


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (corrupt_count, r"page group main: free 2 \+ cached 0 \+ held 3 != total 6"),
        (corrupt_hold, r"page 1 held 2 times, in 1 tables"),
        (corrupt_table, r"page 3 held 1 times, in 0 tables"),
        (corrupt_length, r"a table of 3 pages and should have 4"),
        (corrupt_lease, r"leases without a running request: stray"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_check_names_the_leak(corrupt: Callable[[Ledger, Request], None], message: str) -> None:
    """The check says what is wrong and where."""
    ledger = Ledger({"main": 6}, 2)
    one = request("a", [1, 2, 3, 4, 5])
    run(ledger, one)
    ledger.check([one])
    corrupt(ledger, one)
    with pytest.raises(RuntimeError, match=message):
        ledger.check([one])


def test_strict_checks_at_every_step(checkpoint: Callable[..., Path]) -> None:
    """In strict mode a leak is found in the step that caused it, otherwise when `check` is called."""
    stand = Stand(checkpoint("qwen3", tie_word_embeddings=True), "float32")
    for strict in (True, False):
        llm = stand.llm(strict=strict)
        llm.engine.add("a", [1, 2, 3], SamplingParams(max_tokens=4))
        llm.engine.step()
        llm.engine.ledger._pages["full"]._free.pop()
        if strict:
            with pytest.raises(RuntimeError, match="free"):
                llm.engine.step()
        else:
            llm.engine.step()
        with pytest.raises(RuntimeError, match="free"):
            llm.check()


STAGES = ("propose", "forward", "verify", "compact", "commit", "observe")


@pytest.fixture
def _trees() -> Iterator[None]:
    with registered():
        yield


@pytest.mark.usefixtures("_trees")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("stage", STAGES)
def test_failing_step_loses_nothing(
    checkpoint: Callable[..., Path], stage: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that raises in any stage gives its pages back, and the next step runs as if it had not happened."""
    stand = Stand(checkpoint("qwen3", tie_word_embeddings=True), "float32")
    jobs = mixed_jobs(stand, 8, temperature, sorted(FEATURES)[:5], seed=1)
    lossy = [
        Job(p, SamplingParams(max_tokens=LENGTH, temperature=temperature, seed=3, ignore_eos=True), kind)
        for p, kind in zip(prompts(stand, 4, seed=2), all_speculations(stand, "trust"))
    ]
    for job in jobs:
        teach(stand, job)
    llm = stand.llm(page_size=3, max_num_batched_tokens=160)
    engine = llm.engine
    requests = [engine.add(str(i), job.prompt, job.request) for i, job in enumerate([*jobs, *lossy])]
    fail = _failing(llm, stage, monkeypatch)
    for turn in range(200):
        if not engine.busy:
            break
        if turn % 3 == 1 and not engine.doubts.any:
            said = [list(r.output_ids) for r in requests]
            fail.append(True)
            assert engine.step() == []
            assert [r.output_ids for r in requests] == said
            llm.check()
        engine.step()
    assert not engine.busy
    assert engine.ledger.counts()["full"]["held"] == 0
    for job, one in zip([*jobs, *lossy], requests):
        wanted = (stand.alone(job) if job in lossy else stand.plain(job.prompt, job.params)).outputs[0]
        assert (one.output_ids, one.finish_reason) == (wanted.token_ids, wanted.finish_reason), job


def _failing(llm: LLM, stage: str, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Make a stage of the step raise once for every entry appended to the returned list."""
    owner, name = {
        "propose": (llm.engine.drafters, "propose"),
        "forward": (llm.engine.runner, "forward"),
        "verify": (llm.engine.device.verifier, "_inputs"),
        "compact": (llm.engine.loaded.pool, "keep"),
        "commit": (llm.engine.ledger, "advance"),
        "observe": (llm.engine.drafters, "observe"),
    }[stage]
    work = getattr(owner, name)
    fail: list[bool] = []

    def maybe(*args: Any, **options: Any) -> Any:
        if fail:
            fail.pop()
            raise ConnectionError("the device went away")
        return work(*args, **options)

    monkeypatch.setattr(owner, name, maybe)
    return fail


@pytest.mark.usefixtures("_trees")
def test_failing_generate_leaves_no_request(checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """`generate` raises if the engine always fails, and removes its requests; once the engine works again, it serves
    the next call."""
    stand = Stand(checkpoint("qwen3", tie_word_embeddings=True), "float32")
    llm = stand.llm()
    fail = _failing(llm, "forward", monkeypatch)
    fail += [True] * 100
    with pytest.raises(EngineFault):
        llm.generate(prompts(stand, 4), SamplingParams(max_tokens=5))
    fail.clear()
    assert not llm.engine.busy
    llm.check()
    check_identity(stand, mixed_jobs(stand, 6, 1.0, ["nothing"]), llm=llm)
    one = Job(prompts(stand, 1)[0], sampling(stand, prompts(stand, 1)[0], 0.7, "everything"), {"drafter": "none"})
    assert_same(stand.run([one], llm=llm)[0], stand.plain(one.prompt, one.params))
