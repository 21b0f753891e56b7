"""Nobody's grammar holds up another's."""

from __future__ import annotations

import threading
import time

from attacks.content_attacks import departed_schemas, post, schema
from support.doubles.server import Served, settle, until, working

HONEST_S = 12.0
"""Starting the first worker takes some seconds of it. Before, it was 55 s behind six schemas of clients that had
left."""


def ask(served: Served, word: str) -> float:
    """Seconds that an honest grammar takes, one that nobody has asked for before."""
    began = time.monotonic()
    with served.http() as client:
        answer = client.post("/v1/completions", json={"prompt": "x", "guided_choice": [word], "max_tokens": 20})
    assert answer.status_code == 200 and answer.json()["choices"][0]["text"] == word, answer.text
    return time.monotonic() - began


def test_schemas_of_clients_that_left(stormed: Served) -> None:
    """They are not tried any more, and whoever comes next need not wait for them."""
    departed_schemas(stormed.url, 6, first=10)
    until("no worker is left at work", lambda: working(stormed) == 0, 3)
    assert ask(stormed, "behind those who left") < HONEST_S


def test_schemas_of_clients_that_stay(stormed: Served) -> None:
    """They get their five seconds and 400, or are told to come again; others wait for as long as quick trials take."""
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
    """Only where the operator has allowed what the model never said, on every route."""
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
