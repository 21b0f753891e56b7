"""A client that takes all the slots it can get still leaves others their turn."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from support.doubles.server import PROMPT, Served, offline, serving, settle, until

SLOTS = 8
KEYS = ("--api-key", "greedy", "--api-key", "modest", "--operator-key", "operator", "--no-strict")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("shared"), *KEYS, "--max-queue", "64") as served:
        yield served
        assert served.stop() == 0, served.log.read_text(encoding="utf-8")


def running(served: Served) -> int:
    with served.http(headers={"authorization": "Bearer operator"}) as client:
        return int(client.get("/get_load").json()[0]["num_reqs"])


def test_a_client_that_fills_every_slot_blocks_no_other(shared: Served) -> None:
    """Thirty samples of 1,000 tokens run in eight slots. Another client's first token comes before any of these ends,
    and both clients get the same tokens as alone."""
    wanted = offline(["def fibonacci(n):"], max_tokens=16, temperature=0)[0].text
    ended: list[float] = []
    texts = [""] * 30

    def take_all() -> None:
        asked = {"max_tokens": 1000, "temperature": 0, "n": len(texts), "extra_body": {"ignore_eos": True}}
        with shared.openai("greedy") as client:
            for event in client.completions.create(model="built-in", prompt=PROMPT, stream=True, **asked):
                for choice in event.choices:
                    texts[choice.index] += choice.text
                    if choice.finish_reason is not None:
                        ended.append(time.monotonic())

    taking = threading.Thread(target=take_all)
    taking.start()
    until("every slot is taken", lambda: running(shared) > SLOTS)
    time.sleep(0.3)
    firsts = []
    with shared.openai("modest") as client:
        for _ in range(3):
            said = ""
            for event in client.completions.create(
                model="built-in", prompt="def fibonacci(n):", max_tokens=16, temperature=0, stream=True
            ):
                if not said:
                    firsts.append(time.monotonic())
                said += event.choices[0].text
            assert said == wanted
    taking.join()
    settle(shared)
    assert max(firsts) < ended[0]
    alone = offline([PROMPT], max_tokens=1000, temperature=0, ignore_eos=True)[0].text
    assert texts == [alone] * 30
