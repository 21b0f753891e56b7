"""How Hugging Face configs are read."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import LlamaConfig

from stridelm.models.layers.hf import dense_layers


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ({"hidden_act": "silu"}, "silu"),
        ({"hidden_act": "swish"}, "silu"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"hidden_act": "gelu_pytorch_tanh"}, "gelu_tanh"),
        ({"hidden_act": "gelu", "hidden_activation": None}, "gelu"),
        ({"hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh"}, "gelu_tanh"),
    ],
)
def test_activations(said: dict[str, Any], meant: str) -> None:
    """By transformers' names; if a config has both fields, the newer one counts."""
    mlps: list[Any] = [layer.mlp for layer in dense_layers(LlamaConfig(**said))]
    assert mlps and all(mlp.activation == meant for mlp in mlps)


@pytest.mark.parametrize("said", [{"hidden_act": "relu"}, {"hidden_act": "silu", "hidden_activation": "gelu_new"}])
def test_other_activations_are_refused(said: dict[str, Any]) -> None:
    name = list(said.values())[-1]
    with pytest.raises(ValueError, match=f"'{name}' is not supported; supported: silu, swish, gelu_pytorch_tanh, gelu"):
        dense_layers(LlamaConfig(**said))
