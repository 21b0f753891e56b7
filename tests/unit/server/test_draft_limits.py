"""What a client may have drafted is bounded, in depth and in rows, whatever drafter and shape it asks for."""

from __future__ import annotations

import json
from typing import Any

import pytest

from stridelm import LLM, SamplingParams
from stridelm.engine.intake import Intake
from stridelm.server.draft_limits import DraftLimits
from support.doubles.server import PROMPT, Served

TREE = [(0,), (1,), (2,), (3,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]
LIMITS = DraftLimits(max_depth=4, max_draft_rows=8)
WITHIN: dict[str, Any] = {
    "none": "off",
    "silence": None,
    "a head": {"drafter": "mtp", "depth": 4},
    "chosen depths": {"depth": "auto"},
    "lookup": {"drafter": "ngram", "depth": 4},
    "a tree": {"drafter": "mtp", "token_tree": TREE},
    "a grown tree": {"drafter": "mtp", "depth": 3, "draft_topk": 3, "num_draft_tokens": 8},
    "a window": {"drafter": "mask", "acceptance": "trust", "depth": 4},
    "probes": {"drafter": "mask", "depth": 2},
}
BEYOND: dict[str, tuple[Any, str]] = {
    "a head": ({"drafter": "mtp", "depth": 5}, "max_depth"),
    "a head's most": ({"drafter": "mtp", "depth": 64}, "max_depth"),
    "lookup": ({"drafter": "ngram", "depth": 5}, "max_depth"),
    "lookup's own": ({"drafter": "suffix"}, "max_depth"),
    "a window": ({"drafter": "mask", "acceptance": "trust", "depth": 5}, "max_depth"),
    "a deep tree": ({"drafter": "mtp", "token_tree": [(0,) * depth for depth in range(1, 6)]}, "max_depth"),
    "a wide tree": ({"drafter": "mtp", "token_tree": [*TREE, (4,)]}, "max_draft_rows"),
    "a grown tree": ({"drafter": "mtp", "depth": 3, "draft_topk": 4}, "max_draft_rows"),
    "a large one": ({"drafter": "mtp", "depth": 3, "draft_topk": 20, "num_draft_tokens": 60}, "max_draft_rows"),
    "probes": ({"drafter": "mask", "depth": 3}, "max_draft_rows"),
}


@pytest.fixture(scope="module")
def intake() -> Intake:
    return LLM(max_model_len=64, depth=3, check_drafting=False).engine.intake


@pytest.mark.parametrize("name", WITHIN)
def test_within(intake: Intake, name: str) -> None:
    LIMITS.check(intake, SamplingParams(speculation=WITHIN[name]))


@pytest.mark.parametrize("name", BEYOND)
def test_beyond(intake: Intake, name: str) -> None:
    """Refused with the name of the option that bounds it, and what to lower."""
    speculation, option = BEYOND[name]
    with pytest.raises(ValueError, match=rf"{option}; lower"):
        LIMITS.check(intake, SamplingParams(speculation=speculation))


@pytest.mark.parametrize("asked", [None, {"depth": 3}, {"depth": 2}, {"depth": "auto"}])
def test_the_servers_own_is_allowed(intake: Intake, asked: Any) -> None:
    """What the server drafts by default is never refused, nor anything shallower, however low the limits are."""
    DraftLimits(0, 0).check(intake, SamplingParams(speculation=asked))
    with pytest.raises(ValueError, match="depth 4 is over 3"):
        DraftLimits(0, 0).check(intake, SamplingParams(speculation={"depth": 4}))


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate"])
def test_over_http(served: Served, path: str) -> None:
    """Every route answers 400 beyond the limits that /server_info reports, and serves what lies within."""
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": PROMPT, "max_tokens": 2},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
        "/generate": {"text": PROMPT, "sampling_params": {"max_new_tokens": 2}},
    }
    prompt = bodies[path]
    with served.http() as client:
        info = client.get("/server_info").json()
        for name in ("max_depth", "max_draft_rows"):
            tree = [[rank] for rank in range(info[name])] if name == "max_draft_rows" else None
            most = {"token_tree": json.dumps(tree)} if tree else {"depth": info[name]}
            more = {"token_tree": json.dumps([*tree, [info[name]]])} if tree else {"depth": info[name] + 1}
            answer = client.post(path, json={**prompt, "speculation": {"drafter": "mtp", **most}})
            assert answer.status_code == 200, answer.text
            answer = client.post(path, json={**prompt, "speculation": {"drafter": "mtp", **more}})
            assert answer.status_code == 400 and name in answer.json()["error"]["message"], answer.text
