"""Models in eight bits by definition: transformers' own in float64, in which a matrix that a checkpoint stores in eight
bits is widened, and its rows are quantised before they meet it."""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from support.checkpoints.fp8 import BLOCK, SCALES, up_to_power
from support.doubles.stand import Stand
from support.oracles.heads import Modules, mtp, rms_norm
from support.oracles.models import CLOSE, PROMPT, engine_logits

ABSORBED = "kv_b_proj"
"""Part of a latent's projection that meets no rows: it is widened, and its rows are not quantised."""


def rows_by_definition(x: torch.Tensor, form: str) -> torch.Tensor:
    """What quantisation leaves of rows [..., I]. On the CPU: CUDA does not divide by a Python number exactly."""
    parts = []
    for part in x.cpu().float().split(x.shape[-1] if form == "channel" else BLOCK, -1):
        scale = part.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448
        if form == "powers":
            scale = scale.apply_(up_to_power)
        parts.append((part / scale).to(torch.float8_e4m3fn).double() * scale.double())
    return torch.cat(parts, -1).to(x)


def widened(weight: torch.Tensor, scale: torch.Tensor, form: str) -> torch.Tensor:
    """[O, I] float64."""
    height, width = (1, weight.shape[1]) if form == "channel" else (BLOCK, BLOCK)
    whole = scale.double().repeat_interleave(height, 0)[: weight.shape[0]].repeat_interleave(width, 1)
    return weight.double() * whole[:, : weight.shape[1]]


class Quantising(nn.Module):
    """A linear layer whose rows are quantised first."""

    def __init__(self, inner: nn.Linear, form: str) -> None:
        super().__init__()
        self.inner, self.form = inner, form

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.inner(rows_by_definition(x, self.form))
        return made


class QuantisingExperts(nn.Module):
    """A mixture's experts, one after another."""

    def __init__(self, inner: Any, form: str) -> None:
        super().__init__()
        self.inner, self.form = inner, form

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(x)
        for row, (experts, scales) in enumerate(zip(chosen.tolist(), weights)):
            for expert, scale in zip(experts, scales):
                read = rows_by_definition(x[row : row + 1], self.form)
                gate, up = (read @ self.inner.gate_up_proj[expert].t()).chunk(2, -1)
                inner = rows_by_definition(self.inner.act_fn(gate) * up, self.form)
                total[row] += (inner @ self.inner.down_proj[expert].t())[0] * scale
        return total


class Norm(nn.Module):
    """transformers' own computes in float32, and then a number may be rounded to another one of e4m3."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.inner.weight, self.inner.variance_epsilon)


def wide_softmax(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    return x.softmax(dim)


def write_widened(target: Path, source: Path, form: str) -> set[str]:
    """A checkpoint's matrices in float64, without quantisation; returns the names of those that were in eight bits."""
    tensors = load_file(source / "model.safetensors")
    eight = {name.removesuffix(".weight") for name, tensor in tensors.items() if tensor.dtype == torch.float8_e4m3fn}
    for name in eight:
        scale = tensors.pop(f"{name}.{SCALES[form]}")
        tensors[f"{name}.weight"] = widened(tensors[f"{name}.weight"], scale, form)
    config = json.loads((source / "config.json").read_text())
    del config["quantization_config"]
    target.mkdir(exist_ok=True)
    (target / "config.json").write_text(json.dumps(config))
    double = {name: tensor.double() for name, tensor in tensors.items()}
    save_file(double, target / "model.safetensors", metadata={"format": "pt"})
    return eight


def make_quantising(model: nn.Module, eight: set[str], form: str, prefix: str = "") -> None:
    """Let the layers named in `eight` quantise their rows. prefix: how names of the model's tensors begin there."""
    quantising = 0
    for name, module in list(model.named_modules()):
        stored = prefix + name
        if type(module).__name__.endswith("RMSNorm"):
            model.set_submodule(name, Norm(module))
        elif stored in eight and ABSORBED not in name:
            model.set_submodule(name, Quantising(module, form))
            quantising += 1
        elif f"{stored}.0.down_proj" in eight:
            model.set_submodule(name, QuantisingExperts(module, form))
            quantising += 1
    assert quantising


def oracle(path: Path, form: str) -> Any:
    with tempfile.TemporaryDirectory() as directory:
        eight = write_widened(Path(directory), path, form)
        model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager", dtype=torch.float64)
    make_quantising(model, eight, form)
    return model.eval()


def mtp_oracle(path: Path, form: str) -> Modules:
    """The same of a checkpoint with modules, as DeepSeek names them, that are in eight bits too."""
    with tempfile.TemporaryDirectory() as directory:
        eight = write_widened(Path(directory), path, form)

        def change(model: nn.Module, prefix: str) -> None:
            make_quantising(model, eight, form, prefix)

        return mtp(Path(directory), "deepseek", torch.float64, change)


@torch.inference_mode()
def check_fp8(path: Path, form: str, chunk: int, device: str = "cpu", close: float = CLOSE, **settings: Any) -> None:
    """Prefill in chunks, then decoding: every position's logits are those of the definition in float64, in which a CPU
    computes here too."""
    stand = Stand(path, "float64" if device == "cpu" else "float32", device, options=settings)
    rng = random.Random(chunk)
    prompt = [rng.randrange(stand.target.vocab_size) for _ in range(PROMPT)]
    ids, ours = engine_logits(stand, prompt, max_num_batched_tokens=chunk)
    with mock.patch.object(nn.functional, "softmax", wide_softmax):
        wanted = oracle(path, form)(torch.tensor([ids])).logits[0, :-1].float()
    worst = float((ours - wanted).abs().max())
    assert worst <= close * max(1.0, float(wanted.abs().max())), worst
    assert float(wanted.std()) > 0.1, "logits too flat for a meaningful comparison"
