"""The benchmarks' shapes are those of the published models: of as many parameters, with assistants that fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gemma_shapes import FULL, SLIDING
from gpu_decode import mixtures
from model_shapes import SHAPES, write_assistant

from stridelm.cache.layout import Shared
from stridelm.config import EngineConfig
from stridelm.draft.frozen_kv.layout import layout_of
from stridelm.draft.given import Given
from stridelm.engine.load import describe_target
from stridelm.models.layers.decoder import Decoder
from stridelm.models.loader import build_empty, load_config

GEMMA = [name for name in SHAPES if name.startswith("gemma4")]
TOTALS = {
    "llama-3.1-8b": 8.03,
    "qwen3-30b-a3b": 30.5,
    "gemma4-26b-a4b": 25.2,
    "gemma4-31b": 30.7,
    "gemma4-e4b": 7.5,
    "gemma4-e2b": 4.65,
}
"""Billions of parameters, as their cards say; of E4B and E2B, less the 0.3 and 0.15 + 0.3 of what sees and hears."""
ACTIVE = {"gemma4-26b-a4b": 3.8, "qwen3-30b-a3b": 3.3}
"""Billions that a token meets."""


def model_of(name: str, folder: Path, layers: int | None = None) -> Decoder:
    SHAPES[name].write(folder, layers)
    return build_empty(load_config(folder), folder)


@pytest.mark.parametrize("name", TOTALS)
def test_a_shape_has_as_many_parameters_as_the_published_model(name: str, tmp_path: Path) -> None:
    model = model_of(name, tmp_path)
    total = sum(each.numel() for each in model.parameters())
    assert total / 1e9 == pytest.approx(TOTALS[name], rel=0.02)
    if name in ACTIVE:
        spared = sum(
            sum(each.numel() for each in part.experts.parameters())
            * (1 - part.spec.routing.num_experts_per_tok / part.experts.count)
            for part in mixtures(model)
        )
        assert (total - spared) / 1e9 == pytest.approx(ACTIVE[name], rel=0.03)


@pytest.mark.parametrize("name", GEMMA)
@pytest.mark.parametrize("layers", [None, 2, 10])
def test_an_assistant_fits_its_model(name: str, layers: int | None, tmp_path: Path) -> None:
    model = model_of(name, tmp_path / "model", layers)
    layout = layout_of(Given(write_assistant(tmp_path / "assistant", SHAPES[name].config)))
    assert layout is not None
    config = EngineConfig(model=str(tmp_path / "model"), load_format="dummy", skip_tokenizer_init=True)
    served = describe_target(config, load_config(tmp_path / "model"), tmp_path / "model", torch.device("cpu"))
    assert layout.misfit(served) is None
    assert layers in (None, model.spec.num_layers)


def test_fewer_layers_share_the_entries_of_as_large_a_part(tmp_path: Path) -> None:
    model = model_of("gemma4-e2b", tmp_path, 14)
    shared = [isinstance(state, Shared) for state in model.layer_states]
    assert shared == [False] * 6 + [True] * 8
    assert load_config(tmp_path).layer_types == [SLIDING] * 3 + [FULL] + [*[SLIDING] * 4, FULL] * 2


def test_only_gemma_has_assistants(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="only Gemma 4's shapes have assistants"):
        write_assistant(tmp_path / "assistant", SHAPES["llama-3.1-8b"].config)
