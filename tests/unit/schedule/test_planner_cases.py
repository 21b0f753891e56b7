"""The planner's difficult cases, one at a time: what is cut, what is left out, who is preempted and who must wait."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import stridelm.schedule
from stridelm.params import SamplingParams, Speculation
from stridelm.schedule import Budget, Planner, Queue, smallest_budget
from stridelm.schedule.depth import NOBODY, Others
from stridelm.types import PageCounts, Request, Status, StepPlan
from support.doubles.depths import AtMost
from support.doubles.prompt_rows import AtMostRows


@dataclass
class Pages:
    """A fake page view: table sizes, hits and what preemption would give back are simply set."""

    free: int = 1000
    page_size: int = 4
    tables: dict[str, int] = field(default_factory=dict)
    shared: dict[str, int] = field(default_factory=dict)
    hits: dict[str, tuple[int, int]] = field(default_factory=dict)

    def available(self) -> PageCounts:
        return PageCounts((self.free,))

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def table_length(self, request: Request) -> int:
        return self.tables.get(request.id, 0)

    def growth(self, request: Request, pages: int) -> PageCounts:
        return PageCounts((pages,))

    def reclaimable(self, request: Request) -> PageCounts:
        return PageCounts((self.tables.get(request.id, 0) - self.shared.get(request.id, 0),))

    def match(self, request: Request) -> tuple[int, PageCounts]:
        length, idle = self.hits.get(request.id, (0, 0))
        return length, PageCounts((idle,))


def request(
    name: str,
    prompt: int,
    arrival: int = 0,
    *,
    draft: int = 0,
    rows_by_depth: tuple[int, ...] | None = None,
    all_or_nothing: bool = False,
    emitted: int = 0,
    max_tokens: int | None = 100,
    priority: int = 0,
    tenant: str = "",
) -> Request:
    return Request(
        id=name,
        prompt_ids=[1] * prompt,
        params=SamplingParams(max_tokens=max_tokens),
        speculation=Speculation(),
        rows_by_depth=tuple(range(draft + 1)) if rows_by_depth is None else rows_by_depth,
        all_or_nothing=all_or_nothing,
        priority=priority,
        arrival=arrival,
        tenant=tenant,
        output_ids=[2] * emitted,
    )


def start(queue: Queue, pages: Pages, item: Request, computed: int | None = None) -> Request:
    """Make a request run with `computed` tokens committed (all but the last one known, unless given)."""
    queue.add(item)
    queue.apply(StepPlan(admitted=(item,)))
    item.computed = item.known - 1 if computed is None else computed
    pages.tables.setdefault(item.id, -(-item.computed // pages.page_size))
    return item


def shape(plan: StepPlan) -> list[tuple[str, int, int, bool]]:
    return [(span.request.id, span.real, span.draft, span.decides) for span in plan.spans]


def setup(tokens: int, requests: int = 8, **pages: object) -> tuple[Planner, Queue, Pages]:
    return Planner(Budget(tokens, requests)), Queue(requests), Pages(**pages)  # type: ignore[arg-type]


def test_an_empty_queue_gives_an_empty_plan() -> None:
    planner, queue, pages = setup(8)
    assert planner.plan(queue, pages) == StepPlan()


def test_a_prompt_is_cut_into_chunks_and_only_the_last_decides() -> None:
    planner, queue, pages = setup(10)
    item = request("a", 25, draft=3)
    queue.add(item)
    assert shape(planner.plan(queue, pages)) == [("a", 10, 0, False)]
    queue.remove("a")
    item = start(queue, pages, request("a", 25, draft=3), computed=20)
    assert shape(planner.plan(queue, pages)) == [("a", 5, 3, True)]


@pytest.mark.parametrize("blind", [True, False])
def test_a_prompt_that_the_drafter_has_to_see_first_ends_without_a_draft(blind: bool) -> None:
    planner, queue, pages = setup(20)
    ending, decoding = request("a", 5, draft=3), request("b", 5, draft=3)
    ending.needs_states = decoding.needs_states = blind
    start(queue, pages, decoding)
    queue.add(ending)
    assert shape(planner.plan(queue, pages)) == [("b", 1, 3, True), ("a", 5, 0 if blind else 3, True)]


def test_a_long_prompt_does_not_stop_the_decodes_behind_it() -> None:
    """The older prompt gets what the decodes leave; their real rows come before it, their drafts after it."""
    planner, queue, pages = setup(16)
    start(queue, pages, request("long", 500, 0), computed=0)
    start(queue, pages, request("b", 8, 1, draft=4, emitted=1))
    start(queue, pages, request("c", 8, 2, draft=4, emitted=1))
    assert shape(planner.plan(queue, pages)) == [("long", 14, 0, False), ("b", 1, 0, True), ("c", 1, 0, True)]


def test_a_small_prompt_is_read_beside_long_ones() -> None:
    """Newcomers that take a tenth of the prompt rows together are read at once; the earlier prompts get the rest."""
    planner, queue, pages = setup(1000, free=10_000)
    for n in range(2):
        start(queue, pages, request(f"long{n}", 3000, n, tenant="a"), computed=0)
    queue.add(request("small", 60, 2, tenant="b"))
    queue.add(request("too", 50, 3, tenant="c"))
    plan = planner.plan(queue, pages)
    assert shape(plan) == [("long0", 939, 0, False), ("long1", 1, 0, False), ("small", 60, 0, True)]


def test_a_small_prompt_waits_for_longer_newcomers_before_it() -> None:
    """No newcomer is overtaken by another."""
    planner, queue, pages = setup(1000)
    start(queue, pages, request("long", 3000, 0), computed=0)
    queue.add(request("next", 3000, 1))
    queue.add(request("small", 60, 2))
    assert shape(planner.plan(queue, pages)) == [("long", 1000, 0, False)]


@pytest.mark.parametrize(("priority", "read"), [(-1, True), (0, True), (1, False)])
def test_a_small_prompt_does_not_go_before_more_urgent_ones(priority: int, read: bool) -> None:
    planner, queue, pages = setup(1000)
    start(queue, pages, request("long", 3000, 0), computed=0)
    queue.add(request("small", 60, 1, priority=priority))
    assert [admitted.id for admitted in planner.plan(queue, pages).admitted] == (["small"] if read else [])


def test_long_prompts_are_not_starved_by_small_ones() -> None:
    """However many small prompts come, a long one keeps nine tenths of the rows."""
    planner, queue, pages = setup(1000, 64, free=10_000)
    start(queue, pages, request("long", 9000, 0), computed=0)
    for n in range(50):
        queue.add(request(f"small{n}", 7, n + 1, tenant=str(n)))
    plan = planner.plan(queue, pages)
    assert shape(plan)[0] == ("long", 1000 - 14 * 7, 0, False) and len(plan.admitted) == 14


def test_the_draft_shrinks_to_the_deepest_depth_that_rows_allow() -> None:
    """Only the listed depths are used: with 5 rows left, a draft of 6 rows falls back to the depth with 2."""
    planner, queue, pages = setup(6)
    start(queue, pages, request("a", 8, rows_by_depth=(0, 2, 6), emitted=1))
    (span,) = planner.plan(queue, pages).spans
    assert (span.real, span.depth, span.draft) == (1, 1, 2)


def test_a_policy_says_how_deep_and_the_planner_whether_there_is_room() -> None:
    """The policy is not asked about an all-or-nothing window, and cannot exceed what could still be emitted."""
    _, queue, pages = setup(64)
    start(queue, pages, request("a", 8, 0, draft=6, emitted=1))
    start(queue, pages, request("b", 8, 1, draft=6, emitted=98))
    start(queue, pages, request("w", 8, 2, draft=3, all_or_nothing=True, emitted=1))
    for levels, drafts in ((0, [0, 0, 3]), (1, [1, 1, 3]), (4, [4, 1, 3])):
        plan = Planner(Budget(64, 8), AtMost(levels)).plan(queue, pages)
        assert [span.draft for span in plan.spans] == drafts
    assert [span.draft for span in Planner(Budget(6, 8), AtMost(4)).plan(queue, pages).spans][:2] != [4, 1]


def test_drafts_leave_the_pages_of_the_next_step() -> None:
    """With a step unread, a draft does not take the page that another request's next row needs. If there is none for
    that row either, drafts stay on the page that their request is on anyway."""
    _, queue, pages = setup(64)
    start(queue, pages, request("a", 5, 0, draft=3, emitted=1))
    start(queue, pages, request("b", 7, 1, draft=3, emitted=1))
    for free, lag, drafts in ((1, 0, [3, 0]), (1, 1, [1, 3]), (0, 1, [1, 0]), (2, 1, [3, 3])):
        pages.free = free
        assert [span.draft for span in Planner(Budget(64, 8), lag=lag).plan(queue, pages).spans] == drafts


def test_drafts_keep_nobody_waiting() -> None:
    """Sixteen that would draft 64 rows each, in a budget of 1,024: a new request's prompt is run at once, and the
    drafts share the rest."""
    planner, queue, pages = setup(1024, 32, free=400)
    for n in range(16):
        start(queue, pages, request(f"r{n}", 8, n, draft=64, emitted=1, max_tokens=500))
    queue.add(request("new", 300, 20))
    plan = planner.plan(queue, pages)
    assert shape(plan)[-1][:2] == ("new", 300) and [r.id for r in plan.admitted] == ["new"]
    assert plan.rows == 1024 and plan.spans[0].draft == 64


def test_windows_that_wait_for_rows_keep_nobody_waiting() -> None:
    """Two windows of 3 + 3 rows in a budget of 9 leave a new request three rows."""
    planner, queue, pages = setup(9, 4, free=40)
    for arrival, name in enumerate("ab"):
        start(queue, pages, request(name, 8, arrival, draft=3, all_or_nothing=True, emitted=3), computed=8)
    queue.add(request("new", 20, 2))
    assert shape(planner.plan(queue, pages)) == [("a", 3, 3, True), ("new", 3, 0, False)]


def test_the_draft_shrinks_to_the_pages_before_anyone_is_preempted() -> None:
    planner, queue, pages = setup(64, free=0)
    start(queue, pages, request("a", 14, 0, draft=6))  # 13 computed, 4 pages: rows up to 16 fit
    start(queue, pages, request("b", 14, 1, draft=6))
    plan = planner.plan(queue, pages)
    assert shape(plan) == [("a", 1, 2, True), ("b", 1, 2, True)] and not plan.preempted


def test_a_chunk_is_cut_to_the_pages() -> None:
    planner, queue, pages = setup(64, free=3)
    start(queue, pages, request("a", 60), computed=0)
    assert shape(planner.plan(queue, pages)) == [("a", 12, 0, False)]


@pytest.mark.parametrize(("left", "depth"), [(1, 0), (2, 1), (3, 2), (50, 4)])
def test_no_draft_row_beyond_max_tokens(left: int, depth: int) -> None:
    planner, queue, pages = setup(64)
    start(queue, pages, request("a", 8, draft=4, emitted=5, max_tokens=5 + left))
    assert planner.plan(queue, pages).spans[0].depth == depth


def test_without_max_tokens_the_ladder_is_the_limit() -> None:
    planner, queue, pages = setup(64)
    start(queue, pages, request("a", 8, draft=4, emitted=500, max_tokens=None))
    assert planner.plan(queue, pages).spans[0].depth == 4


def test_a_window_is_not_shrunk_for_max_tokens() -> None:
    planner, queue, pages = setup(64)
    start(queue, pages, request("a", 8, draft=4, all_or_nothing=True, emitted=5, max_tokens=6))
    assert shape(planner.plan(queue, pages)) == [("a", 1, 4, True)]


def test_a_whole_prompt_in_a_small_budget_ends_with_its_window() -> None:
    """100 tokens, 10 rows, 3 probes: chunks of 10, then one that leaves a row, then that row and the
    window."""
    planner, queue, pages = setup(10)
    item = start(queue, pages, request("a", 100, draft=3, all_or_nothing=True), computed=0)
    seen = []
    while item.computed < item.known:
        (span,) = planner.plan(queue, pages).spans
        seen.append((span.real, span.draft))
        item.computed += span.real
    assert seen == [(10, 0)] * 9 + [(9, 0), (1, 3)]


def test_a_window_waits_when_it_does_not_fit_and_others_use_the_rows() -> None:
    """Two windows of 3 + 3 rows in a budget of 9: the younger is deferred, not cut, and a decode runs
    meanwhile."""
    planner, queue, pages = setup(9)
    for arrival, name in enumerate("ab"):
        start(queue, pages, request(name, 8, arrival, draft=3, all_or_nothing=True, emitted=3), computed=8)
    start(queue, pages, request("c", 8, 2, draft=5))
    assert shape(planner.plan(queue, pages)) == [("a", 3, 3, True), ("c", 1, 2, True)]


def test_windows_come_before_the_drafts_of_better_ranked_requests() -> None:
    """b has to run the 4 tokens of a full window: with 3 probes, 7 rows that a's draft may not take."""
    planner, queue, pages = setup(10)
    start(queue, pages, request("a", 8, 0, draft=7))
    start(queue, pages, request("b", 8, 1, draft=3, all_or_nothing=True, emitted=4), computed=8)
    assert shape(planner.plan(queue, pages)) == [("a", 1, 2, True), ("b", 4, 3, True)]


def test_smallest_budget_holds_a_window_and_what_it_leaves() -> None:
    assert smallest_budget(request("a", 8, draft=4)) == 1
    assert smallest_budget(request("a", 8, draft=4, all_or_nothing=True)) == 9
    assert smallest_budget(request("a", 8, draft=0, all_or_nothing=True)) == 1


def test_the_last_in_rank_is_preempted_and_nobody_admitted() -> None:
    planner, queue, pages = setup(64, free=0)
    start(queue, pages, request("a", 13, 0))  # 12 computed in 3 full pages: needs a page
    start(queue, pages, request("b", 14, 1))
    start(queue, pages, request("c", 14, 2))
    queue.add(request("d", 2, 3))
    plan = planner.plan(queue, pages)
    assert [r.id for r in plan.preempted] == ["c"] and plan.admitted == ()
    assert shape(plan) == [("a", 1, 0, True), ("b", 1, 0, True)]


def test_priority_decides_who_is_preempted() -> None:
    planner, queue, pages = setup(64, free=0)
    start(queue, pages, request("old", 13, 0, priority=1))
    start(queue, pages, request("urgent", 13, 9, priority=0))
    plan = planner.plan(queue, pages)
    assert [r.id for r in plan.preempted] == ["old"] and shape(plan) == [("urgent", 1, 0, True)]


def test_preempting_whom_nothing_can_be_taken_from_is_pointless() -> None:
    """c shares all its pages, so b is preempted although it ranks better."""
    planner, queue, pages = setup(64, free=0)
    start(queue, pages, request("a", 13, 0))
    start(queue, pages, request("b", 14, 1))
    start(queue, pages, request("c", 14, 2))
    pages.shared["c"] = 4
    plan = planner.plan(queue, pages)
    assert [r.id for r in plan.preempted] == ["b"]
    assert shape(plan) == [("a", 1, 0, True), ("c", 1, 0, True)]


def test_the_last_one_waits_for_pages_and_keeps_its_own() -> None:
    planner, queue, pages = setup(64, free=0)
    start(queue, pages, request("a", 14, 0))
    start(queue, pages, request("b", 13, 1))
    plan = planner.plan(queue, pages)
    assert shape(plan) == [("a", 1, 0, True)] and not plan.preempted


def test_the_first_one_clears_the_house_when_only_shared_pages_are_left() -> None:
    """b and c share every page, so neither alone gives any back. Both are preempted; the next plan gets the pages."""
    planner, queue, pages = setup(64, free=0)
    a = start(queue, pages, request("a", 13, 0))
    for arrival, name in enumerate("bc", start=1):
        start(queue, pages, request(name, 13, arrival))
        pages.shared[name] = 3
    plan = planner.plan(queue, pages)
    assert [r.id for r in plan.preempted] == ["c", "b"] and plan.spans == ()
    for victim in plan.preempted:
        victim.computed = pages.tables[victim.id] = 0
    queue.apply(plan)
    pages.free = 3
    assert planner.plan(queue, pages).spans[0].request is a


def test_admission_starts_behind_the_prefix_hit_and_pays_for_idle_pages() -> None:
    """Known 10, hit 8 on two pages, one of them idle: 2 real rows, and the idle page plus a new one are
    spent."""
    planner, queue, pages = setup(64, free=2)
    pages.hits["a"] = (8, 1)
    item = request("a", 10, draft=8)
    queue.add(item)
    plan = planner.plan(queue, pages)
    assert shape(plan) == [("a", 2, 2, True)] and plan.admitted == (item,)
    item.computed = 8
    assert plan.spans[0].end == 12


def test_a_newcomer_must_fit_whole_beside_the_running() -> None:
    """Its first chunk would fit but not its prompt, and admitting it would only have it preempted."""
    planner, queue, pages = setup(8, free=6)
    start(queue, pages, request("a", 14))
    queue.add(request("b", 24, 1))
    assert planner.plan(queue, pages).admitted == ()
    pages.free = 8  # 6 for its tokens, one for it to grow into, one for a to grow into
    assert [r.id for r in planner.plan(queue, pages).admitted] == ["b"]


def test_a_newcomer_need_not_leave_room_for_one_about_to_end() -> None:
    planner, queue, pages = setup(8, free=7)
    start(queue, pages, request("a", 14, max_tokens=3))  # ends within its 4 pages
    queue.add(request("b", 24, 1))
    assert [r.id for r in planner.plan(queue, pages).admitted] == ["b"]


def test_the_first_that_does_not_fit_stops_admission() -> None:
    planner, queue, pages = setup(64, free=3)
    start(queue, pages, request("a", 14))
    queue.add(request("big", 40, 1))
    queue.add(request("small", 1, 2, max_tokens=1))
    assert planner.plan(queue, pages).admitted == ()


def test_slots_and_rows_limit_admission() -> None:
    planner, queue, pages = setup(5, requests=2)
    for arrival, name in enumerate("abc"):
        queue.add(request(name, 2, arrival, draft=1))
    assert shape(planner.plan(queue, pages)) == [("a", 2, 1, True), ("b", 2, 0, True)]


def test_the_better_ranked_waits_in_front() -> None:
    planner, queue, pages = setup(64, requests=1)
    queue.add(request("old", 2, 0, priority=1))
    queue.add(request("urgent", 2, 5, priority=0))
    assert [r.id for r in planner.plan(queue, pages).admitted] == ["urgent"]


def test_tenants_wait_by_their_place_in_their_own_line() -> None:
    planner, queue, pages = setup(64, 3)
    for n in range(4):
        queue.add(request(f"many{n}", 5, n, tenant="many"))
    queue.add(request("one", 5, 9, tenant="one"))
    assert [r.id for r in planner.plan(queue, pages).admitted] == ["many0", "one", "many1"]


def test_who_runs_most_makes_way_for_who_runs_nothing() -> None:
    planner, queue, pages = setup(64, 3)
    for n in range(3):
        start(queue, pages, request(f"many{n}", 5, n, tenant="many"))
    queue.add(request("one", 5, 9, tenant="one"))
    plan = planner.plan(queue, pages)
    assert [r.id for r in plan.preempted] == ["many2"] and not plan.admitted and len(plan.spans) == 2
    many2 = plan.preempted[0]
    many2.computed = 0
    queue.apply(plan)
    plan = planner.plan(queue, pages)
    assert [r.id for r in plan.admitted] == ["one"] and not plan.preempted
    queue.apply(plan)
    queue.add(request("two", 5, 10, tenant="one"))
    assert not planner.plan(queue, pages).preempted  # two of the one beside one of the other would be no fairer


def test_nobody_makes_way_for_a_newcomer_of_less_priority() -> None:
    planner, queue, pages = setup(64, 2)
    for n in range(2):
        start(queue, pages, request(f"many{n}", 5, n, tenant="many"))
    queue.add(request("one", 5, 9, tenant="one", priority=1))
    assert not planner.plan(queue, pages).preempted


def test_a_tenants_first_prompt_is_read_before_anothers_second() -> None:
    planner, queue, pages = setup(64)
    for n in range(2):
        start(queue, pages, request(f"many{n}", 500, n, tenant="many"), computed=0)
    first = start(queue, pages, request("one", 500, 9, tenant="one"), computed=480)
    assert shape(planner.plan(queue, pages))[0] == ("many0", 62, 0, False)
    queue.remove("many0")
    plan = shape(planner.plan(queue, pages))
    assert plan == [("many1", 63, 0, False), ("one", 1, 0, False)]
    first.arrival = 0  # the same place, and it arrived first
    queue.remove("one")
    first.slot, first.status, first.computed = -1, Status.WAITING, 0
    queue.add(first)
    assert shape(planner.plan(queue, pages)) == [("many1", 1, 0, False), ("one", 63, 0, False)]


def test_rows_in_flight_count_as_pages_but_not_as_tokens() -> None:
    """A verify step of 4 rows is in flight: the next span has one real row and may begin up to 4 rows later."""
    planner, queue, pages = setup(64)
    item = start(queue, pages, request("a", 9, draft=3))
    item.rows_in_flight = 4
    (span,) = planner.plan(queue, pages).spans
    assert (span.real, span.draft, span.decides, span.end) == (1, 3, True, 16)
    pages.free = 0  # 2 pages: storage [0, 8); the span would begin at 12 in the worst case
    assert planner.plan(queue, pages).spans == ()


def test_the_chunk_behind_one_in_flight_is_exact() -> None:
    planner, queue, pages = setup(10)
    item = start(queue, pages, request("a", 25, draft=3), computed=0)
    item.rows_in_flight = 10
    assert shape(planner.plan(queue, pages)) == [("a", 10, 0, False)]
    item.rows_in_flight = 20
    assert shape(planner.plan(queue, pages)) == [("a", 5, 3, True)]


def test_a_window_in_flight_leaves_at_most_what_it_can_emit() -> None:
    planner, queue, pages = setup(64)
    item = start(queue, pages, request("a", 9, draft=3, all_or_nothing=True))
    item.rows_in_flight = 4
    assert shape(planner.plan(queue, pages)) == [("a", 4, 3, True)]


def test_budgets_are_refused_with_a_remedy() -> None:
    with pytest.raises(ValueError, match="max_num_batched_tokens must be at least 1"):
        Budget(0, 1)
    with pytest.raises(ValueError, match="max_num_seqs must be at least 1"):
        Budget(1, 0)


def test_the_planner_needs_no_torch() -> None:
    for source in Path(stridelm.schedule.__file__).parent.glob("*.py"):
        assert "torch" not in source.read_text(), source.name


def test_prompts_beside_decodes_get_the_rows_that_the_policy_allows() -> None:
    """It is told how many rows the decodes have, drafts included; those get theirs although the prompt is older."""
    _, queue, pages = setup(64)
    policy = AtMostRows(20)
    start(queue, pages, request("long", 500, 0), computed=0)
    start(queue, pages, request("b", 8, 1, draft=4, emitted=1))
    plan = Planner(Budget(64, 8), prompts=policy).plan(queue, pages)
    assert shape(plan) == [("long", 21, 0, False), ("b", 1, 4, True)]
    assert policy.asked == [5]


def test_the_policy_is_told_how_many_prompt_rows_wait() -> None:
    """Of running requests, and of as many waiting ones as there are slots: a newcomer without one cannot be read."""
    _, queue, pages = setup(64, 4)
    policy = AtMostRows(20)
    start(queue, pages, request("long", 500, 0), computed=100)
    start(queue, pages, request("b", 8, 1, emitted=1))
    for number in range(3):
        queue.add(request(f"new {number}", 30 + number, 2 + number))
    Planner(Budget(64, 4), prompts=policy).plan(queue, pages)
    assert policy.waiting == [399 + 30 + 31]


def test_the_depth_policy_is_told_how_many_will_join() -> None:
    """Whose prompts are read, and who waits for one of the slots, while a prompt is being read; nobody otherwise: they
    may wait for pages."""
    planner, queue, pages = setup(20, requests=5)
    told: list[tuple[list[str], int]] = []

    class Told(AtMost):
        def depths(self, requests: Sequence[Request], others: Others = NOBODY) -> Sequence[int]:
            told.append(([each.id for each in requests], others.joining))
            return super().depths(requests, others)

    planner.depths = Told(0)
    start(queue, pages, request("decodes", 5, 0))
    queue.add(request("waits", 3, 1))
    planner.plan(queue, pages)
    assert told == [(["decodes"], 0), (["waits"], 0)]
    queue.remove("waits")
    start(queue, pages, request("reads", 50, 2), computed=0)
    for number in range(7):
        queue.add(request(f"waits {number}", 3, 3 + number))
    told.clear()
    planner.plan(queue, pages)
    assert told == [(["decodes"], 1 + 3)]


def test_a_newcomer_waits_while_prompts_have_all_their_rows() -> None:
    _, queue, pages = setup(64)
    start(queue, pages, request("long", 500, 0), computed=0)
    start(queue, pages, request("b", 8, 1, emitted=1))
    queue.add(request("new", 30, 2))
    assert not Planner(Budget(64, 8), prompts=AtMostRows(20)).plan(queue, pages).admitted


def test_prompts_have_the_whole_step_while_nobody_decodes() -> None:
    _, queue, pages = setup(64)
    policy = AtMostRows(1)
    start(queue, pages, request("long", 500, 0), computed=0)
    queue.add(request("new", 30, 1))
    plan = Planner(Budget(64, 8), prompts=policy).plan(queue, pages)
    assert shape(plan) == [("long", 64, 0, False)] and not policy.asked
