"""The laws with whole steps captured: an engine on a CPU that plans on bounds and replays its steps.

A graph gets the same inputs and the same padding here as on a GPU. Whether host state was baked into a graph is tested
in tests/gpu.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from stridelm import SamplingParams
from stridelm.batch import Draft
from stridelm.draft import DRAFTERS
from stridelm.engine import kinds as kinds_of_steps
from stridelm.engine.device_step import Run
from stridelm.llm import RequestOutput
from support.checks.identity import FEATURES, check_identity, mixed_jobs, prompts, sampling, trusting_neighbours
from support.doubles.bounds import LaggingStand, bounds_registered
from support.doubles.depths import ByLength, RandomDepths
from support.doubles.poison import KINDS, POOL, check_pages, requests
from support.doubles.replays import replays
from support.doubles.stand import Job, Stand, accepted, speculation
from support.doubles.tree_drafter import NAME as TREE
from support.doubles.tree_drafter import registered

BRANCHES = {"draft_topk": 2, "num_draft_tokens": 6}


def costs(outputs: list[RequestOutput]) -> list[tuple[int, ...]]:
    """Steps of every request, and what was accepted at which depth. They reveal a lost draft, which leaves the output
    unchanged. (The number of drafted tokens is not compared: in a graph, a request with a smaller depth gets the first
    rows of the others' skeleton.)"""
    found = [said.metrics for output in outputs for said in output.outputs]
    return [(m.steps, m.accepted, *m.accepted_at) for m in found if m is not None]


@pytest.fixture(scope="module", autouse=True)
def _registered() -> Iterator[None]:
    with bounds_registered(), registered():
        yield


@pytest.fixture(scope="module")
def stand(checkpoint: Callable[..., Path]) -> LaggingStand:
    return LaggingStand(checkpoint("qwen3", tie_word_embeddings=True), "float32")


@pytest.mark.parametrize("drafter", [*DRAFTERS, TREE])
def test_identity(stand: LaggingStand, drafter: str) -> None:
    """Five requests of one kind, padded to eight, ending one after another: most of their steps are replays. Drafts
    made on the host reach the graph through its inputs. Greedy, because the sampler's torch twin takes no padding."""
    reason = DRAFTERS.get(drafter).why_not(stand.target)
    if reason:
        pytest.skip(f"{drafter}: {reason}")
    kind = speculation(stand, drafter)
    jobs = [Job(prompt, sampling(stand, prompt, 0.0, "nothing"), kind) for prompt in prompts(stand, 5)]
    llm = stand.llm(page_size=4)
    pool = replays(llm.engine)
    outputs = check_identity(stand, jobs, llm=llm)
    replayed = sum(graph.replays for graph in pool.made if isinstance(graph.left, Run))
    assert replayed > llm.engine.stats.steps / 2
    assert costs(outputs) == costs(stand.run(jobs, page_size=4))
    assert drafter != TREE or accepted(outputs) > 0
    assert llm.engine.capture is not None
    proposed = {kind.is_chain for kind in llm.engine.capture.kinds if kind.draft}
    assert not proposed or (None not in proposed) == DRAFTERS.get(drafter).host_bound


@pytest.mark.parametrize(
    ("drafter", "branches"),
    [
        *((name, {}) for name in [*DRAFTERS, TREE, "all"]),
        *(
            (name, BRANCHES)
            for name in DRAFTERS
            if BRANCHES.keys() <= DRAFTERS.options(name).__dataclass_fields__.keys()
        ),
    ],
)
def test_beside_prompts(stand: LaggingStand, drafter: str, branches: dict[str, Any]) -> None:
    """Eight requests, three at a time, with one drafter or with all: when prompts run beside drafts, and when drafters
    are mixed, the device's proposals are replayed as graphs of their own."""
    if drafter == "all":
        jobs = mixed_jobs(stand, 8, 0.0, ["nothing", "stop_token_ids"])
    else:
        reason = DRAFTERS.get(drafter).why_not(stand.target)
        if reason:
            pytest.skip(f"{drafter}: {reason}")
        kind = {**speculation(stand, drafter), **branches}
        jobs = [Job(prompt, sampling(stand, prompt, 0.0, "nothing"), kind) for prompt in prompts(stand, 8)]
    options: dict[str, Any] = {"page_size": 4, "max_num_seqs": 3, "max_num_batched_tokens": 48}
    llm = stand.llm(**options)
    pool = replays(llm.engine)
    outputs = check_identity(stand, jobs, llm=llm)
    assert costs(outputs) == costs(stand.run(jobs, **options))
    assert llm.engine.capture is not None
    proposed = [graph for graph in pool.made if isinstance(graph.left, Draft)]
    assert len(proposed) == len(llm.engine.capture.proposals)
    proposes = drafter == "all" or not (DRAFTERS.get(drafter).host_bound or drafter == "none")
    assert any(graph.replays for graph in proposed) == proposes


def mixtures(stand: Stand) -> dict[str, list[dict[str, Any]]]:
    """Name -> the ways in which the requests of one batch are drafted. None is `all_or_nothing`, and all are exact."""
    able = [name for name in DRAFTERS if DRAFTERS.get(name).why_not(stand.target) is None]
    kinds = {name: speculation(stand, name) for name in able}
    plain = kinds["none"]
    found = {f"{name} and plain": [kind, plain] for name, kind in kinds.items() if name != "none"}
    found |= {f"{name} at two depths": [kind, {**kind, "depth": 1}] for name, kind in kinds.items() if name != "none"}
    found |= {f"{one} and {other}": [kinds[one], kinds[other], plain] for one, other in combinations(able[:4], 2)}
    trees = [{**kinds["eagle"], **BRANCHES}, kinds["ngram"], {**kinds["mtp"], **BRANCHES}, plain]
    return {**found, "everything": list(kinds.values()), "trees and chains": trees}


NAMES = ("and plain", "at two depths", "mask and", "eagle and m", "everything", "trees and chains")
"""Parts of names, so that the tests can be told apart without loading a model."""


@pytest.mark.parametrize(("packed", "temperature"), [(False, 0.0), (True, 0.0), (True, 0.8)])
@pytest.mark.parametrize("name", NAMES)
def test_mixtures(
    stand: LaggingStand, monkeypatch: pytest.MonkeyPatch, name: str, packed: bool, temperature: float
) -> None:
    """Requests that are drafted in different ways share a captured step, and each is drafted as it would be alone.
    packed: their rows lie one after another, with fewer of them than if all had the largest draft."""
    if packed:
        monkeypatch.setattr(kinds_of_steps, "FEWEST_PACKED", 1)
        monkeypatch.setattr(kinds_of_steps, "READS_WEIGHTS", 1)
        monkeypatch.setattr(kinds_of_steps, "TILE", 4)
    ways = {key: kinds for key, kinds in mixtures(stand).items() if name in key}
    assert ways
    for key, kinds in ways.items():
        jobs = [
            Job(prompt, sampling(stand, prompt, temperature, "nothing"), kinds[i % len(kinds)])
            for i, prompt in enumerate(prompts(stand, 9))
        ]
        llm = stand.llm(page_size=4)
        pool = replays(llm.engine)
        outputs = check_identity(stand, jobs, llm=llm)
        assert costs(outputs) == costs(stand.run(jobs, page_size=4)), key
        assert "mixed_speculation" not in llm.engine.stats.uncaptured, key
        whole = [graph for graph in pool.made if isinstance(graph.left, Run)]
        assert sum(graph.replays for graph in whole) > llm.engine.stats.steps / 2, key
        assert llm.engine.capture is not None
        fewer = [kind for kind in llm.engine.capture.kinds if kind.rows < kind.requests * (kind.real + kind.draft)]
        assert bool(fewer) == packed, key


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("drafter", ["none", "mtp", "ngram"])
def test_what_is_read_of_replayed_steps(
    stand: LaggingStand, monkeypatch: pytest.MonkeyPatch, drafter: str, packed: bool
) -> None:
    """Log-probabilities and hidden states are read from a replay, beside requests that want none: the requests' own
    rows, before the next replay overwrites them."""
    if packed:
        monkeypatch.setattr(kinds_of_steps, "FEWEST_PACKED", 1)
        monkeypatch.setattr(kinds_of_steps, "READS_WEIGHTS", 1)
        monkeypatch.setattr(kinds_of_steps, "TILE", 4)
    kinds = ("logprobs", "hidden_states", "nothing")
    jobs = [
        Job(prompt, sampling(stand, prompt, 0.0, kinds[i % 3]), speculation(stand, drafter if i % 2 else "none"))
        for i, prompt in enumerate(prompts(stand, 9))
    ]
    llm = stand.llm(page_size=4)
    pool = replays(llm.engine)
    check_identity(stand, jobs, llm=llm)
    assert set(llm.engine.stats.uncaptured) <= {"prompt"}
    assert sum(graph.replays for graph in pool.made if isinstance(graph.left, Run)) > llm.engine.stats.steps / 2


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("features", [sorted(FEATURES)[i::3] for i in range(3)], ids=lambda names: names[0])
def test_mixed_parameters(stand: LaggingStand, features: list[str], temperature: float) -> None:
    """Requests with different drafters and parameters, some of which look back at the draft. As requests end, narrower
    drafts follow wider ones in the graphs' inputs."""
    jobs = mixed_jobs(stand, 8, temperature, features, seed=len(features[0]))
    llm = stand.llm(page_size=16)
    pool = replays(llm.engine)
    check_identity(stand, jobs, trusting_neighbours(stand, temperature)[:2], llm=llm)
    assert sum(graph.replays for graph in pool.made if isinstance(graph.left, Run))


@pytest.mark.parametrize("drafter", [name for name in DRAFTERS if name != "none"])
def test_shallower_drafts(stand: LaggingStand, drafter: str) -> None:
    """Where depths are chosen, a step drafts no deeper than its deepest request, and shallower steps are replays too.
    Heads follow the target at depth 0 as well: what is accepted is what it is without graphs."""
    reason = DRAFTERS.get(drafter).why_not(stand.target)
    if reason:
        pytest.skip(f"{drafter}: {reason}")
    jobs = [Job(prompt, sampling(stand, prompt, 0.0, "nothing"), None) for prompt in prompts(stand, 5)]
    found = []
    for captured in (True, False):
        llm = stand.llm(page_size=4, drafter=drafter, depth="auto")
        llm.engine.steps.planner.depths = ByLength()
        pool = replays(llm.engine) if captured else None
        found.append(costs(check_identity(stand, jobs, llm=llm)))
        if pool is not None:
            assert sum(graph.replays for graph in pool.made if isinstance(graph.left, Run)) > llm.engine.stats.steps / 2
            assert llm.engine.capture is not None
            assert len({kind.depth for kind in llm.engine.capture.kinds}) > 1
            assert len({kind.draft for kind in llm.engine.capture.kinds}) > 1
    assert found[0] == found[1]


def test_one_request_has_no_shallower_steps_captured(stand: LaggingStand) -> None:
    """Where depths are not chosen by default, steps of a request that asks for it draft as deep as it may: one graph
    for each number of requests, as for any other depth that a request names."""
    llm = stand.llm(page_size=4, drafter="eagle", depth=2)
    replays(llm.engine)
    capture = llm.engine.capture
    assert capture is not None
    capture.at_start()
    kinds = set(capture.kinds)
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, speculation={"depth": "auto"})
    request = llm.engine.add("a", prompts(stand, 1)[0], params)
    assert request.adaptive and len(request.rows_by_depth) > 3
    llm.engine.steps.planner.depths = RandomDepths()
    while llm.engine.busy:
        llm.engine.step()
    drafted = {kind.depth for kind in set(capture.kinds) - kinds if kind.ways}
    assert drafted <= {len(request.rows_by_depth) - 1}


def policies() -> list[tuple[str, int | str | None]]:
    """(drafter, depth): each as it is configured, and with depths that are chosen."""
    return [("none", None), *((name, depth) for name in DRAFTERS if name != "none" for depth in (2, "auto"))]


@pytest.mark.parametrize(("drafter", "depth"), policies())
def test_nothing_is_captured_after_the_start(stand: LaggingStand, drafter: str, depth: int | str | None) -> None:
    """Requests that are drafted as the engine is configured, and requests without speculation, with whatever parameters
    and prompts, find their graphs."""
    reason = DRAFTERS.get(drafter).why_not(stand.target)
    if reason:
        pytest.skip(f"{drafter}: {reason}")
    llm = stand.llm(page_size=4, max_num_seqs=4, drafter=drafter, depth=depth)
    if depth == "auto":
        llm.engine.steps.planner.depths = RandomDepths()
    pool, capture = replays(llm.engine), llm.engine.capture
    assert capture is not None
    capture.at_start()
    made = pool.graphs
    assert made
    for choice in ((None,), ("off",), (None, "off")):
        for number, prompt in enumerate(prompts(stand, 6)):
            params = SamplingParams(
                temperature=0.0,
                max_tokens=3 + 5 * number,
                ignore_eos=True,
                presence_penalty=number % 2,
                speculation=choice[number % len(choice)],
            )
            llm.engine.add(f"{choice} {number}", prompt, params)
        while llm.engine.busy:
            llm.engine.step()
    assert pool.graphs == made, "captured while a request waited"
    assert sum(graph.replays for graph in pool.made)


@pytest.mark.parametrize("kind", [*KINDS, {"drafter": TREE}], ids=lambda kind: kind["drafter"])
def test_unheld_pages_are_left_alone(stand: LaggingStand, kind: dict[str, Any]) -> None:
    """Neither the padding of a replayed step nor what an earlier step left in its inputs touches any page."""
    poisoned, clean = (stand.llm(**POOL).engine for _ in range(2))
    pool = replays(poisoned)
    assert check_pages(poisoned, clean, requests(stand, [kind])) > 100
    assert any(graph.replays for graph in pool.made)
