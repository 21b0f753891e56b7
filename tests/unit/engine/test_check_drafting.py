"""A drafting head is tried before the engine is ready: a broken one is warned of, and nothing of the trial is left."""

from __future__ import annotations

import gc
import logging
import pickle
import shutil
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from stridelm import LLM, SamplingParams
from stridelm.builtin import builtin_path
from stridelm.config import EngineConfig
from stridelm.draft.eagle.drafter import EagleDrafter
from stridelm.engine import check_drafting as module
from stridelm.engine.check_drafting import ENOUGH, LEAST, DraftCheck, check_drafting
from stridelm.engine.engine import Engine
from stridelm.engine.start import start
from support.doubles.bounds import BOUNDS as ON_BOUNDS
from support.doubles.bounds import bounds_registered
from support.doubles.replays import replays

HEADS = {"mtp": "mtp", "eagle": "eagle3", "frozen_kv": "frozen_kv"}
"""Drafters of the built-in model with weights of their own, and where those are."""
LOGGER = "stridelm.engine.check_drafting"


@pytest.fixture(autouse=True)
def _unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loaded machine may need longer than a user should wait; what is tried must not depend on it."""
    monkeypatch.setattr(module, "SECONDS", 60.0)


def built_in(**options: Any) -> Engine:
    """The built-in model; if it drafts with `mtp`, its EAGLE-3 head is named too."""
    named = {"drafter_model": lying_beside("eagle")} if options["drafter"] == "mtp" else {}
    return Engine(EngineConfig(device="cpu", **{**named, **options}))


@pytest.mark.parametrize("drafter", HEADS)
def test_heads_that_fit_are_told_of(drafter: str, caplog: pytest.LogCaptureFixture) -> None:
    """Starting an engine logs what was accepted, of its own head first and then of those that were named, and warns of
    nothing."""
    caplog.set_level(logging.INFO, LOGGER)
    others = [name for name in HEADS if name != drafter]
    start(EngineConfig(device="cpu", drafter=drafter, drafter_model=[lying_beside(other) for other in others]))
    records = of_the_check(caplog)
    assert [record.levelno for record in records] == [logging.INFO] * len(HEADS)
    for name, record in zip((drafter, *others), records, strict=True):
        assert f"drafter {name}: " in record.getMessage() and "first guesses accepted" in record.getMessage()


def lying_beside(drafter: str) -> str:
    """The built-in model's own head."""
    return str(builtin_path() / "drafters" / HEADS[drafter])


def of_the_check(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name == LOGGER]


@pytest.mark.parametrize("depth", [None, "auto"])
def test_a_head_that_fits_is_far_from_the_threshold(depth: Any) -> None:
    for found in check_drafting(built_in(drafter="mtp", depth=depth)):
        assert found.drafts >= 4 * ENOUGH
        assert found.first_accepted > 5 * LEAST * found.drafts
        assert found.emitted > 1.3 * found.drafts


def shuffled(drafter: str, path: Path) -> str:
    """A head of the built-in model with its weights shuffled."""
    shutil.copytree(builtin_path() / "drafters" / HEADS[drafter], path, dirs_exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    for file in path.glob("*.safetensors"):
        tensors = {
            name: tensor.flatten()[torch.randperm(tensor.numel(), generator=generator)].view_as(tensor)
            if tensor.is_floating_point()
            else tensor
            for name, tensor in load_file(file).items()
        }
        save_file(tensors, file)
    return str(path)


@pytest.mark.parametrize("broken", HEADS)
@pytest.mark.parametrize("drafter", [*HEADS, "ngram"])
def test_a_head_with_shuffled_weights_is_warned_of(
    drafter: str, broken: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As if it were another model's, whether the engine drafts with it or it was named for requests that do. The
    warning has its name, and says what is likely and what to do. A head beside the model that nobody named is not
    tried."""
    caplog.set_level(logging.INFO, LOGGER)
    start(EngineConfig(device="cpu", drafter=drafter, drafter_model=shuffled(broken, tmp_path)))
    records = of_the_check(caplog)
    assert len(records) == (1 if drafter in ("ngram", broken) else 2)
    (warning,) = (record for record in records if record.levelno == logging.WARNING)
    for words in (f"drafter {broken}: ", "another model", "other layers", "dtype", "='none'", "check_drafting=False"):
        assert words in warning.getMessage()


def test_a_head_that_cannot_be_used_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One that was named and that the engine itself does not need: names and shapes fit, so the engine starts."""
    head = tmp_path / "head"
    shutil.copytree(lying_beside("eagle"), head)
    file = head / "model.safetensors"
    save_file(
        {name: tensor * float("nan") if "o_proj" in name else tensor for name, tensor in load_file(file).items()}, file
    )
    found = check_drafting(built_in(drafter="mtp", drafter_model=str(head)))
    assert [check.drafter for check in found] == ["mtp"]
    (warning,) = (record for record in of_the_check(caplog) if record.levelno == logging.WARNING)
    assert "drafter eagle cannot be used: " in warning.getMessage() and "not finite" in warning.getMessage()


def test_of_other_heads_nothing_is_left() -> None:
    """They tap no layer of the engine's model runner, and their memory is free."""
    engine = built_in(drafter="mtp")
    assert [check.drafter for check in check_drafting(engine)] == ["mtp", "eagle"]
    assert engine.runner.taps == ()
    gc.collect()
    assert not any(type(each) is EagleDrafter for each in gc.get_objects())


def test_a_few_drafts_are_not_judged() -> None:
    """Next to nothing is a share of enough drafts."""
    found = DraftCheck("mtp", ENOUGH, 0, ENOUGH, 0.1)
    assert found.fails
    assert not replace(found, drafts=ENOUGH - 1).fails
    assert not replace(found, drafts=ENOUGH, first_accepted=1).fails


# What is not tried


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"drafter": "none"}, "no weights of its own"),
        ({"drafter": "ngram"}, "no weights of its own"),
        ({"drafter": "suffix"}, "no weights of its own"),
        ({"drafter": "mask"}, "no weights of its own"),
        ({"drafter": "mtp", "depth": 0, "drafter_model": None}, "drafts nothing"),
        ({"drafter": "mtp", "load_format": "dummy"}, "random"),
        ({"drafter": "mtp", "acceptance": "synthetic:2"}, "simulated"),
        ({"drafter": "mtp", "skip_tokenizer_init": True}, "tokenizer"),
    ],
)
def test_what_says_nothing_is_not_tried(
    options: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    engine = built_in(**options)
    monkeypatch.setattr(engine, "add", lambda *args: pytest.fail("a request was served"))
    assert check_drafting(engine) == ()
    assert why in caplog.text


def test_it_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "step", lambda self: pytest.fail("a step was run"))
    start(EngineConfig(device="cpu", drafter="mtp", check_drafting=False))


def test_a_pool_without_room_is_no_fault(caplog: pytest.LogCaptureFixture) -> None:
    """Where no prompt fits, nothing is measured and nothing is warned of."""
    caplog.set_level(logging.INFO, LOGGER)
    found, _ = check_drafting(built_in(drafter="mtp", num_pages=1, max_model_len=2048))
    assert found.drafts == 0 and not found.fails
    assert "drafting is not checked" in caplog.text


def test_it_ends_in_time(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Past its time no step begins once a few drafts of the engine's own head were verified; what was under way is
    dropped, and another head is not begun with."""
    caplog.set_level(logging.INFO, LOGGER)
    monkeypatch.setattr(module, "SECONDS", 0.0)
    engine = built_in(drafter="mtp")
    (found,) = check_drafting(engine)
    assert ENOUGH <= found.drafts < 3 * ENOUGH
    assert "drafter eagle is not tried: the others took all the time" in caplog.text
    assert not engine.busy
    engine.check()


# What is left of it


@pytest.fixture(params=["host", ON_BOUNDS])
def attention(request: pytest.FixtureRequest) -> Iterator[str]:
    """Steps that land at once, and steps planned on bounds, with one in flight."""
    with bounds_registered():
        yield request.param


def serve(engine: Engine, prompts: list[list[int]]) -> list[Any]:
    """What each request got and what its metrics say, times and fresh seeds apart."""
    requests = [
        engine.add(str(number), prompt, SamplingParams(temperature=0.7 * (number % 2), max_tokens=20, seed=number))
        for number, prompt in enumerate(prompts)
    ]
    while engine.busy:
        engine.step()
    return [
        (r.output_ids, r.finish_reason, r.stats.steps, r.stats.accepted_at, r.stats.reached_at, r.stats.cached_tokens)
        for r in requests
    ]


@pytest.mark.parametrize("depth", [None, "auto"])
def test_an_engine_is_as_without_it(depth: Any, attention: str) -> None:
    """Outputs, metrics, statistics, ledger, prefix cache, and all that depth and prompt policies learnt."""
    engines = [built_in(drafter="mtp", depth=depth, attention=attention, strict=True) for _ in range(2)]
    checked, plain = engines
    before = learnt(checked)
    assert len(check_drafting(checked)) == 2
    assert learnt(checked) == before == learnt(plain)
    assert counts(checked) == counts(plain)
    assert checked.ledger.counts() == plain.ledger.counts()
    # The prompts of the trial themselves: neither their pages nor their drafts may be found again.
    assert checked.tokenizer is not None
    prompts = [checked.tokenizer.encode(prompt) for prompt in module.PROMPTS] * 2
    if depth is None:  # otherwise depths follow measured times
        assert serve(checked, prompts) == serve(plain, prompts)
        assert counts(checked) == counts(plain)
    else:
        assert [each[0] for each in serve(checked, prompts)] == [each[0] for each in serve(plain, prompts)]
    for engine in engines:
        engine.check()


def learnt(engine: Engine) -> tuple[bytes, bytes]:
    return pickle.dumps(vars(engine.cost)), pickle.dumps(engine.adaptive)


def counts(engine: Engine) -> dict[str, Any]:
    return {own.name: getattr(engine.stats, own.name) for own in fields(engine.stats) if own.name != "depths"}


def test_nothing_is_captured_that_a_start_does_not_capture() -> None:
    """On a device that replays steps, a second trial meets every graph of the first: it needs a few sizes alone."""
    with bounds_registered():
        engine = built_in(drafter="mtp", attention=ON_BOUNDS)
        pool = replays(engine)
        first, _ = check_drafting(engine)
        made = pool.graphs
        second, _ = check_drafting(engine)
    assert made and pool.graphs == made
    assert (first.drafts, first.first_accepted) == (second.drafts, second.first_accepted)


def test_it_is_an_option_of_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """On by default in Python too."""
    tried: list[Engine] = []
    note: Callable[[Engine], None] = tried.append
    monkeypatch.setattr("stridelm.engine.start.check_drafting", note)
    LLM(device="cpu", drafter="mtp", check_drafting=False)
    assert not tried
    llm = LLM(device="cpu", drafter="mtp")
    assert tried == [llm.engine]
