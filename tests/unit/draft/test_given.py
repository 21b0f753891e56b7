"""Directories of drafters' weights: which drafter they are for, and errors about them before the first token."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from stridelm import LLM
from stridelm.draft.given import given
from stridelm.draft.whose import heads_of, whose
from support.checkpoints.heads import write_eagle, write_medusa, write_modules, write_mtp
from support.checkpoints.models import write


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("model"), "qwen3")


def engine(model: Path, *heads: Path, **options: Any) -> LLM:
    settings = {"dtype": "float32", "skip_tokenizer_init": True, "num_pages": 20}
    return LLM(str(model), drafter_model=[str(head) for head in heads], **{**settings, **options})


def refused(call: Callable[[], Any], *says: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the text is looked at below)
        call()
    assert all(part in str(caught.value) for part in says), caught.value


def edit_config(head: Path, **changes: Any) -> None:
    file = head / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def edit_tensors(head: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    file = head / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def test_they_say_whose_they_are(tmp_path: Path, model: Path) -> None:
    forms = {
        "eagle1": write_eagle(tmp_path / "1", model, "eagle1"),
        "pickled": write_eagle(tmp_path / "2", model, "eagle1", binary=True),
        "eagle3": write_eagle(tmp_path / "3", model, "eagle3"),
        "speculators": write_eagle(tmp_path / "4", model, "speculators"),
    }
    assert {whose(path) for path in forms.values()} == {"eagle"}
    assert whose(write_medusa(tmp_path / "5", model)) == "medusa"
    assert whose(model) == "model"


def test_auto_takes_what_was_given(tmp_path: Path, model: Path) -> None:
    head = write_eagle(tmp_path / "head", model, "eagle3")
    assert engine(model, head).engine.intake.request("", [1], params()).speculation.drafter == "eagle"
    native = write_mtp(tmp_path / "native", "deepseek")
    assert engine(native).engine.intake.request("", [1], params()).speculation.drafter == "mtp"


def test_heads_beside_the_model_are_found(tmp_path: Path) -> None:
    """In its folder `drafters`, the best first; directories that the user names come before."""
    model = write(tmp_path / "model", "qwen3")
    beside = write_eagle(model / "drafters" / "some-head", model, "eagle3")
    assert heads_of(model, []) == {"eagle": beside}
    assert engine(model).engine.intake.request("", [1], params()).speculation.drafter == "eagle"
    modules = write_modules(model / "drafters" / "some-modules", model)
    assert list(heads_of(model, [])) == ["mtp", "eagle"]
    named = write_eagle(tmp_path / "named", model, "eagle1")
    assert list(heads_of(model, [str(named)]).items()) == [("eagle", named), ("mtp", modules)]


def params() -> Any:
    from stridelm import SamplingParams

    return SamplingParams()


def test_nobody_s(tmp_path: Path, model: Path) -> None:
    refused(lambda: engine(model, tmp_path / "nowhere"), "nowhere", "config.json")
    (tmp_path / "empty").mkdir()
    refused(lambda: engine(model, tmp_path / "empty"), "no *.safetensors")
    save_file({"x": torch.zeros(2)}, tmp_path / "empty" / "model.safetensors")
    refused(lambda: engine(model, tmp_path / "empty"), "config.json cannot be read")
    (tmp_path / "empty" / "config.json").write_text("{}")
    refused(lambda: engine(model, tmp_path / "empty"), "no drafter recognises", "eagle")
    one, two = (write_eagle(tmp_path / name, model, "eagle3") for name in "ab")
    refused(lambda: engine(model, one, two), "both weights for drafter 'eagle'")


class Danger:
    """What a malicious pickle may do when it is loaded carelessly."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("danger",)


def test_pickles_are_not_run(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    head = write_eagle(tmp_path / "head", model, "eagle1", binary=True)
    torch.save({"fc.weight": Danger()}, head / "pytorch_model.bin")
    refused(lambda: engine(model, head), "not a pickle of plain tensors", "safetensors")
    assert not (tmp_path / "danger").exists()
    torch.save({"fc.weight": [1, 2]}, head / "pytorch_model.bin")
    refused(lambda: engine(model, head), "more than plain tensors")


def wrong_width(tensors: dict[str, torch.Tensor]) -> None:
    tensors["fc.weight"] = torch.zeros(64, 99)


def without_d2t(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["d2t"]


def astray(tensors: dict[str, torch.Tensor]) -> None:
    tensors["d2t"] = tensors["d2t"] + 1000


def not_finite(tensors: dict[str, torch.Tensor]) -> None:
    tensors["norm.weight"].fill_(float("nan"))


def lacking(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["midlayer.mlp.up_proj.weight"]


FAULTS: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "width": (lambda head: edit_tensors(head, wrong_width), ("99", "trained for this model")),
    "d2t": (lambda head: edit_tensors(head, without_d2t), ("no d2t",)),
    "astray": (lambda head: edit_tensors(head, astray), ("d2t leads outside the vocabulary",)),
    "nan": (lambda head: edit_tensors(head, not_finite), ("not finite", "norm")),
    "lacking": (lambda head: edit_tensors(head, lacking), ("missing", "mlp.up_proj")),
    "layers": (lambda head: edit_config(head, eagle_aux_hidden_state_layer_ids=[0, 1, 9]), ("0, 1, 9", "layers 0 to")),
    "vocabulary": (lambda head: edit_config(head, vocab_size=65), ("65", "64")),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_heads_that_are_not_for_the_model(tmp_path: Path, model: Path, fault: str) -> None:
    spoil, says = FAULTS[fault]
    head = write_eagle(tmp_path / "head", model, "eagle3")
    spoil(head)
    refused(lambda: engine(model, head), *says)


def test_another_model_s(tmp_path: Path, model: Path) -> None:
    other = write(tmp_path / "other", "llama", hidden_size=32, head_dim=8)
    head = write_eagle(tmp_path / "head", other, "eagle3")
    refused(lambda: engine(model, head), "hidden size 32", "64")
    head = write_eagle(tmp_path / "speculators", write(tmp_path / "llama", "llama"), "speculators")
    refused(lambda: engine(model, head), "LlamaForCausalLM", "Qwen3ForCausalLM")


def test_modules_that_are_declared_and_not_there(tmp_path: Path) -> None:
    model = write(tmp_path / "model", "qwen3")
    edit_config(model, num_nextn_predict_layers=1)
    refused(lambda: engine(model, drafter="mtp"), "declares MTP modules", "hold none")
    assert given(model).config["num_nextn_predict_layers"] == 1


TREES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "wider than a draft": ({"draft_topk": 9, "depth": 9}, ("grows 72 nodes",)),
    "wider than comes up": ({"draft_topk": 2, "depth": 2, "num_draft_tokens": 60}, ("60", "over 6")),
    "more children than tokens": ({"token_tree": "[(64,)]"}, ("65 children", "64 tokens")),
    "budget alone": ({"num_draft_tokens": 9}, ("no effect on a chain",)),
    "no tree": ({"token_tree": "[(0, 0)]"}, ("needs (0,)",)),
    "no paths": ({"token_tree": "7"}, ("paths of ranks",)),
    "a gap": ({"token_tree": "[(1,)]"}, ("needs (0,)",)),
    "too many": ({"token_tree": str([(0,), *((0, n) for n in range(64))]), "depth": 2}, ("65 nodes",)),
    "both": ({"token_tree": "[(0,)]", "draft_topk": 2, "depth": 1}, ("no effect",)),
    "deeper than the tree": ({"token_tree": "[(0,)]", "depth": 2}, ("levels of token_tree",)),
    "block": ({"draft_topk": 2, "acceptance": "block"}, ("only chains",)),
    "trust": ({"acceptance": "trust"}, ("does not work with drafter 'eagle'",)),
    "looked up": ({"draft_topk": 2, "prompt_lookup_min": 4}, ("replaces a chain",)),
    "unknown rule": ({"acceptance": "hope"}, ("unknown acceptance rule",)),
}


@pytest.mark.parametrize("tree", TREES)
def test_trees_that_cannot_be(tmp_path: Path, model: Path, tree: str) -> None:
    options, says = TREES[tree]
    head = write_eagle(tmp_path / "head", model, "eagle3")
    refused(lambda: engine(model, head, drafter="eagle", **options), *says)
