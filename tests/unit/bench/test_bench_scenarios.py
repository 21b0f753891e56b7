"""The ten scenarios: the same prompts everywhere, in an order that a seed fixes, and short enough to be served."""

from __future__ import annotations

import ast
import json

import pytest

from stridelm.bench.serving.scenarios import DOCUMENT_CHARS, SCENARIOS, TURNS, requests, scenario_of
from stridelm.bench.serving.texts import FILE, Function, load_texts
from stridelm.builtin import builtin_path
from stridelm.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(builtin_path())


def texts_of(name: str, count: int, seed: int = 0) -> list[str]:
    return [prompt.text for prompt in requests(SCENARIOS[name], count, seed)]


def test_there_are_ten() -> None:
    assert len(SCENARIOS) == 10
    assert all(scenario.name == name for name, scenario in SCENARIOS.items())


def test_the_texts_are_small_and_say_where_they_are_from() -> None:
    assert FILE.stat().st_size < 300_000
    document = json.loads(FILE.read_text(encoding="utf-8"))
    assert document["licence"] == "PSF-2.0" and "Python 3" in document["source"]
    assert "PYTHON SOFTWARE FOUNDATION LICENSE" in FILE.with_suffix(".LICENSE").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_prompt_fits_the_built_in_model(name: str, tokenizer: Tokenizer) -> None:
    """With its output, and each prompt is different."""
    scenario = SCENARIOS[name]
    prompts = [prompt.text for prompt in scenario.build(load_texts(), DOCUMENT_CHARS)]
    assert len(set(prompts)) == len(prompts) >= 5
    assert max(len(tokenizer.encode(text)) for text in prompts) + scenario.max_tokens <= 2048


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_seed_fixes_the_order(name: str) -> None:
    """And requests beyond the scenario's prompts begin anew."""
    scenario = SCENARIOS[name]
    size = len(scenario.build(load_texts(), DOCUMENT_CHARS))
    assert texts_of(name, 7, seed=3) == texts_of(name, size + 2, seed=3)[:7]
    assert (texts_of(name, size) == texts_of(name, size, seed=1)) == scenario.ordered
    both = texts_of(name, 2 * size)
    assert sorted(both[:size]) == sorted(both[size:])


def test_turns_share_their_beginnings() -> None:
    """A conversation's next turn begins with the messages of the turn before it."""
    prompts = requests(SCENARIOS["multi-turn"], 40, 0)
    conversations = len(prompts) // TURNS
    for before, after in zip(prompts, prompts[conversations:]):
        assert after.messages[: len(before.messages)] == before.messages
        assert len(after.messages) == len(before.messages) + 2
        assert after.text.startswith(before.text.removesuffix("Assistant:"))
        assert after.messages[-1].role == "user" and after.text.endswith("\n\nAssistant:")


def test_shared_prefixes_are_shared() -> None:
    first, *others = texts_of("shared-prefix", 8)
    assert all(text[:3000] == first[:3000] for text in others)


def test_what_is_asked_for_is_in_the_prompt() -> None:
    for text in texts_of("retrieval", 46):
        opening = text.rpartition("begins with: ")[2].removesuffix("\n\nQuotation:\n")
        assert opening in " ".join(text.rpartition("\n\nQuote, in full")[0].split())


def test_code_is_python() -> None:
    """A prompt of a module parses; one of a function ends inside it."""
    assert all(ast.parse(text).body for text in texts_of("code-file", 16))
    assert all("def " in text for text in texts_of("code-completion", 48))


def test_functions_are_found_whole() -> None:
    [isleap] = [function for function in load_texts().functions() if function.name == "isleap"]
    assert isinstance(isleap, Function) and isleap.module == "calendar" and isleap.arguments == ("year",)
    assert isleap.code.startswith("def isleap(year):") and "% 400" in isleap.code


def test_documents_have_the_length_asked_for() -> None:
    long, longer = (requests(SCENARIOS["long-document"], 5, 0, size) for size in (2000, 60000))
    tail = len(long[0].text) - 2000
    assert {len(prompt.text) for prompt in long} == {2000 + tail}
    assert {len(prompt.text) for prompt in longer} == {60000 + tail}


def test_what_cannot_be_asked_is_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown scenario chess; known: code-completion, "):
        scenario_of("chess")
    with pytest.raises(ValueError, match="no effect on instruction; leave it out, or choose long-document"):
        requests(SCENARIOS["instruction"], 1, 0, 5000)
    with pytest.raises(ValueError, match="lower it"):
        requests(SCENARIOS["long-document"], 1, 0, 10**6)
