"""`LLM.chat` and `LLM.generate` called as vLLM's: conversations, prompts in mappings, and progress."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stridelm import LLM, SamplingParams
from stridelm.llm_inputs import Prompt
from support.doubles.server import CHATML

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
ASK = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "def main"}]
MORE = [*ASK, {"role": "assistant", "content": "(argv"}]
WRITTEN = "<|system|>be brief\n<|user|>def main\n"


@pytest.fixture(scope="module")
def llm(speaking: Path) -> LLM:
    llm = LLM(speaking, dtype="float32", drafter="none", num_pages=48, max_num_seqs=4, strict=True)
    llm.get_tokenizer().chat_template = CHATML
    return llm


def text(llm: LLM, prompt: str) -> str:
    return llm.generate({"prompt": prompt}, GREEDY)[0].outputs[0].text


def test_a_conversation(llm: LLM) -> None:
    """It is written by the template and completed as that text."""
    (output,) = llm.chat(ASK, GREEDY)
    assert output.prompt == f"{WRITTEN}<|assistant|>" and output.outputs[0].text == text(llm, output.prompt)
    assert output.prompt_token_ids == llm.get_tokenizer().encode(output.prompt, add_special_tokens=False)


def test_several_conversations(llm: LLM) -> None:
    """With a parameter set each; outputs in their order."""
    sets = [GREEDY, SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)]
    long, short = llm.chat([ASK, ASK[1:]], sampling_params=sets, use_tqdm=False)
    assert short.prompt == "<|user|>def main\n<|assistant|>"
    assert (len(long.outputs[0].token_ids), len(short.outputs[0].token_ids)) == (8, 3)
    assert [output.prompt for output in llm.chat([ASK], GREEDY)] == [long.prompt]


def test_what_the_template_is_told(llm: LLM) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}

    def written(messages: list[dict[str, str]] = ASK, **more: Any) -> str | None:
        return llm.chat(messages, SamplingParams(max_tokens=1), **more)[0].prompt

    assert written(add_generation_prompt=False) == WRITTEN
    assert written(tools=[tool]) == f"{WRITTEN}tools: look\n<|assistant|>"
    going_on = written(MORE, continue_final_message=True, add_generation_prompt=False)
    assert going_on == f"{WRITTEN}<|assistant|>(argv"
    template = "{{ mood }}: {{ messages[0].content }}"
    assert written(chat_template=template, chat_template_kwargs={"mood": "calm"}) == "calm: be brief"
    assert llm.get_tokenizer().chat_template == CHATML


REFUSED: list[tuple[Callable[[LLM], Any], str]] = [
    (lambda llm: llm.chat([]), "a conversation, or a list of them"),
    (lambda llm: llm.chat("def main"), "a conversation, or a list of them"),  # type: ignore[arg-type]
    (lambda llm: llm.chat(ASK[0]), "a conversation, or a list of them"),  # type: ignore[arg-type]
    (lambda llm: llm.chat([[]]), "a list of mappings with a role"),
    (lambda llm: llm.chat([ASK, ASK[0]]), "a list of mappings with a role"),  # type: ignore[arg-type]
    (lambda llm: llm.chat([{"content": "x"}]), "a list of mappings with a role"),
    (lambda llm: llm.chat([*ASK, "x"]), "a list of mappings with a role"),  # type: ignore[arg-type]
    (lambda llm: llm.chat(ASK, continue_final_message=True), "add_generation_prompt=False"),
    (lambda llm: llm.chat(ASK, chat_template="{% if %}"), "refuses these messages"),
    (lambda llm: llm.chat(ASK, chat_template_kwargs={"tokenize": True}), "tokenize is not a variable"),
    (lambda llm: llm.chat(ASK, 5), "sampling_params must be SamplingParams"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("call", "says"), REFUSED, ids=[says for _, says in REFUSED])
def test_refusals(call: Callable[[LLM], Any], says: str, llm: LLM) -> None:
    with pytest.raises(ValueError, match=says):
        call(llm)
    assert not llm.engine.busy


def test_without_a_template(speaking: Path) -> None:
    """One may be given; without, the error says where to put it."""
    plain = LLM(speaking, dtype="float32", drafter="none", num_pages=48)
    with pytest.raises(ValueError, match=r"chat_template\.jinja"):
        plain.chat(ASK)
    assert plain.chat(ASK, GREEDY, chat_template=CHATML)[0].prompt == f"{WRITTEN}<|assistant|>"


def test_prompts_in_mappings(llm: LLM) -> None:
    """Text, ids, or both: the ids are what is read."""
    ids = llm.get_tokenizer().encode("def main")
    prompts: list[Prompt] = [
        {"prompt": "def main"},
        {"prompt_token_ids": ids},
        {"prompt": "for", "prompt_token_ids": ids},
        "def main",
    ]
    outputs = llm.generate(prompts, sampling_params=GREEDY, use_tqdm=False)
    assert [output.prompt for output in outputs] == ["def main", None, "for", "def main"]
    assert all(output.prompt_token_ids == ids for output in outputs)
    assert len({output.outputs[0].text for output in outputs}) == 1
    *_, last = llm.stream({"prompt_token_ids": ids}, GREEDY)
    assert last.outputs[0].text == outputs[0].outputs[0].text


class Bar:
    """What tqdm is to its callers."""

    made: list[Bar]

    def __init__(self, total: int, desc: str) -> None:
        self.total, self.done, self.closed = total, 0, False
        assert desc
        Bar.made.append(self)

    def update(self, count: int) -> None:
        assert not self.closed
        self.done += count

    def close(self) -> None:
        self.closed = True


def test_progress_goes_to_the_callers_bar(llm: LLM) -> None:
    """It counts prompts, not samples, and is closed even if something fails."""
    Bar.made = []
    llm.generate(["def", "for", "x"], SamplingParams(n=2, max_tokens=3), use_tqdm=Bar)
    llm.chat(ASK, GREEDY, use_tqdm=Bar)

    def fail(_: Any) -> None:
        raise KeyError("no")

    with pytest.raises(KeyError):
        llm.generate(["def", "for"], GREEDY, use_tqdm=Bar, on_output=fail)
    assert [(bar.total, bar.done, bar.closed) for bar in Bar.made] == [(3, 3, True), (1, 1, True), (2, 0, True)]
    assert not llm.engine.busy


@pytest.mark.parametrize(("prompts", "shown", "seen"), [(2, True, True), (2, False, False), (1, True, False)])
def test_progress_on_a_terminal(
    prompts: int, shown: bool, seen: bool, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For several prompts, unless it is switched off."""
    stderr = io.StringIO()
    monkeypatch.setattr(stderr, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setenv("TERM", "xterm")
    llm.generate(["def"] * prompts, GREEDY, use_tqdm=shown)
    assert ("2 of 2 prompts" in stderr.getvalue()) == seen
