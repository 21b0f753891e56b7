"""Depths that are chosen while an engine runs: when a choice is made, for whom it stands, and what steps teach.

Which choice makes the most tokens per second is for schedule/rates.py to say. How deep each request drafts is settled
when a choice is made, and stands until the next one, so that rows stay those that were chosen: where steps are padded
to captured sizes, a row more than fits into one costs as much as all of the next.

For steps that go on with prompts a choice is made as one is planned, since prompts come and go, and by what is known of
chances, not hoped: what is tried there is paid for by those who wait. It stands as long as others do, or until other
prompts are read.

A step that lands is looked at together with the few after it, unless a probe waits for what it tells: between two
steps the caches are cold, so that one look takes five times as long as those after it.

What is not chosen is not learnt about, so now and then a step probes a depth beside it (schedule/probes.py).

Legend: P places in the table of requests (schedule/known.py), R requests, D levels, S steps.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain

import numpy as np

from stridelm.params import SamplingParams, Speculation
from stridelm.schedule.acceptance import Acceptance, Allowed, Readers
from stridelm.schedule.counts import stair
from stridelm.schedule.decided import Decided
from stridelm.schedule.depth import NOBODY, Others
from stridelm.schedule.depth_figures import Choice, DepthFigures, is_free
from stridelm.schedule.depth_loops import deepest_of, own_depths, sums
from stridelm.schedule.found import FoundDrafts
from stridelm.schedule.known import UNDECIDED
from stridelm.schedule.landings import Landed, Landings
from stridelm.schedule.probes import DEEPEST, SOONEST, Chosen, Load, Loads, are_about_as_many
from stridelm.schedule.rates import Rates
from stridelm.schedule.row_stairs import RowStairs
from stridelm.schedule.rows import decoded_rows, first_row, has_prompt
from stridelm.schedule.step_cost import StepCost
from stridelm.schedule.step_shape import StepShape, shape_of
from stridelm.schedule.urgency import keep_pace
from stridelm.types import Request, Span

PAUSE = 16
"""Steps between two choices, and most that are looked at together."""
PLAINLY, BESIDE = 4, 2
"""How many times as long depth 0 stands, and a choice if the steps read prompts."""
LONG = PAUSE * PLAINLY * BESIDE
"""Steps after which a choice is due in any case."""
PLAIN_STEPS = 2
"""Of a probe of plain decoding, as long as it is not known how much longer the first takes for coming after one that
drafts: the second tells."""
LOOKS, LONGEST = 16, 4
"""That what one takes is averaged over, and how many times as long as that one may take: something else delays some."""
MANY = 16
"""Requests from which on steps of which only a part drafts are tried, too."""


@dataclass
class _Beside:
    """The choice that plans make for steps that go on with prompts."""

    chosen: Chosen
    joining: int
    """How many are to join."""
    steps: int = 0
    """That have landed since it was made."""

    def is_for(self, requests: int, joining: int) -> bool:
        return self.steps < PAUSE and self.joining == joining and self.chosen.is_for(requests)


class Adaptive:
    """Requests of one step share its cost, so their depths are chosen together. Those that are not adaptive keep their
    own depth, and count."""

    def __init__(self, cost: StepCost | None = None, clock: Callable[[], float] | None = None) -> None:
        """cost: shared with others that ask what steps take; by default the policy's own. clock: tells seconds, so that
        the policy knows what it takes itself; None: nothing, by default, as it depends on nothing but its calls
        then."""
        self.cost, self._clock = cost or StepCost(), clock
        self._looking = 0.0
        """Seconds that it takes to look at steps."""
        self._parted: set[int] = set()
        """Numbers of requests, as stairs, of which only a part was once tried to draft."""
        self.acceptance = Acceptance()
        self.rates = Rates(self.cost, self.acceptance)
        self.keep_costs()

    def clear(self) -> None:
        self.cost.clear()
        self._parted.clear()
        self.keep_costs()

    def keep_costs(self) -> None:
        """Forget all but what steps cost."""
        self.figures = DepthFigures()
        self.forget()

    def forget(self) -> None:
        """Forget what was learnt from requests, and what was chosen by it."""
        self.acceptance.forget()
        self.figures.gain = None
        self.found = FoundDrafts(self.cost, self.figures)
        """Chooses where all that draft have looked up what."""
        self._by_found = False
        """Whether it has for the latest plan that asked. Steps land before the next is planned where drafters look."""
        self._loads = Loads()
        """What is done at each number of requests."""
        self._decided = Decided([], [], [])
        """By the latest plan."""
        self._told: list[Decided] = []
        """All that the latest plan was told: a plan may ask for some requests after others."""
        self._repeats = False
        """Whether that is `_decided`, and nothing else."""
        self._beside: _Beside | None = None
        """The latest choice for steps that go on with prompts."""
        self._reads = False
        """Whether it is the one that the latest plan follows."""
        self._new: dict[int, int] = {}
        """Place in the table -> depth of a request that plans decided on first. It stands once a step has landed."""
        self._came = 0
        """How many such requests there were since the latest choice."""
        self._latest = DEEPEST
        """The choice made last, which stands."""
        self._standing = 0
        """Steps for which depths have been what they are; LONG once they are to be decided on again."""
        self._unseen = Landings()
        self._probing: Load | None = None
        """Of the latest step that was to probe a depth."""

    @property
    def rests(self) -> bool:
        return self.found.rests if self._by_found else self._decided.rests

    def drafts(self, requests: int) -> bool:
        return not self.cost.knows_decodes or self._standing_for(requests).depth > 0

    def depths(self, requests: Sequence[Request], others: Others = NOBODY) -> Sequence[int]:
        if self._repeats and self._decided.is_for(requests) and not (others.asked or others.joining):
            return self._decided.depths  # the shortest way: after a model has gone through the caches each line counts
        self._by_found = self.found.serves(requests) and (self._by_found or not others.asked)
        if self._by_found:
            self._repeats = False
            return self.found.depths(requests, further=bool(others.asked))
        told = self._tell(requests, others)
        self._told = [*self._told, told] if others.asked else [told]
        self._repeats = told is self._decided and not others.asked
        return told.depths

    def _tell(self, requests: Sequence[Request], others: Others) -> Decided:
        self._reads = bool(others.joining) and self.cost.knows_decodes
        if self._reads and (self._beside is None or not self._beside.is_for(len(requests), others.joining)):
            readers = self.acceptance.read(requests)
            best = self.rates.best_beside(readers, sum(map(first_row, requests)), others.joining)
            self._beside = _Beside(best, others.joining)
        decided = self._decided
        if decided.is_for(requests) and not (self._reads or others.asked):
            return decided
        if self._rests_for(requests, others):
            known = self.acceptance.known
            self._new.update({known.place(request): 0 for request in requests if request.ticket is None})
            chosen = self._standing_for(len(requests) + others.asked)
            depths = [0] * len(requests)
            return Decided(list(requests), depths, depths, chosen, own=False)
        decided = self._decided = self._decide(requests, others)
        probe = decided.probe
        # A request whose drafter lacks some of its KV gets that instead of a draft.
        if probe is not None and not any(request.behind for request, depth in zip(requests, decided.depths) if depth):
            load = self._load(len(requests))
            if self._parts(len(requests), probe):
                self._parted.add(stair(len(requests)))
            load.awaited, load.unprobed = probe, -self._unseen.count  # those count once they are looked at
            self._probing = load
        return decided

    def _rests_for(self, requests: Sequence[Request], others: Others) -> bool:
        """Whether nothing is drafted, these are about as many requests as were decided on, and those that came since
        are to draft nothing either. They come and go at every other step, and to decide again would only cost time."""
        if self._reads or not self._decided.rests:
            return False
        count, decided = len(requests) + others.asked, len(self._decided.requests)
        same = are_about_as_many(count, decided) and self._standing_for(count).depth == 0
        return same and all(request.adaptive for request in requests)

    def _decide(self, requests: Sequence[Request], others: Others = NOBODY) -> Decided:
        """All requests of a step share its cost, so those that are asked for after others follow the choice made for as
        many as all."""
        if self._reads and self._beside is not None:
            chosen = self._beside.chosen
            allowed = self._allowed(self.acceptance.read(requests), chosen, hoped=False)
            depths: list[int] = allowed.levels_R.tolist()
            return Decided(list(requests), depths, depths, chosen, own=False, hoped=False)
        known = self.acceptance.known
        places_R = known.places(requests)
        deepest, chosen, probe, repeats = deepest_of(known.requests_P, places_R), DEEPEST, None, 0
        if deepest:
            chosen = self._standing_for(len(requests) + others.asked)
        if deepest and not others.asked:
            probe, repeats = self._probe(chosen, len(requests), deepest, others.reads)
        depths_R, young = own_depths(known.requests_P, places_R, UNDECIDED if probe is None else probe)
        if probe is not None and self._parts(len(requests), deepest):
            depths_R[1::2] = np.where(known.requests_P["adaptive"][places_R[1::2]], 0, depths_R[1::2])
        if young:
            new = depths_R == UNDECIDED
            readers = self.acceptance.read(requests)
            allowed = self._allowed(readers, chosen)
            readers.note(chosen.depth, allowed, new)
            depths_R[new] = allowed.levels_R[new]
            self._new.update(zip(places_R[new].tolist(), depths_R[new].tolist()))
        depths = wanted = depths_R.tolist()
        if deepest and probe is None and not others.asked:
            depths = self.rates.trimmed(requests, wanted, chosen.rows)
        return Decided(list(requests), depths, wanted, chosen, probe=probe, repeats=repeats)

    def landed(self, spans: Sequence[Span], accepted: Sequence[int], seconds: float) -> None:
        if self._by_found:
            self.found.landed(spans, accepted, seconds)
            return
        if self._new:
            self.acceptance.known.requests_P["depth"][list(self._new)] = list(self._new.values())
            self._came += len(self._new)
            self._new = {}
        if self._beside is not None:
            self._beside.steps += 1
        landed = self._unseen.add(spans, accepted, seconds)
        self._decided.repeats -= 1
        first = not landed.decodes and not self.cost.knows_prompts and any(map(has_prompt, spans))
        if self._unseen.count >= PAUSE or self._probing is not None or first or self._are_others(len(spans)):
            self.settle()

    def settle(self) -> None:
        """Look at all steps that have landed."""
        self.found.settle()
        unseen = self._unseen.take()
        if not unseen:
            return
        began = self._clock() if self._clock else 0.0
        self._settle(unseen)
        if self._clock:
            took = self._clock() - began
            self._looking += (min(took, LONGEST * self._looking or took) - self._looking) / LOOKS

    def _settle(self, unseen: list[Landed]) -> None:
        latest = None
        for steps in unseen:
            latest = self._look(steps) or latest
        if latest is not None:
            readers, load, shape = latest
            # Beside a prompt fewer decode than in the steps around it, and of what as many take less is known. As long
            # as nothing is drafted only probes tell anything new, and these are not waited for.
            pause = PAUSE * (1 if self._latest.depth else PLAINLY) * (BESIDE if shape.prompt else 1)
            count = len(readers.places_R)
            if self._standing >= pause or not self._latest.is_for(count) or self._are_others(count):
                self._choose(load, readers, shape.context)
                allowed = self._allowed(readers, self._latest)
                readers.write(allowed.levels_R)
                readers.note(self._latest.depth, allowed)
                self._standing = self._came = self._decided.repeats = 0
        if self._probing is not None and self._probing.awaited is None:
            self._probing = None

    def _are_others(self, count: int) -> bool:
        """Whether half of so many requests were not there when the latest choice was made: it went by how lucky others
        were."""
        return 2 * self._came >= max(1, count)

    def _look(self, steps: Landed) -> tuple[Readers, Load, StepShape] | None:
        """At one step, or several. Returns those of the requests whose depths are chosen, what is done at as many, and
        the last step's shape; None if there are none."""
        requests, known, whole = steps.requests, self.acceptance.known, None
        depths_S, accepted_S = steps.depths_S, steps.accepted_S
        if not steps.decodes:
            whole, kept = shape_of(steps.spans), [place for place, span in enumerate(steps.spans) if is_free(span)]
            depths_S, accepted_S = ([_of(each, kept) for each in of_S] for of_S in (depths_S, accepted_S))
            requests = [requests[place] for place in kept]
        count = len(requests)
        readers = self.acceptance.read(requests)
        depths_SR, accepted_SR = _levels(depths_S), _levels(accepted_S)
        often_D, deepest, most, steps_3S = sums(known.requests_P, known.rows_PD, readers.places_R, depths_SR)
        drafted_S, depth_S, tried_S = steps_3S.tolist()
        shapes_S = [
            whole or StepShape(count, count + drafted, depth, context)
            for drafted, depth, context in zip(drafted_S, depth_S, steps.contexts_S, strict=True)
        ]
        seconds_S = steps.seconds_S
        if not deepest or (whole is not None and (whole.prompt or whole.behind)):
            for shape, seconds in zip(shapes_S, seconds_S, strict=True):
                self.cost.note(shape, seconds)
            seconds_S = []  # nothing else is learnt from how long it took
        if not deepest:
            return None
        self.figures.count(often_D.tolist(), sum(drafted_S), most * len(depths_S))
        if seconds_S and self._standing < PAUSE <= self._standing + len(depths_S) and self.cost.knows_decodes:
            expected = self.cost.one(self.rates.padded(shapes_S[0])), self.rates.tokens(readers, depths_SR[0])
            self.figures.compare((expected[0], seconds_S[0]), (expected[1], count + sum(accepted_S[0])))
        self._standing += len(depths_S)
        if any(drafted_S):
            # A level that there was room for and that nothing was drafted for failed like one that was refused.
            self.acceptance.learn(readers, accepted_SR, np.minimum(accepted_SR + 1, depths_SR))
        load = self._load(count)
        for place, seconds in enumerate(seconds_S):
            if known.paced:
                self._keep_paces(requests, accepted_S[place], seconds)
            tried = tried_S[place]
            probed = tried if tried == load.awaited else None
            first = probed is not None and self.cost.untried(count, deepest) is not None
            self.cost.note(self.rates.padded(shapes_S[place]), seconds, tried)
            load.count()
            if probed is not None and load.land(probed, judged=first):
                self._standing = LONG
        return readers, load, shapes_S[-1]

    def _keep_paces(self, requests: Sequence[Request], accepted: Sequence[int], seconds: float) -> None:
        for request, levels in zip(requests, accepted, strict=True):
            if request.params.target_tps is not None:
                keep_pace(request, 1 + levels, seconds)
                self.acceptance.known.weigh(request)

    def explain(self, requests: Sequence[Request], prompt: int = 0) -> Choice | None:
        if self.found.serves(requests):
            return self.found.explain(requests, prompt)
        known = self.acceptance.known
        deepest = deepest_of(known.requests_P, known.places(requests))
        if not deepest:
            return None
        told = self._told
        if not {request for each in told for request in each.requests}.issuperset(requests):
            told = [self._decide(requests)]
        depth_of = {request: depth for each in told for request, depth in zip(each.requests, each.depths, strict=True)}
        pick_of = {
            request: pick for each in told for request, pick in zip(each.requests, each.picks(self.acceptance, deepest))
        }
        depths, context = [depth_of[request] for request in requests], sum(map(first_row, requests))
        step = StepShape(len(requests), decoded_rows(requests, depths), max(depths), context, prompt)
        step = step if prompt else self.rates.padded(step)
        known_cost = self.cost.knows_prompts if prompt else self.cost.knows_decodes
        return Choice([pick_of[request] for request in requests], self.cost.one(step) if known_cost else None)

    def _load(self, count: int) -> Load:
        return self._loads.at(count, self._latest)

    def _standing_for(self, count: int) -> Chosen:
        """What is done with so many requests before there is another choice. The choice that stands, if it was made
        for about as many: those that come join the others, whose depths it settled."""
        return self._latest if self._latest.is_for(count) else self._load(count).chosen

    def _allowed(self, readers: Readers, chosen: Chosen, *, hoped: bool = True) -> Allowed:
        """What requests are to draft by this choice; their own levels, if they are not adaptive."""
        return self.acceptance.allowed(readers, chosen.depth, chosen.least, hoped=hoped)

    def _probe(self, chosen: Chosen, count: int, deepest: int, reads: bool) -> tuple[int | None, int]:
        """The depth to be probed now, if any: first each once, the deepest first; and after how many steps one is due.
        A step with prompts says nothing of what drafts cost, so a probe waits for one without; not for ever, since
        prompts may wait for room. Where drafters' KV is behind, asking for a draft brings that up to date, and the
        probe is still due in the next step."""
        load, untried = self._load(count), self.cost.untried(count, deepest)
        if load.again and load.awaited is not None:
            load.again -= 1
            return load.awaited, 0
        if self._parts(count, deepest):
            untried = deepest
        interval = load.interval if untried is None else 1
        steps = load.unprobed + self._unseen.count + 1
        if steps < (max(SOONEST, 2 * interval) if reads else interval):
            return None, interval - steps
        probe = load.due(chosen, deepest) if untried is None else untried
        if probe is None:
            return None, SOONEST
        load.begin(PLAIN_STEPS if untried is None and not probe and not self.cost.knows_switching else 1)
        return probe, 0

    def _parts(self, count: int, deepest: int) -> bool:
        """Whether it is time to have every second request draft to the deepest depth: once, after each depth was tried
        by all. As long as all draft, a level always comes with as many rows as there are requests, and nobody can tell
        what each of the two takes."""
        return count >= MANY and stair(count) not in self._parted and self.cost.untried(count, deepest) is None

    def _choose(self, load: Load, readers: Readers, context: int) -> None:
        """Choose anew what is done with about as many requests."""
        if not self.cost.knows_decodes:
            return
        before = self._standing_for(len(readers.places_R)).depth
        self._latest, self.figures.gain = self.rates.best(readers, context, drafts=bool(before), looking=self._looking)
        load.chosen = self._latest
        if load.judge(before):
            self._loads.spread(load)


def _of(each: Sequence[int], places: Sequence[int]) -> Sequence[int]:
    return [each[place] for place in places]


def _levels(each_S: Sequence[Sequence[int]]) -> np.ndarray:
    """[S, R] uint8. The fastest way: a buffer, which numpy need not convert."""
    return np.frombuffer(bytearray(chain.from_iterable(each_S)), np.uint8).reshape(len(each_S), -1)


@cache
def load_loops() -> None:
    """Run all compiled loops once, so that no request waits for them: reading them takes a quarter of a second, and
    compiling them some seconds, once per machine."""
    policy = Adaptive()
    policy.rates.stairs = RowStairs(lambda requests, depth: (3, 4))
    requests = [Request("", [0], SamplingParams(), Speculation(), (0, 1), adaptive=True) for _ in range(2)]
    for _ in range(PAUSE + 2):
        depths = policy.depths(requests)
        spans = [Span(request, 0, 1, depth, depth) for request, depth in zip(requests, depths, strict=True)]
        policy.landed(spans, depths, 1e-3)
    policy.landed([Span(requests[0], 0, 9, decides=False)], [0], 1e-3)
    policy.explain(requests, prompt=1)
    policy.rates.trimmed(requests, [1, 1], 3)
