"""The resolution of a request's speculation is cached for each distinct speculation."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from stridelm import LLM, SamplingParams
from stridelm.engine import intake
from support.checkpoints.heads import write_eagle


def engine(path: Path, **options: object) -> LLM:
    return LLM(str(path), dtype="float32", skip_tokenizer_init=True, num_pages=20, strict=True, **options)


def test_a_heads_files_may_go_while_it_serves(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    path = checkpoint("qwen3", tie_word_embeddings=True)
    head = write_eagle(tmp_path / "head", path, "eagle3")
    llm = engine(path, drafter_model=str(head))
    params = SamplingParams(temperature=0.0, max_tokens=6, speculation="eagle")
    before = llm.generate([[5, 9, 3]], params)
    shutil.rmtree(head)
    assert llm.generate([[5, 9, 3]], params)[0].outputs[0].token_ids == before[0].outputs[0].token_ids
    with pytest.raises(ValueError, match="no drafter weights"):
        llm.generate([[5, 9, 3]], SamplingParams(speculation={"drafter": "eagle", "depth": 2}))


def test_the_cache_is_bounded(checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "SETTLED", 2)
    llm = engine(checkpoint("qwen3", tie_word_embeddings=True), drafter="none")
    ways = [SamplingParams(max_tokens=2, speculation={"drafter": "ngram", "depth": 1 + i % 5}) for i in range(8)]
    assert len(llm.generate([[5, 9, 3]] * len(ways), ways)) == len(ways)
    assert 1 <= len(llm.engine.intake._settled) <= 2
