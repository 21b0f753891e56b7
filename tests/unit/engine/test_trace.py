"""A trace records every token: what was run, guessed, emitted and kept, and it changes nothing."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stridelm import LLM, SamplingParams
from stridelm.engine.trace import JsonTracer
from support.doubles.stand import Job, Stand, all_speculations, assert_same, speculation
from support.doubles.tree_drafter import NAME as TREE
from support.doubles.tree_drafter import RandomTreeDrafter, registered

Line = dict[str, Any]
LENGTH = 16


@pytest.fixture(scope="module", autouse=True)
def _trees() -> Iterator[None]:
    with registered():
        yield


@pytest.fixture(scope="module")
def stand(checkpoint: Callable[..., Path]) -> Stand:
    return Stand(checkpoint("qwen3", tie_word_embeddings=True), "float32")


def traced(llm: LLM) -> io.StringIO:
    out = io.StringIO()
    llm.engine.tracer = JsonTracer(llm.engine.ledger, llm.engine.stats, llm.engine.tokenizer, out)
    return out


def lines_of(out: io.StringIO) -> list[Line]:
    return [json.loads(line) for line in out.getvalue().splitlines()]


def jobs_of(stand: Stand) -> list[Job]:
    """One request for every drafter and depth, trees and a lossy one; the first prompt takes three chunks."""
    params = SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True, seed=3)
    kinds = [*all_speculations(stand), speculation(stand, "mask", "default", "trust")]
    jobs = [Job([5 + i, 6, 7, 8, 6, 7, 8, 6], params, kind) for i, kind in enumerate(kinds)]
    jobs[0].prompt = [(7 * i) % 60 for i in range(150)]
    for job in jobs:
        if job.speculation is not None and job.speculation["drafter"] == TREE:
            RandomTreeDrafter.teach(job.prompt, params.seed, 0, stand.tokens(job.prompt, params))
    return jobs


@pytest.fixture(scope="module")
def chapters(stand: Stand) -> list[tuple[Job, Any, list[Line]]]:
    """Each request with its output and its lines."""
    llm = stand.llm(max_num_batched_tokens=64, page_size=4, enable_prefix_caching=False)
    out, jobs = traced(llm), jobs_of(stand)
    outputs = stand.run(jobs, llm)
    lines = lines_of(out)
    return [
        (job, output, [line for line in lines if line["request"] == f"{output.request_id}.0"])
        for job, output in zip(jobs, outputs)
    ]


def text_of(job: Job, output: Any, lines: list[Line]) -> list[int]:
    """Prompt and all that was emitted, including what the end cut off."""
    return job.prompt + [token["token"] for line in lines for token in line["verdict"]["emitted"]]


def test_emitted_tokens_are_the_output(chapters: Any) -> None:
    for job, output, lines in chapters:
        said = text_of(job, output, lines)
        assert said[len(job.prompt) :][:LENGTH] == output.outputs[0].token_ids
        for line in lines:
            for token in line["verdict"]["emitted"]:
                assert said[token["position"]] == token["token"]
            assert line["decides"] == bool(line["verdict"]["emitted"])


def test_computed_goes_on_where_it_stopped(chapters: Any) -> None:
    """`computed` grows by the real rows and the kept draft rows."""
    for _, _, lines in chapters:
        assert [line["admitted"] for line in lines] == [True] + [False] * (len(lines) - 1)
        reached = 0
        for line in lines:
            real = [row for row in line["rows"] if row["role"] == "real"]
            assert line["computed"]["before"] == reached
            reached += len(real) + line["verdict"]["kept"]
            assert line["computed"]["after"] == reached
        assert any(not line["decides"] for line in chapters[0][2])


def test_rows_hold_what_they_say(chapters: Any) -> None:
    for job, output, lines in chapters:
        said = text_of(job, output, lines)
        for line in lines:
            rows = {row["at"]: row for row in line["rows"]}
            assert len(rows) == len(line["rows"])
            for at, row in rows.items():
                if row["role"] == "real":
                    assert (row["position"], row["token"]) == (at, said[at])
                    assert row["parent"] == (at - 1 if at else None)
                else:
                    assert row["parent"] < at
                    before = rows[row["parent"]]
                    assert row["position"] == before["position"] + 1
                if row["role"] == "probe" and line["drafter"] == "mask":
                    assert row["token"] == 63


def test_the_path_leads_through_the_candidates_that_were_emitted(chapters: Any) -> None:
    for _, _, lines in chapters:
        for line in lines:
            rows = {row["at"]: row for row in line["rows"]}
            verdict = line["verdict"]
            path = [rows[at] for at in verdict["path"]]
            assert len(path) == verdict["kept"]
            assert [row["token"] for row in path] == [t["token"] for t in verdict["emitted"][: len(path)]]
            assert all(row["role"] == "candidate" for row in path)
            candidates = [row for row in line["rows"] if row["role"] == "candidate"]
            assert [p["token"] for p in line["proposals"]] == [row["token"] for row in candidates]
    assert sum(line["verdict"]["kept"] for _, _, lines in chapters for line in lines) > 10


def test_a_path_may_lead_past_side_branches(chapters: Any) -> None:
    """The trees have siblings, and accepted paths that skip rows."""
    trees = [line for _, _, lines in chapters for line in lines if line["drafter"] == TREE]
    paths = [line["verdict"]["path"] for line in trees]
    assert any(len(path) > 1 and path != list(range(path[0], path[0] + len(path))) for path in paths)


def test_pages(chapters: Any) -> None:
    """After the commit a request holds only the pages of what is computed; before it, up to its bound."""
    for _, _, lines in chapters:
        for line in lines:
            (pages,) = line["pages"].values()
            assert len(pages["committed"]) == len(set(pages["committed"])) == -(-line["computed"]["after"] // 4)
            highest = max(row["at"] for row in line["rows"])
            assert pages["held"] >= max(len(pages["committed"]), -(-(highest + 1) // 4))
            pool = pages["pool"]
            assert pool["free"] + pool["cached"] + pool["held"] == pool["total"]


def test_tracing_changes_nothing(stand: Stand, chapters: Any) -> None:
    llm = stand.llm(max_num_batched_tokens=64, page_size=4, enable_prefix_caching=False)
    assert llm.engine.tracer is None
    for (_, output, _), alone in zip(chapters, stand.run(jobs_of(stand), llm)):
        assert_same(output, alone)


def test_steps_are_counted_from_one(chapters: Any) -> None:
    for _, _, lines in chapters:
        steps = [line["step"] for line in lines]
        assert steps == sorted(set(steps))
    assert min(line["step"] for _, _, lines in chapters for line in lines) == 1


def test_text_is_decoded_where_there_is_a_tokenizer(speaking: Path, chapters: Any) -> None:
    llm = LLM(speaking, dtype="float32", num_pages=32, drafter="none")
    out = traced(llm)
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    llm.generate("def main(argv)", params)
    first = lines_of(out)[0]
    assert "".join(row["text"] for row in first["rows"]) == "def main(argv)"
    assert all(isinstance(token["text"], str) for token in first["verdict"]["emitted"])
    assert all(row["text"] is None for _, _, lines in chapters for line in lines for row in line["rows"])


def test_a_request_that_comes_back_is_admitted_again(stand: Stand) -> None:
    """When preempted, it starts over from nothing, or from the prefix that it left in the cache."""
    llm = stand.llm(num_pages=14, page_size=4, max_num_seqs=3)
    out = traced(llm)
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    stand.run([Job([9 + i, 4, 5, 6], params, {"drafter": "none"}) for i in range(3)], llm)
    assert llm.engine.stats.preemptions
    again = [line for line in lines_of(out) if line["admitted"]]
    assert len(again) == 3 + llm.engine.stats.preemptions
