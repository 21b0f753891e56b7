"""What a checkpoint's authors recommend applies to what a request leaves out, and to nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stridelm.params import SamplingParams
from stridelm.text.generation_config import FILE, HEEDED, GenerationDefaults, read_generation_config

RECOMMENDED: dict[str, Any] = {
    "temperature": 0.6,
    "top_p": 0.95,
    "top_k": 20,
    "min_p": 0.05,
    "repetition_penalty": 1.05,
    "max_new_tokens": 40,
}
OTHER: dict[str, Any] = {
    "temperature": 0.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "max_new_tokens": 90,
}
"""Values that a request may set instead, each of them neutral or larger."""

Directory = Callable[..., Path]


@pytest.fixture
def directory(tmp_path: Path) -> Directory:
    """directory(content): a directory with such a file."""

    def write(content: Any) -> Path:
        (tmp_path / FILE).write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
        return tmp_path

    return write


def test_every_parameter_is_tried() -> None:
    assert set(RECOMMENDED) == set(OTHER) == set(HEEDED)


@pytest.mark.parametrize("theirs", HEEDED)
def test_it_holds_for_what_is_left_out(theirs: str, directory: Directory) -> None:
    """A given parameter is used as it is, neutral or not; one left out is the recommended one; no other is changed.
    With `vllm` all are neutral."""
    ours = HEEDED[theirs]
    path = directory({theirs: RECOMMENDED[theirs], "do_sample": False, "eos_token_id": 2, "pad_token_id": None})
    defaults = read_generation_config("auto", path)
    assert SamplingParams(**defaults.fill({})) == SamplingParams(**{ours: RECOMMENDED[theirs]})
    assert SamplingParams(**defaults.fill({ours: OTHER[theirs]})) == SamplingParams(**{ours: OTHER[theirs]})
    assert SamplingParams(**defaults.fill({"seed": 3})) == SamplingParams(**{ours: RECOMMENDED[theirs], "seed": 3})
    neutral = read_generation_config("vllm", path)
    assert neutral == GenerationDefaults() and neutral.fill({"seed": 3}) == {"seed": 3}


def test_where_it_is_read(directory: Directory, tmp_path_factory: pytest.TempPathFactory) -> None:
    """`auto` reads the file beside the model if there is one; a directory's is read instead, and must exist."""
    model, other = tmp_path_factory.mktemp("model"), directory({"top_k": 7})
    assert read_generation_config("auto", model) == GenerationDefaults(source=str(model / FILE))
    assert read_generation_config(str(other), model).values == {"top_k": 7}
    with pytest.raises(ValueError, match=f"no {FILE}.*auto or vllm"):
        read_generation_config(str(model), other)


@pytest.mark.parametrize(("asked", "own", "elsewhere"), [(None, 40, 40), (10, 10, 10), (90, 90, 40)])
def test_max_new_tokens(directory: Directory, asked: int | None, own: int, elsewhere: int) -> None:
    """In the checkpoint's own file it is a default; in a directory that the operator named it is also a limit."""
    path = directory({"max_new_tokens": 40})
    assert read_generation_config("auto", path).fill({"max_tokens": asked}) == {"max_tokens": own}
    assert read_generation_config(str(path), path).fill({"max_tokens": asked}) == {"max_tokens": elsewhere}
    assert read_generation_config("auto", path).fill({}) == {"max_tokens": 40}
    assert GenerationDefaults().fill({"max_tokens": asked}) == {"max_tokens": asked}


@pytest.mark.parametrize(
    "content",
    [
        {"temperature": -1},
        {"temperature": "warm"},
        {"top_p": 0},
        {"top_k": 0.5},
        {"min_p": 2},
        {"repetition_penalty": 0},
        {"max_new_tokens": 0},
        {"temperature": True},
        "{",
    ],
    ids=str,
)
def test_a_bad_file_is_named(content: Any, directory: Directory) -> None:
    path = directory(content)
    with pytest.raises(ValueError, match=FILE):
        read_generation_config("auto", path)
    assert read_generation_config("vllm", path) == GenerationDefaults()


def test_one_line_says_what_is_taken_and_from_where(directory: Directory, caplog: pytest.LogCaptureFixture) -> None:
    """Where there is something to say."""
    path = directory(RECOMMENDED)
    read_generation_config("auto", path).tell()
    (line,) = caplog.messages
    assert str(path / FILE) in line and "generation_config vllm" in line
    assert all(f"{ours} {RECOMMENDED[theirs]}" in line for theirs, ours in HEEDED.items())
    caplog.clear()
    for which in ("auto", "vllm"):
        read_generation_config(which, directory({"eos_token_id": 2})).tell()
    assert not caplog.messages
