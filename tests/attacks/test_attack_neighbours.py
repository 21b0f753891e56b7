"""Clients of one server learn nothing of one another: neither through the prefix cache nor through drafts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.doubles.server import PROMPT, Served, serving

LONG = PROMPT * 4


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    # At a depth that is chosen, how much is guessed would depend on how busy the machine is.
    options = ("--api-key", "one", "--api-key", "other", "--drafter", "suffix", "--depth", "8")
    with serving(tmp_path_factory.mktemp("neighbours"), *options) as served:
        yield served


def ask(served: Served, key: str, prompt: str = LONG, **more: object) -> tuple[int, int, str]:
    """(cached tokens, accepted guesses, text)"""
    body = {"prompt": prompt, "max_tokens": 40, "temperature": 0, "ignore_eos": True, **more}
    with served.http(headers={"authorization": f"Bearer {key}"}) as client:
        answer = client.post("/v1/completions", json=body).json()
    details = answer["usage"].get("prompt_tokens_details") or {}
    [choice] = answer["choices"]
    return details.get("cached_tokens", 0), choice["speculation"]["accepted"], choice["text"]


def test_no_key_sees_what_another_sent(shared: Served) -> None:
    """Another key's exact prompt is as cold as one never sent, and its continuation is unknown to the drafter; under
    the same key both are found, unless a salt separates them."""
    cold, unknown, text = ask(shared, "one")
    again, known, same = ask(shared, "one")
    assert cold == 0 and again > 0 and known > unknown and same == text
    assert ask(shared, "other") == (0, unknown, text)
    assert ask(shared, "one", cache_salt="apart") == (0, unknown, text)
    assert ask(shared, "one", cache_salt="apart")[0] > 0
    native = {"text": LONG, "sampling_params": {"max_new_tokens": 4, "temperature": 0}, "cache_salt": "third"}
    with shared.http(headers={"authorization": "Bearer one"}) as client:
        counts = [client.post("/generate", json=native).json()["meta_info"]["cached_tokens"] for _ in range(2)]
    assert counts[0] == 0 and counts[1] > 0


@pytest.mark.parametrize("rule", ["relaxed", "typical", "rejection"])
def test_no_rule_repeats_what_another_key_received(shared: Served, rule: str) -> None:
    """A rule that accepts nearly anything, with a prompt that ends as another key's did, emits none of its text."""
    secret = "API_TOKEN = 'k9f3-xq71-zz08-plmw-7731-aa52'\n"
    ask(shared, "one", secret + PROMPT, max_tokens=60)
    options = {"relaxed": {"relaxed_topk": 4096, "relaxed_delta": 1.0}, "typical": {"posterior_threshold": 0.0}}
    loose = {"drafter": "suffix", "acceptance": rule, **options.get(rule, {})}
    alone = ask(shared, "other", PROMPT, seed=1, temperature=1, speculation=loose)
    assert alone[1] == ask(shared, "other", PROMPT, seed=1, temperature=1, speculation=loose, cache_salt="x")[1]


def test_simulated_rules_are_refused(shared: Served) -> None:
    """They emit drafts whatever the model's output: only for benchmarks, if the operator enables it."""
    body = {"prompt": PROMPT, "speculation": {"drafter": "suffix", "acceptance": "synthetic:5"}}
    with shared.http(headers={"authorization": "Bearer one"}) as client:
        answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 400 and "enable-synthetic-acceptance" in answer.text
