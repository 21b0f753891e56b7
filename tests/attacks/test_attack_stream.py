"""An SGLang stream repeats its whole text with every event, yet its total size is bounded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from stridelm.server.sglang.pace import GROWTH
from support.doubles.server import Served, serving

ASKED = {"text": "def f(", "sampling_params": {"max_new_tokens": 400, "ignore_eos": True, "temperature": 0}}
SCORED = {**ASKED, "return_logprob": True, "top_logprobs_num": 2}
MAX_MIB = 0.05


def events_of(served: Served, body: dict[str, Any]) -> tuple[list[dict[str, Any]], int]:
    """The events of a stream, and its bytes."""
    with served.http() as client:
        answer = client.post("/generate", json={**body, "stream": True})
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]], len(answer.content)


def test_repeats_come_less_often(tmp_path: Path) -> None:
    """Once a stream's text is long: nothing is lost, and its bytes are bounded in terms of its last event."""
    with serving(tmp_path, "--max-repeating-mib", str(MAX_MIB)) as served, served.http() as client:
        whole = client.post("/generate", json=SCORED).json()
        events, size = events_of(served, SCORED)
    last = len(json.dumps(events[-1]))
    assert size < MAX_MIB * (1 << 20) + (2 + GROWTH) * last < 3_000_000
    counts = [event["meta_info"]["completion_tokens"] for event in events]
    assert counts == sorted(counts) and counts[0] < 10 and len(events) > 10
    assert events[-1]["text"] == whole["text"] and events[-1]["output_ids"] == whole["output_ids"]
    assert events[-1]["meta_info"]["output_top_logprobs"] == whole["meta_info"]["output_top_logprobs"]


def test_incremental_stream(tmp_path: Path) -> None:
    """With SGLang's option no event repeats anything; concatenated they are the whole response."""
    with serving(tmp_path, "--incremental-streaming-output") as served, served.http() as client:
        whole = client.post("/generate", json=SCORED).json()
        events, _ = events_of(served, SCORED)
    assert "".join(event["text"] for event in events) == whole["text"]
    assert [token for event in events for token in event["output_ids"]] == whole["output_ids"]
    scores = [entry for event in events for entry in event["meta_info"]["output_token_logprobs"]]
    assert scores == whole["meta_info"]["output_token_logprobs"]
    # What waits for a busy server is put together, but the rest has been sent before.
    assert max(len(event["output_ids"]) for event in events) < len(whole["output_ids"])
