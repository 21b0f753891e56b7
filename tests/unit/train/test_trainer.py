"""The training loop: it learns, it resumes bit for bit, it stops when nothing more can be gained."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stridelm.train.base import BaseObjective
from stridelm.train.mask import MaskObjective
from stridelm.train.objective import Validation
from stridelm.train.recipe import new_model
from stridelm.train.settings import BaseSettings, MaskSettings, OptimSettings, RunSettings
from stridelm.train.trainer import Trainer
from stridelm.train.windows import fixed_windows, text_windows

OPTIM = OptimSettings(warmup=0.1)
MASK_ID = 63


def base_trainer(config: Any, stream: torch.Tensor, run: RunSettings, folder: Path, noise: float = 0.1) -> Trainer:
    valid = fixed_windows(stream, run.length, run.eval_tokens)
    settings = BaseSettings(input_noise=noise)
    objective = BaseObjective(new_model(config, 0), valid, MASK_ID, settings, seed=0, compile=False)
    return Trainer("base", objective, text_windows(stream, run), run, OPTIM, folder)


def mask_trainer(config: Any, stream: torch.Tensor, run: RunSettings, folder: Path) -> Trainer:
    valid = fixed_windows(stream, run.length, run.eval_tokens)
    settings = MaskSettings(k_max=4, anchors=3)
    student, teacher = new_model(config, 0), new_model(config, 0)
    objective = MaskObjective(student, teacher, valid, MASK_ID, settings, seed=0, compile=False)
    return Trainer("mask", objective, text_windows(stream, run), run, OPTIM, folder)


@pytest.mark.parametrize("trainer", [base_trainer, mask_trainer])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(
    config: Any, stream: torch.Tensor, run_settings: RunSettings, tmp_path: Path, trainer: Callable[..., Trainer]
) -> None:
    run = replace(run_settings, short_length=8, short_share=0.5)
    whole = trainer(config, stream, run, tmp_path / "whole")
    whole.train()
    halved = trainer(config, stream, run, tmp_path / "halved")
    step = halved._step

    def interrupted() -> Any:
        if halved.clock.step == 7:
            raise KeyboardInterrupt
        return step()

    halved._step = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        halved.train()
    resumed = trainer(config, stream, replace(run, resume=True), tmp_path / "halved")
    resumed.train()
    ours = torch.load(tmp_path / "halved" / "state.pt", weights_only=True)
    theirs = torch.load(tmp_path / "whole" / "state.pt", weights_only=True)
    assert ours["consumed"] == theirs["consumed"]
    assert [v["step"] for v in ours["curve"]] == [4, 8, 12]
    for name, tensor in theirs["model"].items():
        assert torch.equal(ours["model"][name], tensor), name


def test_the_loss_goes_down_and_the_best_weights_are_left_in_the_model(
    config: Any, stream: torch.Tensor, run_settings: RunSettings, tmp_path: Path
) -> None:
    trainer = base_trainer(config, stream, replace(run_settings, steps=60, eval_steps=20), tmp_path, noise=0.0)
    before = trainer.objective.validate().score
    result = trainer.train()
    assert result.best["plain_loss"] < 0.7 * before
    assert trainer.objective.validate().score == pytest.approx(result.best["plain_loss"])
    records = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert sum("valid" in record for record in records) == 3
    assert records[0]["step"] == 2


def test_training_stops_early_and_only_after_an_early_decay(
    config: Any, stream: torch.Tensor, run_settings: RunSettings, tmp_path: Path
) -> None:
    trainer = base_trainer(config, stream, replace(run_settings, steps=1000, eval_steps=1, patience=3), tmp_path)
    scores = iter([2.0, 1.0] + [3.0] * 1000)
    trainer.objective.validate = lambda: Validation(next(scores), {})  # type: ignore[method-assign]
    result = trainer.train()
    assert result.stopped == "no improvement"
    assert result.best_step == 2
    assert trainer.clock.skipped > 0
    assert result.step == 2 + 3 + 3


def test_resuming_nothing_or_another_run_is_refused(
    config: Any, stream: torch.Tensor, run_settings: RunSettings, tmp_path: Path
) -> None:
    run = replace(run_settings, resume=True)
    with pytest.raises(ValueError, match="without --resume"):
        base_trainer(config, stream, run, tmp_path).train()
    base_trainer(config, stream, run_settings, tmp_path).train()
    with pytest.raises(ValueError, match="seed"):
        base_trainer(config, stream, replace(run, seed=1), tmp_path).train()


def test_a_diverged_run_says_what_to_lower(
    config: Any, stream: torch.Tensor, run_settings: RunSettings, tmp_path: Path
) -> None:
    trainer = base_trainer(config, stream, run_settings, tmp_path)
    model: Any = trainer.objective.model
    model.norm.data.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="learning rates"):
        trainer.train()
