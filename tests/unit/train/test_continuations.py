"""The continuations are what the target generates, and their file is the same however often it was interrupted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stridelm.models.layers.decoder import Decoder
from stridelm.train import continuations as room
from stridelm.train.continuations import Plan, Source, continuations, go_on, live_tokens
from stridelm.train.objective import plain_hidden
from stridelm.train.settings import ContinuationSettings
from stridelm.train.tokens import TokenFile
from stridelm.train.windows import Rows

SETTINGS = ContinuationSettings(prompt_tokens=6, new_tokens=5, generate_batch=4)


@pytest.fixture
def model(tiny_model: Decoder) -> Decoder:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in tiny_model.parameters():  # residual projections start at zero, which would hide the past
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return tiny_model


@pytest.fixture
def plan(token_file: Callable[..., TokenFile]) -> Plan:
    return Plan.of(SETTINGS, 10, 7, token_file("train", 200), Source(64, (5,), "weights"))


def test_greedy_tokens_are_the_models_own_and_the_others_are_drawn_from_it(model: Decoder) -> None:
    prompts = torch.randint(0, 60, (1, 6), generator=torch.Generator().manual_seed(1)).expand(4000, -1)
    greedy = torch.arange(4000) < 2
    rows = go_on(model, prompts, 9, greedy, torch.Generator().manual_seed(2))
    with torch.no_grad():
        logits = model.logits(plain_hidden(model, rows[:, :-1])).unflatten(0, (4000, 8))
    assert torch.equal(rows[:2, 6:], logits[:2, 5:].argmax(-1))
    drawn = rows[2:, 6].bincount(minlength=64) / 3998
    torch.testing.assert_close(drawn, logits[0, 5].softmax(-1), atol=0.03, rtol=0)


def test_an_interrupted_file_goes_on_and_ends_the_same(
    model: Decoder, plan: Plan, token_file: Callable[..., TokenFile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = token_file("train", 200)
    whole = continuations(tmp_path / "whole.bin", plan, text, model, 10.0)
    calls = []

    def interrupted(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return go_on(*args)

    monkeypatch.setattr(room, "go_on", interrupted)
    with pytest.raises(KeyboardInterrupt):
        continuations(tmp_path / "halved.bin", plan, text, model, 10.0)
    with (tmp_path / "halved.bin").open("ab") as stream:
        stream.write(b"torn")
    halved = continuations(tmp_path / "halved.bin", plan, text, model, 10.0)
    assert len(calls) == 4
    assert halved.rows_NL.tolist() == whole.rows_NL.tolist()
    assert continuations(tmp_path / "halved.bin", plan, text, model, 10.0).facts() == whole.facts()
    assert len(calls) == 4
    facts = whole.facts()
    assert (facts["sequences"], facts["greedy_sequences"], facts["prompt_tokens"]) == (10, 5, 60)
    assert facts["continuation_tokens"] == int(whole.counts(64).sum())


def test_a_file_of_another_plan_is_refused_with_the_remedy(
    model: Decoder, plan: Plan, token_file: Callable[..., TokenFile], tmp_path: Path
) -> None:
    text = token_file("train", 200)
    continuations(tmp_path / "x.bin", plan, text, model, 10.0)
    with pytest.raises(ValueError, match=r"another seed, target; .* delete it"):
        continuations(tmp_path / "x.bin", replace(plan, seed=8, target="other"), text, model, 10.0)


def test_nothing_lives_behind_the_end_of_a_text() -> None:
    rows = torch.tensor([[5, 1, 2, 3, 5, 4, 5], [5, 1, 2, 3, 2, 1, 0]])
    live = live_tokens(rows, 2, (5, 9))
    assert live.tolist() == [[True, True, True, False, False], [True] * 5]


def test_greedy_sequences_are_evenly_mixed(plan: Plan) -> None:
    for share in (0.0, 0.25, 0.5, 1.0):
        greedy = replace(plan, greedy_share=share).is_greedy(0, 100)
        assert greedy.sum() == 100 * share
        assert abs(greedy[:50].sum() - 50 * share) <= 1


def test_rows_come_once_an_epoch_in_another_order_each() -> None:
    rows = Rows(torch.arange(7)[:, None].expand(-1, 3), seed=0)
    epochs = [rows.batch(7 * epoch, 7)[:, 0].tolist() for epoch in range(2)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert rows.batch(5, 4)[:, 0].tolist() == epochs[0][5:] + epochs[1][:2]
