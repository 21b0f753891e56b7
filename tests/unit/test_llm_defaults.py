"""Offline, parameters that are not given are those that the checkpoint's authors recommend, as in vLLM."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from stridelm import LLM, SamplingParams
from stridelm.cli import main as entry_point

RECOMMENDED = {"temperature": 0.7, "top_k": 5, "repetition_penalty": 1.3, "max_new_tokens": 9}
PARAMS = SamplingParams(temperature=0.7, top_k=5, repetition_penalty=1.3, max_tokens=9)
PROMPT = [5, 6, 7, 5, 6, 7]


@pytest.fixture(scope="module")
def recommending(speaking: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recommending") / "model"
    shutil.copytree(speaking, path)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, **RECOMMENDED}), encoding="utf-8")
    return path


def llm(path: Path, **options: str) -> LLM:
    return LLM(path, dtype="float32", drafter="none", num_pages=48, **options)


def test_no_parameters_are_the_recommended_ones(recommending: Path, caplog: pytest.LogCaptureFixture) -> None:
    """For `generate` and `stream`; logged once, when first used. Given values are used as they are."""
    ours = llm(recommending)
    given = ours.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))[0].outputs[0]
    assert not caplog.messages and len(given.token_ids) == 20
    assert ours.get_default_sampling_params() == PARAMS
    outputs = ours.stream(PROMPT)
    (request,) = [*ours.engine.queue.waiting, *ours.engine.queue.running]
    assert request.params == PARAMS
    outputs.close()
    assert len(ours.generate(PROMPT)[0].outputs[0].token_ids) <= 9
    assert len(caplog.messages) == 1


def test_neutral_defaults(recommending: Path) -> None:
    """`vllm` ignores the file's recommendations, but not its ends of text, which belong to the model."""
    ours = llm(recommending, generation_config="vllm")
    assert ours.get_default_sampling_params() == SamplingParams()
    assert ours.engine.loaded.eos_ids == llm(recommending).engine.loaded.eos_ids == (2,)


def test_a_bad_file_is_known_before_the_model_is_read(recommending: Path) -> None:
    with pytest.raises(ValueError, match="generation_config"):
        llm(recommending, generation_config=str(recommending / "nowhere"))


def test_the_command_line_takes_them_for_what_is_not_given(
    recommending: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They override its own defaults, and given options override them."""

    def generate(*options: str) -> dict[str, object]:
        argv = [
            "generate",
            str(recommending),
            "--dtype",
            "float32",
            "--prompt",
            "for",
            "--json",
            "--ignore-eos",
            *options,
        ]
        assert entry_point.main(argv) == 0
        record = json.loads(capsys.readouterr().out)
        return {name: record[name] for name in ("token_ids", "completion_tokens")}

    spelt = ("--temperature", "0.7", "--top-k", "5", "--repetition-penalty", "1.3", "--max-tokens", "9", "--seed", "4")
    recommended = generate("--seed", "4")
    assert recommended == generate(*spelt, "--generation-config", "vllm")
    assert recommended["completion_tokens"] == 9
    assert generate("--temperature", "0", "--max-tokens", "30")["completion_tokens"] == 30
    assert generate("--generation-config", "vllm")["completion_tokens"] != 9
