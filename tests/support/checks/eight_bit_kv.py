"""Laws of KV in eight bits, for the CPU's and the GPU's tests."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from stridelm import SamplingParams
from support.checks.identity import LENGTH, check_crowd, check_identity, mixed_jobs, prompts
from support.doubles.stand import Job, Stand, accepted

OPTION = {"kv_cache_dtype": "fp8"}
FORMS = {
    "compressed-tensors": "self_attn.{kind}_scale",
    "modelopt": "self_attn.{kind}_proj.{kind}_scale",
    "one for both": "self_attn.kv_scale",
}
"""How checkpoints name the scales of a layer."""
SCALES = {"k": 0.02, "v": 0.3}


def write_scaled(target: Path, source: Path, form: str, layers: int) -> Path:
    """A copy of a checkpoint with scales of KV for its first layers; each layer's are half of those before it."""
    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    for layer in range(layers):
        for kind, scale in SCALES.items():
            name = f"model.layers.{layer}.{FORMS[form].format(kind=kind)}"
            tensors[name] = torch.tensor([scale / 2**layer]) if layer else torch.tensor(scale)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def check_batches(stand: Stand, temperature: float) -> None:
    """Requests with different drafters and random trees, in chunks, alone or beside others and again over a prefix that
    is found, emit plain decoding's output and hidden states with the same option."""
    llm = stand.llm(max_num_batched_tokens=33, page_size=4)
    jobs = mixed_jobs(stand, 8, temperature, ["nothing", "hidden_states"], seed=3)
    first, again = (check_identity(stand, jobs, llm=llm) for _ in range(2))
    assert accepted(first) and accepted(again)
    found = [sum(output.metrics.cached_tokens for output in run if output.metrics) for run in (first, again)]
    assert found[1] > found[0]
    check_crowd(stand, temperature, ["nothing"])


def check_effect(stand: Stand) -> None:
    """What is stored is other than without the option, and not much: hidden states deviate, and only a little."""
    others = Stand(stand.path, stand.dtype, stand.device)
    params = SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True, return_hidden_states=True)
    job = Job(max(prompts(stand, 6), key=len), params, {"drafter": "none"})
    (got,), (wanted,) = stand.alone(job).outputs, others.alone(job).outputs
    assert got.hidden_states is not None and wanted.hidden_states is not None
    states, exact = got.hidden_states[0].double(), wanted.hidden_states[0].double()
    off = float((states - exact).norm() / exact.norm())
    assert 1e-4 < off < 0.2, off
