"""No client's grammar delays another client's."""

from __future__ import annotations

import threading
import time

from attacks.content_attacks import departed_schemas, post, schema
from support.doubles.server import Served, settle, until, working

HONEST_S = 12.0
"""Includes some seconds for starting the first worker. Before the fix it was 55 s, after six schemas of clients that
had left."""


def ask(served: Served, word: str) -> float:
    """Seconds until an honest request with a grammar that was not used before is answered."""
    began = time.monotonic()
    with served.http() as client:
        answer = client.post("/v1/completions", json={"prompt": "x", "guided_choice": [word], "max_tokens": 60})
    assert answer.status_code == 200 and answer.json()["choices"][0]["text"] == word, answer.text
    return time.monotonic() - began


def test_schemas_of_clients_that_left(stormed: Served) -> None:
    """Their compilation is cancelled, and the next client does not wait for it."""
    departed_schemas(stormed.url, 6, first=10)
    until("no worker is busy", lambda: working(stormed) == 0, 3)
    assert ask(stormed, "behind those who left") < HONEST_S


def test_schemas_of_clients_that_stay(stormed: Served) -> None:
    """They get 400 after five seconds, or 429; others wait only as long as quick trials take."""
    ask(stormed, "the first")
    answers: list[int] = []

    def stay(seed: int) -> None:
        with stormed.http() as client:
            body = {"prompt": "x", "guided_json": schema(seed)}
            answers.append(client.post("/v1/completions", json=body).status_code)

    staying = [threading.Thread(target=stay, args=(100 + i,)) for i in range(8)]
    for thread in staying:
        thread.start()
    time.sleep(0.5)
    took = ask(stormed, "among those who stay")
    for thread in staying:
        thread.join()
    assert took < HONEST_S / 2
    assert len(answers) == 8 and set(answers) <= {400, 429}
    settle(stormed)


def test_a_simulated_rule(stormed: Served) -> None:
    """Allowed only if the operator enabled output that is not the model's, on every route."""
    answer = post(stormed.url, "a simulated rule")
    assert answer.status_code == 400 and "--enable-synthetic-acceptance" in answer.text
    rule = {"speculation": {"drafter": "mtp", "depth": 1, "acceptance": "synthetic", "acceptance_length": 1.5}}
    bodies = {
        "/v1/completions": {"prompt": "x", **rule},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], **rule},
        "/generate": {"text": "x", "sampling_params": rule},
    }
    with stormed.http() as client:
        for path, body in bodies.items():
            assert "--enable-synthetic-acceptance" in client.post(path, json=body).text
