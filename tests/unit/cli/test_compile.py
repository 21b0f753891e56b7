"""`stride compile` starts an engine from shapes alone, and refuses what would compile nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from stridelm.cli import main as entry_point


def test_shapes_are_enough(checkpoint: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither weights nor a tokenizer are read."""
    config = json.loads((checkpoint("qwen3", tie_word_embeddings=True) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert entry_point.main(["compile", str(tmp_path), "--device", "cpu", "--drafter", "ngram"]) == 0
    assert "ready on cpu after" in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--enforce-eager", "--capture=lazy", "--check-pages", "--load-format=auto"])
def test_options_without_effect_are_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        entry_point.main(["compile", option])
    assert "unrecognized arguments" in capsys.readouterr().err


def test_an_engine_that_cannot_start_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert entry_point.main(["compile", str(tmp_path / "nothing")]) == 2
    assert "nothing" in capsys.readouterr().err
