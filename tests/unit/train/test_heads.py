"""Heads: from a target and a token file to a directory that serves, what is measured there, and what is refused."""

from __future__ import annotations

import json
import logging
import runpy
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import stridelm.builtin
from stridelm import LLM, SamplingParams
from stridelm.cli.main import main
from stridelm.draft.heads import DraftHead
from stridelm.models.layers.decoder import Decoder
from stridelm.models.loader import load_model
from stridelm.train.continuations import Continuations, Plan
from stridelm.train.export import export
from stridelm.train.frozen_kind import FrozenKVKind
from stridelm.train.head_kinds import Eagle3Kind, HeadKind, MtpKind
from stridelm.train.head_objective import HeadObjective
from stridelm.train.head_stages import check_target
from stridelm.train.prepare import load_tokenizer
from stridelm.train.recipe import new_model, qwen3_config
from stridelm.train.settings import (
    EagleSettings,
    FrozenKVSettings,
    HeadOptimSettings,
    ModelShape,
    MtpSettings,
    RunSettings,
)
from stridelm.train.tokens import TokenFile, tokenizer_hash
from stridelm.train.trainer import Trainer
from stridelm.train.unrolled import target_states
from stridelm.train.windows import Rows

RECIPE = Path(__file__).parents[3] / "recipes" / "builtin" / "heads.py"
LENGTH, PROMPT, STOP = 20, 8, 2
DRAFTERS = {"mtp": "mtp", "eagle3": "eagle", "frozen_kv": "frozen_kv"}
SETTINGS = {
    "prompt-tokens": 8,
    "new-tokens": 12,
    "train-tokens": 96,
    "generate-batch": 4,
    "steps": 4,
    "eval-steps": 2,
    "eval-tokens": 80,
    "batch-tokens": 80,
    "log-steps": 2,
    "device": "cpu",
}
BRIEF = [word for name, value in SETTINGS.items() for word in (f"--{name}", str(value))]


@pytest.fixture(autouse=True)
def log_of_ones_own() -> Iterator[None]:
    """Handlers that commands add to the log are removed with the test, since their stream is closed then."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def made(stage: str) -> HeadKind:
    if stage == "mtp":
        return MtpKind(MtpSettings(unroll=3))
    if stage == "frozen_kv":
        return FrozenKVKind(FrozenKVSettings(unroll=3))
    return Eagle3Kind(EagleSettings(unroll=3, draft_vocab_size=40, mlp=48))


@pytest.fixture(params=DRAFTERS)
def stage(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def target(checkpoint: Callable[..., Path]) -> Decoder:
    return load_model(checkpoint("qwen3", num_hidden_layers=3), serving=False)


@pytest.fixture
def said() -> Continuations:
    """Counting, from random starts: something that a head can learn."""
    start = torch.randint(3, 60, (16, 1), generator=torch.Generator().manual_seed(0))
    rows = (start + torch.arange(LENGTH)) % 60 + 3
    rows[3, 12] = STOP
    return Continuations(Plan(16, LENGTH, PROMPT, 16, 0.5, 0, "uint16", (STOP,), "", ""), rows.numpy().astype("uint16"))


def objective(stage: str, target: Decoder, said: Continuations) -> HeadObjective:
    kind = made(stage)
    return HeadObjective(kind.build(target, said, 0), target, kind, said, compile=False)


# Learning


def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(
    stage: str, target: Decoder, said: Continuations, run_settings: RunSettings, tmp_path: Path
) -> None:
    run = replace(run_settings, steps=12, length=LENGTH, batch_tokens=4 * LENGTH)
    before = objective(stage, target, said).validate()

    def trainer(folder: str, **changes: Any) -> Trainer:
        batches = {LENGTH: Rows(said.on(torch.device("cpu")), run.seed)}
        judge, optim = objective(stage, target, said), HeadOptimSettings()
        return Trainer(stage, judge, batches, replace(run, **changes), optim, tmp_path / folder)

    whole = trainer("whole").train()
    halved = trainer("halved")
    step = halved._step

    def interrupted() -> Any:
        if halved.clock.step == 7:
            raise KeyboardInterrupt
        return step()

    halved._step = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        halved.train()
    resumed = trainer("halved", resume=True).train()
    assert resumed.curve == [{**theirs, "seconds": ours["seconds"]} for ours, theirs in zip(resumed.curve, whole.curve)]
    ours, theirs = (torch.load(tmp_path / name / "best.pt", weights_only=True) for name in ("halved", "whole"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert whole.best["loss"] < 0.9 * before.score
    assert all(torch.isfinite(parameter).all() for parameter in target.parameters())


def test_acceptance_is_of_chains_that_were_right_so_far(stage: str, target: Decoder, said: Continuations) -> None:
    judge = objective(stage, target, said)
    rows = said.on(torch.device("cpu")).long()
    with torch.no_grad():
        states = judge.kind.states(judge.model, target, rows)
        hidden = list(judge.kind.unrolled(judge.model, states, rows, PROMPT - 2, 3))
        guesses = [judge.model.logits(x.flatten(0, 1)).argmax(-1).view(x.shape[:2]) for x in hidden]
    for depth, guess in enumerate(guesses):  # every second guess of every depth is made right, depth by depth others
        truth = rows[:, PROMPT + depth :]
        guess.copy_(torch.where(torch.arange(truth.shape[1]) % 4 > depth, truth, (truth + 1) % 64))
    replies = iter(guesses)

    def logits(hidden_MH: torch.Tensor, module: int = 0) -> torch.Tensor:
        return torch.nn.functional.one_hot(next(replies).flatten(), 64).float()

    def nats(head: DraftHead, hidden_MH: torch.Tensor, sought_M: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(hidden_MH))

    judge.model.logits = logits  # type: ignore[method-assign]
    judge.kind.nats = nats  # type: ignore[method-assign]
    right, reached = [0, 0, 0], [0, 0, 0]
    for row in range(1, 16, 2):  # the greedy ones
        end = LENGTH if row != 3 else 13
        for start in range(PROMPT, end):
            for depth in range(3):
                if start + depth >= end:
                    break
                reached[depth] += 1
                if (start - PROMPT) % 4 <= depth:
                    break
                right[depth] += 1
    metrics = judge.validate().metrics
    assert [metrics[f"accept_{j}"] for j in (1, 2, 3)] == pytest.approx([r / n for r, n in zip(right, reached)])
    assert metrics["tokens_a_step"] == pytest.approx(1 + sum(right) / reached[0])


def test_eagle3_learns_the_targets_odds_of_what_it_can_say(target: Decoder, said: Continuations) -> None:
    kind = made("eagle3")
    head: Any = kind.build(target, said, 0)
    counts = said.counts(64)
    assert counts[head.ids].min() >= counts[~torch.isin(torch.arange(64), head.ids)].max()
    rows = said.on(torch.device("cpu")).long()
    final = target_states(target, rows, ()).final.unflatten(0, rows.shape).detach()
    sought = kind.sought(head, target, rows[:, 1:], final[:, :-1])
    odds = target.logits(final[:, :-1]).softmax(-1)[..., head.ids]
    torch.testing.assert_close(sought, odds / odds.sum(-1, keepdim=True))
    assert torch.equal(head.head.weight, target.head.weight[head.ids])


# From end to end


@pytest.fixture
def tokens(speaking: Path, token_file: Callable[..., TokenFile], tmp_path: Path) -> Path:
    """train.bin and valid.bin of a target with a tokenizer."""
    folder = tmp_path / "tokens"
    folder.mkdir()
    for name, count in (("train", 300), ("valid", 80)):
        token_file(name, count, vocab=300, folder=folder)
        described = json.loads((folder / f"{name}.json").read_text())
        described["tokenizer"] = tokenizer_hash(load_tokenizer(speaking))
        (folder / f"{name}.json").write_text(json.dumps(described))
    return folder / "train.bin"


def stride(*words: object) -> int:
    return main(["train", *map(str, words), *BRIEF])


def test_a_trained_head_serves_and_changes_nothing(stage: str, speaking: Path, tokens: Path, tmp_path: Path) -> None:
    """Twice: what was generated is used again."""
    out = tmp_path / "head"
    own = ["--draft-vocab-size", "100", "--kv-heads", "1"] if stage == "eagle3" else []
    assert stride(stage, "--target", speaking, "--tokens", tokens, "--out", out, *own) == 0
    written = (out / "run" / "train.bin").stat()
    assert stride(stage, "--target", speaking, "--tokens", tokens, "--out", out, *own) == 0
    assert (out / "run" / "train.bin").stat().st_mtime_ns == written.st_mtime_ns
    record = json.loads((out / "provenance.json").read_text())
    assert record["data"]["train"]["sequences"] == 8
    assert record["result"]["best"]["accept_1"] >= 0
    assert record["target"]["name"] == speaking.name
    assert f"{record['parameters']:,} parameters" in (out / "README.md").read_text()
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    options = {"dtype": "float32", "num_pages": 16, "strict": True}
    plain, drafted = (
        LLM(str(speaking), **options, **choice).generate(["def main(", "for name"], params)
        for choice in ({"drafter": "none"}, {"drafter": DRAFTERS[stage], "drafter_model": str(out)})
    )
    assert [o.outputs[0].token_ids for o in drafted] == [o.outputs[0].token_ids for o in plain]
    metrics = [output.metrics for output in drafted]
    assert all(one is not None and one.drafted for one in metrics)


def test_the_recipe_runs_dry(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a small model with the built-in one's tokenizer."""
    config = qwen3_config(ModelShape(hidden=24, layers=2, heads=4, kv_heads=2, head_dim=8, mlp=32), 4096, 4088)
    source = stridelm.builtin.builtin_path()
    export(new_model(config, 0), config, tmp_path / "target", source, {})
    words = ["--target", tmp_path / "target", "--work", tmp_path / "work", "--parts", tmp_path / "parts"]
    monkeypatch.setattr("sys.argv", ["heads.py", "--dry-run", *map(str, words)])
    monkeypatch.syspath_prepend(str(RECIPE.parent))
    runpy.run_path(str(RECIPE), run_name="__main__")
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert all(summary[stage]["served"]["as_plain"] == 1 for stage in DRAFTERS)
    assert {file.name for file in (tmp_path / "parts").iterdir()} == {
        "summary.json",
        *(f"{stage}.{end}" for stage in DRAFTERS for end in ("tar.gz", "safetensors.part-00")),
    }


# Refused


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--new-tokens", "1000", "--batch-tokens", "2000"], "context of 256"),
        (["--batch-tokens", "4"], "--batch-tokens"),
        (["--resume"], "without --resume"),
        (["--greedy-share", "2"], "--greedy-share"),
        (["--unroll", "0"], "--unroll"),
        (["--held-out", "0.5"], "--held-out would have no effect"),
        (["--minutes", "1"], "either --steps or --minutes"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_anything_runs(
    words: list[str], says: str, speaking: Path, tokens: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "head"
    code = main(["train", "mtp", "--target", str(speaking), "--tokens", str(tokens), "--out", str(out), *BRIEF, *words])
    assert code == 2
    assert says in capsys.readouterr().err
    assert not out.exists()


def test_targets_with_other_attention_are_refused(checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match="layers that do not keep keys and values"):
        check_target(checkpoint("deepseek_v3"), 20)
    with pytest.raises(ValueError, match="does not scale attention by its heads' width"):
        check_target(checkpoint("gemma4_text"), 20)


def test_heads_that_do_not_divide_and_tokens_of_others_are_refused(
    speaking: Path, tokens: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--target", speaking, "--out", tmp_path / "head"]
    for heads, kv_heads, says in (
        (3, 1, "divide the hidden size"),
        (4, 3, "num_key_value_heads"),
        (0, 1, "at least 1"),
    ):
        assert stride("eagle3", *given, "--tokens", tokens, "--heads", heads, "--kv-heads", kv_heads) == 2
        assert says in capsys.readouterr().err
    assert stride("mtp", *given, "--tokens", tokens.with_name("valid.bin")) == 2
    assert "there must be a valid.bin beside it" in capsys.readouterr().err
    other = shutil.copytree(tokens.parent, tmp_path / "other")
    described = json.loads((other / "valid.json").read_text())
    (other / "valid.json").write_text(json.dumps(described | {"tokenizer": "another"}))
    assert stride("mtp", *given, "--tokens", other / "train.bin") == 2
    assert "another tokenizer" in capsys.readouterr().err
    assert not (tmp_path / "head").exists()
