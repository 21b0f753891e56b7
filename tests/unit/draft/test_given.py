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
    assert engine(model, head).engine.intake.request("", [1], params()).sources == ("eagle", "lookup")
    native = write_mtp(tmp_path / "native", "deepseek")
    assert engine(native).engine.intake.request("", [1], params()).sources == ("mtp", "lookup")


def test_heads_beside_the_model_are_found(tmp_path: Path) -> None:
    """In its folder `drafters`, the best first; directories that the user names come before."""
    model = write(tmp_path / "model", "qwen3")
    beside = write_eagle(model / "drafters" / "some-head", model, "eagle3")
    assert heads_of(model, []) == {"eagle": beside}
    assert engine(model).engine.intake.request("", [1], params()).sources == ("eagle", "lookup")
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
    (tmp_path / "empty" / "config.json").write_text("[" * 100_000)
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


def lacking(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["midlayer.mlp.up_proj.weight"]


def two_layers(tensors: dict[str, torch.Tensor]) -> None:
    tensors["layers.1.mlp.up_proj.weight"] = tensors["midlayer.mlp.up_proj.weight"].clone()


def experts(tensors: dict[str, torch.Tensor]) -> None:
    tensors["midlayer.mlp.experts.0.up_proj.weight"] = tensors.pop("midlayer.mlp.up_proj.weight")


def latent(tensors: dict[str, torch.Tensor]) -> None:
    tensors["midlayer.self_attn.q_a_proj.weight"] = tensors.pop("midlayer.self_attn.q_proj.weight")


def flat(tensors: dict[str, torch.Tensor]) -> None:
    tensors["fc.weight"] = torch.zeros(64)


def four_taps(tensors: dict[str, torch.Tensor]) -> None:
    tensors["fc.weight"] = torch.zeros(64, 4 * 64)


def without_norm(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.layers.2.enorm.weight"]


def not_finite(tensors: dict[str, torch.Tensor]) -> None:
    tensors["norm.weight"].fill_(float("nan"))


IDS = "eagle_aux_hidden_state_layer_ids"
FAULTS: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "width": (lambda head: edit_tensors(head, wrong_width), ("99", "trained for this model")),
    "hidden size": (lambda head: edit_config(head, hidden_size=32), ("hidden size 32", "64", "trained for this model")),
    "target's": (lambda head: edit_config(head, target_hidden_size=96), ("96", "64", "trained for this model")),
    "d2t": (lambda head: edit_tensors(head, without_d2t), ("no d2t",)),
    "astray": (lambda head: edit_tensors(head, astray), ("d2t leads outside the vocabulary",)),
    "lacking": (lambda head: edit_tensors(head, lacking), ("missing", "mlp.up_proj")),
    "two layers": (lambda head: edit_tensors(head, two_layers), ("unexpected", "layers.1.mlp.up_proj")),
    "MLP": (lambda head: edit_config(head, intermediate_size=48), ("misshapen", "mlp.up_proj", "[48, 64]")),
    "layers": (lambda head: edit_config(head, **{IDS: [0, 1, 9]}), ("0, 1, 9", "layers 0 to", IDS)),
    "outputs": (
        lambda head: edit_config(head, **{IDS: None, "eagle_config": {IDS: [0, 1, 4]}}),
        ("layers 1, 2, 5", "layers 0 to 4"),
    ),
    "taps": (lambda head: edit_tensors(head, four_taps), ("256", "192", "trained for this model")),
    "number of taps": (lambda head: edit_config(head, num_aux_hidden_states=4), ("reads 4 hidden states", "3", IDS)),
    "no matrix": (lambda head: edit_tensors(head, flat), ("no drafter recognises",)),
    "no layer": (
        lambda head: edit_config(head, transformer_layer_config="llama"),
        ("layer_config is 'llama'",),
    ),
    "no object": (lambda head: edit_config(head, speculators_config=[1]), ("speculators_config is [1]", "copy")),
    "no taps' object": (
        lambda head: edit_config(head, **{IDS: None, "eagle_config": 3}),
        ("eagle_config is 3",),
    ),
    "no list": (lambda head: edit_config(head, **{IDS: "0, 1"}), ("takes a list of layers",)),
    "no taps": (lambda head: edit_config(head, eagle_config={"use_aux_hidden_state": False}), ("last hidden state",)),
    "vocabulary": (lambda head: edit_config(head, vocab_size=65), ("65", "64", "trained for this model")),
    "draft vocabulary": (lambda head: edit_config(head, draft_vocab_size=41), ("41", "40", "copy it again")),
    "normed taps": (lambda head: edit_config(head, fc_norm=True), ("fc_norm True is not supported",)),
    "normed output": (lambda head: edit_config(head, norm_output=True), ("norm_output True is not supported",)),
    "experts": (lambda head: edit_tensors(head, experts), ("latent attention or experts", "dense llama layer")),
    "latent": (lambda head: edit_tensors(head, latent), ("latent attention or experts", "dense llama layer")),
}


@pytest.fixture(scope="module", params=["qwen3", "qwen3_moe", "deepseek_v3"])
def unread(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target without its weights: whoever asks for those fails."""
    model = write(tmp_path_factory.mktemp(request.param), request.param, num_hidden_layers=5)
    (model / "model.safetensors").unlink()
    return model


@pytest.mark.parametrize("fault", FAULTS)
def test_heads_that_are_not_for_the_model(tmp_path: Path, unread: Path, fault: str) -> None:
    """Each is refused before the target's weights are asked for."""
    spoil, says = FAULTS[fault]
    head = write_eagle(tmp_path / "head", unread, "eagle3", head_dim=16)
    refused(lambda: engine(unread, head), "no *.safetensors")
    spoil(head)
    refused(lambda: engine(unread, head), *says)


def test_a_head_that_is_named_beside_another(tmp_path: Path, unread: Path) -> None:
    """It is looked at too, though it is not the one that drafts."""
    head, other = write_eagle(tmp_path / "head", unread, "eagle3"), write_medusa(tmp_path / "other", unread)
    file = other / "medusa_lm_head.safetensors"
    save_file({name: tensor for name, tensor in load_file(file).items() if name != "1.0.linear.weight"}, file)
    refused(lambda: engine(unread, head, other, drafter="eagle"), "missing: 1.0.linear.weight")


def test_weights_that_are_not_finite(tmp_path: Path, model: Path) -> None:
    head = write_eagle(tmp_path / "head", model, "eagle3")
    edit_tensors(head, not_finite)
    refused(lambda: engine(model, head), "not finite", "norm", "drafter='none' serves without it")
    engine(model, head, drafter="none")


def test_modules_that_do_not_fit(tmp_path: Path) -> None:
    """So are MTP modules in a directory of their own."""
    model = write(tmp_path / "model", "qwen3")
    modules = write_modules(tmp_path / "modules", model)
    edit_tensors(modules, without_norm)
    (model / "model.safetensors").unlink()
    refused(lambda: engine(model, modules), "missing: model.layers.2.enorm.weight")


def test_modules_with_a_senseless_format(tmp_path: Path, model: Path) -> None:
    modules = write_modules(tmp_path, model)
    edit_config(modules, quantization_config="fp8")
    refused(lambda: engine(model, modules), "quantised by a method without a name", "leave it out of drafter_model")


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
