"""`stride generate`: text on stdout, figures on stderr, one object as JSON, and one line when it cannot."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stridelm import LLM, SamplingParams
from stridelm.cli import main as entry_point
from stridelm.cli.generate import HARMLESS
from stridelm.engine.engine import Engine

PROMPT = "def main(argv=None):\n    return sum(argv)\ndef main("
KEYS = {
    "model",
    "drafter",
    "depth",
    "acceptance",
    "acceptance_length",
    "simulated",
    "lossless",
    "seed",
    "text",
    "token_ids",
    "prompt_tokens",
    "completion_tokens",
    "finish_reason",
    "stop_reason",
    "steps",
    "tokens_per_step",
    "drafted",
    "accepted",
    "ttft_s",
    "tokens_per_s",
}
DRAFTING: dict[str, list[str]] = {
    "none": ["--drafter", "none"],
    "ngram": ["--drafter", "ngram", "--depth", "3", "--prompt-lookup-min", "1"],
    "mask": ["--drafter", "mask", "--mask-token-id", "299"],
    "auto": [],
}
TRUST = ["--drafter", "mask", "--mask-token-id", "299", "--depth", "2", "--acceptance", "trust"]

Generate = Callable[..., tuple[int, str, str]]


@pytest.fixture
def generate(speaking: Path, capsys: pytest.CaptureFixture[str]) -> Generate:
    """generate(*options): exit code, stdout and stderr of a short completion of PROMPT."""

    def run(*options: str, prompt: str | None = PROMPT, model: str | Path = speaking) -> tuple[int, str, str]:
        argv = ["generate", str(model), "--dtype", "float32", "--max-tokens", "12", "--ignore-eos"]
        argv += [] if prompt is None else ["--prompt", prompt]
        code = entry_point.main([*argv, *options])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture(scope="module")
def expected(speaking: Path) -> Any:
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    llm = LLM(speaking, dtype="float32", drafter="none", num_pages=32)
    return llm.generate(PROMPT, params)[0]


@pytest.mark.parametrize("drafting", DRAFTING)
def test_the_text_is_what_the_model_says_whoever_drafts(drafting: str, generate: Generate, expected: Any) -> None:
    code, out, err = generate(*DRAFTING[drafting])
    assert code == 0
    assert out.removesuffix("\n") == expected.outputs[0].text.removesuffix("\n")
    assert out.endswith("\n")
    assert err.count("\n") == 1
    assert "exact" in err and "lossy" not in err and "12 tokens in" in err and "tokens/s" in err


def test_json_is_one_object(generate: Generate, expected: Any, speaking: Path) -> None:
    code, out, err = generate("--json", *DRAFTING["ngram"])
    assert (code, err) == (0, "")
    record = json.loads(out)
    sample = expected.outputs[0]
    assert set(record) == KEYS
    assert (record["model"], record["drafter"], record["depth"]) == (str(speaking), "ngram", 3)
    assert (record["acceptance"], record["lossless"]) == ("exact", True)
    assert (record["text"], record["token_ids"]) == (sample.text, sample.token_ids)
    assert record["prompt_tokens"] == len(expected.prompt_token_ids)
    assert record["completion_tokens"] == len(sample.token_ids) == 12
    assert record["finish_reason"] == "length"
    assert record["tokens_per_step"] == 12 / record["steps"]
    assert 0 < record["ttft_s"] <= 12 / record["tokens_per_s"]


def test_a_lossy_rule_says_so(generate: Generate) -> None:
    _, _, err = generate(*TRUST)
    assert "trust (lossy)" in err
    _, out, _ = generate("--json", *TRUST)
    assert json.loads(out)["lossless"] is False


def test_simulated_acceptance_says_so(generate: Generate) -> None:
    asked = [*DRAFTING["ngram"], "--acceptance", "synthetic:1.5"]
    _, _, err = generate(*asked)
    assert "ngram, synthetic:1.5 (simulated acceptance) |" in err
    record = json.loads(generate("--json", *asked)[1])
    said = [record[key] for key in ("acceptance", "acceptance_length", "simulated", "lossless")]
    assert said == ["synthetic", 1.5, True, False]


def test_sampling_options_reach_the_request(generate: Generate) -> None:
    """A seed determines the output; without one every run draws its own and reports it, so that it can be repeated."""
    hot = ("--json", "--temperature", "5")
    records = [json.loads(generate(*hot, *seed)[1]) for seed in (["--seed", "7"], ["--seed", "7"], [], [])]
    assert records[0]["token_ids"] == records[1]["token_ids"]
    assert len({record["seed"] for record in records}) == 3
    again = json.loads(generate(*hot, "--seed", str(records[2]["seed"]))[1])
    assert again["token_ids"] == records[2]["token_ids"]


def test_the_command_has_defaults_of_its_own(speaking: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """256 tokens, greedy: the defaults that `--help` shows apply."""
    with pytest.raises(SystemExit):
        entry_point.main(["generate", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "(default: 256)" in text and "likely" in text
    assert text.split("--temperature FLOAT 0 is greedy")[1].split("(default: ")[1].startswith("0.0)")
    argv = ["generate", str(speaking), "--prompt", "for", "--json", "--ignore-eos", "--dtype", "float32"]
    assert entry_point.main(argv) == 0
    record = json.loads(capsys.readouterr().out)
    room = 256 - record["prompt_tokens"]  # the context ends before max_tokens does
    assert (record["completion_tokens"], record["finish_reason"]) == (room, "length")


@pytest.mark.parametrize(
    "name",
    [
        *("n", "logprobs", "priority", "max-num-seqs", "skip-tokenizer-init", "speculation"),
        "per-request-spec-decode-metrics",
    ],
)
def test_an_option_without_effect_is_no_option(
    name: str, generate: Generate, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        generate(f"--{name}", "1")
    assert exit_.value.code == 2
    assert f"--{name}" in capsys.readouterr().err


def test_the_prompt_may_be_a_file(generate: Generate, expected: Any, tmp_path: Path) -> None:
    """As it is, with its line ends, except for the final one that editors add."""
    file = tmp_path / "prompt.txt"
    file.write_bytes(PROMPT.encode() + b"\n")
    _, out, _ = generate("--prompt-file", str(file), "--json", prompt=None)
    assert json.loads(out)["text"] == expected.outputs[0].text
    file.write_bytes(b"a\r\n\n")
    assert json.loads(generate("--prompt-file", str(file), "--json", prompt=None)[1])["prompt_tokens"] == 3


def test_the_prompt_may_come_from_a_pipe(generate: Generate, expected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(PROMPT.encode()), encoding="ascii"))
    _, out, _ = generate("--prompt-file", "-", "--json", prompt=None)
    assert json.loads(out)["text"] == expected.outputs[0].text


def test_text_is_written_as_it_comes(generate: Generate, expected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The output of a step is on the screen before the next one runs."""
    shown: list[str] = []
    screen = io.StringIO()
    step = Engine.step

    def spy(engine: Engine) -> Any:
        shown.append(screen.getvalue())
        return step(engine)

    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(Engine, "step", spy)
    generate("--drafter", "none")
    assert shown[0] == ""
    assert len(set(shown)) > 3
    assert all(expected.outputs[0].text.startswith(text) for text in shown)
    assert shown == sorted(shown, key=len)


def test_on_a_terminal_the_completion_continues_the_prompt(
    speaking: Path, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys, "stdout", screen)
    argv = ["generate", str(speaking), "--dtype", "float32", "--max-tokens", "12", "--ignore-eos"]
    assert entry_point.main([*argv, "--prompt", "for [bold]x"]) == 0
    said = screen.getvalue()
    assert said.startswith("\x1b[2mfor [bold]x\x1b[0m")
    assert len(said) > len("\x1b[2mfor [bold]x\x1b[0m\n")


def test_control_characters_are_shown_on_a_terminal_and_kept_in_a_pipe() -> None:
    """A model may emit escape sequences that would clear the screen or set the window's title."""
    assert "\x1b]0;x\x07\tok\n\x9b1m\x7f".translate(HARMLESS) == "␛]0;x␇\tok\n\ufffd1m␡"


def test_a_terminal_without_the_character_gets_a_question_mark(
    speaking: Path, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    argv = ["generate", str(speaking), "--dtype", "float32", "--max-tokens", "12", "--ignore-eos"]
    assert entry_point.main([*argv, "--drafter", "none", "--prompt", PROMPT]) == 0
    text = expected.outputs[0].text
    assert not text.isascii()
    assert raw.getvalue().decode().removesuffix("\n") == text.encode("ascii", "replace").decode()


@pytest.mark.parametrize("as_json", [False, True])
def test_interrupted_it_shows_what_there_is(
    as_json: bool, generate: Generate, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines: list[Engine] = []
    step = Engine.step

    def interrupted(engine: Engine) -> Any:
        engines.append(engine)
        if len(engines) > 5:
            raise KeyboardInterrupt
        return step(engine)

    monkeypatch.setattr(Engine, "step", interrupted)
    code, out, err = generate("--drafter", "none", *(["--json"] if as_json else []))
    assert code == 130
    assert not engines[0].busy
    engines[0].check()
    if as_json:
        record = json.loads(out)
        assert record["finish_reason"] == "abort"
        assert record["token_ids"] == expected.outputs[0].token_ids[:5]
    else:
        assert expected.outputs[0].text.startswith(out.rstrip("\n"))
        assert "5 tokens in 5 steps" in err


def test_interrupted_before_the_first_token_it_says_nothing(
    generate: Generate, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(engine: Engine) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "step", interrupted)
    assert generate("--json") == (130, "", "")


def test_a_trace_follows_every_token(generate: Generate, tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    _, out, _ = generate("--json", "--trace", str(file), *DRAFTING["mask"])
    record = json.loads(out)
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    emitted = [token["token"] for line in lines for token in line["verdict"]["emitted"]]
    assert emitted[:12] == record["token_ids"]
    assert sum(bool(line["verdict"]["emitted"]) for line in lines) == record["steps"]


MISUSE: dict[str, tuple[list[str], str]] = {
    "unknown drafter": (["--drafter", "crystal"], "choose one of: "),
    "unknown rule": (["--acceptance", "hope"], "choose one of: block, exact, rejection"),
    "unknown dtype": (["--dtype", "int3"], "choose one of: auto, bfloat16"),
    "unknown device": (["--device", "abacus"], "choose auto, cpu, cuda"),
    "unknown backend": (["--attention", "none"], "choose one of:"),
    "no mask id": (["--drafter", "mask", "--depth", "2"], "give mask_token_id"),
    "mask id outside": (["--mask-token-id", "300"], "from 0 to 299"),
    "too deep": (["--drafter", "ngram", "--depth", "65"], "lower it"),
    "no depth": (["--drafter", "none", "--depth", "2"], "leave it out"),
    "negative depth": (["--depth", "-1"], "from 0"),
    "trust with ngram": (
        ["--drafter", "ngram", "--acceptance", "trust"],
        "it works with: mask",
    ),
    "confidence unheard": (["--drafter", "ngram", "--confidence", "0.5"], "leave it out"),
    "no drafter model": (["--drafter-model", "x"], "give a directory with config.json"),
    "negative temperature": (["--temperature", "-1"], "from 0.0"),
    "temperature is no number": (["--temperature", "nan"], "from 0.0"),
    "no tokens": (["--max-tokens", "0"], "from 1"),
    "bias outside": (["--logit-bias", "300=1"], "from 0 to 299"),
    "long context": (["--max-model-len", "257"], "lower it"),
    "too few pages": (["--num-pages", "1"], "raise num_pages"),
    "no pages": (["--num-pages", "0"], "from 1"),
    "no room": (["--num-pages", "2000000000"], "lower num_pages"),
    "trace nowhere": (["--trace", "no/such/folder/x"], "name another file"),
}


@pytest.mark.parametrize("what", MISUSE)
def test_misuse_is_one_line_and_exit_code_2(what: str, generate: Generate) -> None:
    options, remedy = MISUSE[what]
    code, out, err = generate(*options)
    assert (code, out) == (2, "")
    assert err.startswith("stride: error: ") and err.count("\n") == 1
    assert remedy in err


def test_prompts_that_cannot_be_served(generate: Generate, tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    cases = [
        ({"prompt": ""}, [], "at least one token"),
        ({"prompt": "x" * 400}, [], "shorten the prompt"),
        ({"prompt": "half \udc80"}, [], "UTF-8"),
        ({"prompt": None}, ["--prompt-file", str(tmp_path / "latin")], "not UTF-8"),
        ({"prompt": None}, ["--prompt-file", str(tmp_path / "none")], "name a text file"),
        ({"prompt": None}, ["--prompt-file", str(tmp_path)], "name a text file"),
        ({"model": tmp_path / "nowhere"}, [], "give a directory"),
        ({"model": tmp_path / "latin"}, [], "give a directory"),
        ({"model": tmp_path}, [], "no config.json"),
    ]
    for place, options, remedy in cases:
        code, out, err = generate(*options, **place)  # type: ignore[arg-type]
        assert (code, out) == (2, ""), (place, options)
        assert remedy in err and err.count("\n") == 1, (place, options, err)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "--prompt --prompt-file is required"),
        (["--prompt", "a", "--prompt-file", "b"], "not allowed with"),
        (["--prompt", "a", "--depht", "2"], "--depht"),
        (["--prompt", "a", "--seed", "x"], "invalid int value"),
    ],
)
def test_the_parser_refuses(argv: list[str], says: str, speaking: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        entry_point.main(["generate", str(speaking), *argv])
    assert exit_.value.code == 2
    assert says in capsys.readouterr().err
