"""Layers in eight bits: shares of ranks, fused matrices, and heads that are stored so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from stridelm import LLM, SamplingParams
from stridelm.kernels import quantise as quantising
from stridelm.kernels import triton_rows
from stridelm.kernels.plain_fp8 import form_of
from stridelm.kernels.quantise import quantise
from stridelm.kernels.row_forms import QuantisedRows, RowForm
from stridelm.kernels.triton_rows import TritonOps
from stridelm.models.fitting import fill
from stridelm.models.layers.attention import Attention, HeadsSpec
from stridelm.models.layers.block import Block, LayerSpec, Site, Stream
from stridelm.models.layers.fp8 import BY_BLOCK, BY_CHANNEL, FP8Format, FP8Product
from stridelm.models.layers.linear import Linear, set_products
from stridelm.models.layers.mlp import GatedMLPSpec
from stridelm.models.layers.rope import Ropes, RopeSpec
from stridelm.models.layers.slots import WHOLE, Split
from stridelm.models.loader import screaming
from support.checkpoints.fp8 import SCALES, by_definition, write_fp8
from support.checkpoints.heads import write_modules
from support.checks.fp8 import FORMATS
from support.checks.linear import check_row_bits, rows
from support.checks.row_ops import noise
from support.doubles.interpreter import INTERPRETED
from support.oracles.fp8 import rows_by_definition, widened

WIDTH = 512
ALIGNED, UNALIGNED = {"q": 512, "k": 256, "v": 256}, {"q": 48, "k": 24, "v": 20}
by_form = pytest.mark.parametrize("form", FORMATS)


def stored(form: str, outs: dict[str, int]) -> dict[str, torch.Tensor]:
    tensors = {}
    for seed, (name, out) in enumerate(outs.items()):
        weight = noise(seed, out, WIDTH, dtype=torch.float32, device="cpu") * (1 + seed)
        tensors[f"{name}.weight"], tensors[f"{name}.{SCALES[form]}"] = by_definition(weight, form)
        tensors[f"{name}.bias"] = noise(9 + seed, out, dtype=torch.float32, device="cpu")
    return tensors


def loaded(form: str, outs: dict[str, int], split: Split = WHOLE) -> Linear:
    """Such matrices in a float64 layer that was dense before."""
    with torch.device("meta"):
        layer = Linear(WIDTH, outs, bias=True, split=split)
    layer.store_as(FORMATS[form])
    layer = screaming(layer, torch.float64, torch.device("cpu"))
    names = {name for name, _ in layer.slots()}
    fill(layer, iter(stored(form, outs).items()), Path("x"), lambda name: name not in names)
    set_products(layer, deterministic=True)
    return layer


def wanted(form: str, outs: dict[str, int], x: torch.Tensor) -> torch.Tensor:
    tensors = stored(form, outs)
    weight = torch.cat([widened(tensors[f"{n}.weight"], tensors[f"{n}.{SCALES[form]}"], form) for n in outs])
    return rows_by_definition(x, form) @ weight.t() + torch.cat([tensors[f"{n}.bias"] for n in outs]).double()


@by_form
@pytest.mark.parametrize("outs", [ALIGNED, UNALIGNED, {"o": 576}, {"o": 40}], ids=str)
def test_fused_matrices(outs: dict[str, int], form: str) -> None:
    """Each has its own scales, also where one ends within a block; a row's bits are its own."""
    layer, x = loaded(form, outs), rows(3, 20, WIDTH, torch.float64, "cpu")
    torch.testing.assert_close(layer(x), wanted(form, outs, x), rtol=1e-12, atol=1e-9)
    check_row_bits(layer, x)
    assert layer.weight.dtype == torch.float8_e4m3fn and not layer.weight.requires_grad


@by_form
def test_shares(form: str) -> None:
    """Shares of rows, matrix by matrix, and by block shares of columns, make up the whole."""
    x = rows(4, 7, WIDTH, torch.float64, "cpu")
    whole = wanted(form, ALIGNED, x)
    sizes = [size // 2 for size in ALIGNED.values()]
    of_rows = [loaded(form, ALIGNED, Split(0, rank, 2))(x).split(sizes, 1) for rank in (0, 1)]
    torch.testing.assert_close(torch.cat([part for pair in zip(*of_rows) for part in pair], 1), whole)
    if form != "channel":
        halves = [loaded(form, ALIGNED, Split(1, rank, 2))(half) for rank, half in enumerate(x.chunk(2, 1))]
        torch.testing.assert_close(halves[0] + halves[1], whole)


@pytest.mark.parametrize(
    ("form", "split", "message"),
    [
        (BY_BLOCK, Split(0, 0, 8), "blocks of 128 features, which shares of 32, 64 features would cut"),
        (BY_BLOCK, Split(1, 0, 8), "blocks of 128 features, which shares of 64 features would cut"),
        (BY_CHANNEL, Split(1, 0, 2), "whole rows, which shares of 256 features would cut"),
    ],
    ids=["block-rows", "block-columns", "channel-columns"],
)
def test_shares_that_cut_a_scale(form: FP8Format, split: Split, message: str) -> None:
    with torch.device("meta"):
        layer = Linear(WIDTH, ALIGNED, split=split)
    with pytest.raises(ValueError, match=message):
        layer.store_as(form)


@by_form
def test_mtp_modules(checkpoint: Callable[..., Path], tmp_path: Path, form: str) -> None:
    """Modules of a checkpoint in eight bits, whose join is dense, draft for a target of either kind."""
    dense = checkpoint("qwen3", hidden_size=136)
    modules = write_fp8(tmp_path / "modules", write_modules(tmp_path / "dense", dense), form)
    for target in (dense, write_fp8(tmp_path / "target", dense, form)):
        llm = LLM(str(target), drafter_model=str(modules), drafter="mtp", skip_tokenizer_init=True, num_pages=40)
        head = llm.engine.drafters.get("mtp").head  # type: ignore[attr-defined]
        assert head.parts[0].block.mlp.down.format is FORMATS[form] and head.parts[0].join.format.name == "dense"
        params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        plain = LLM(str(target), drafter="none", skip_tokenizer_init=True, num_pages=40).generate([3, 4, 5], params)
        assert llm.generate([3, 4, 5], params)[0].outputs[0].token_ids == plain[0].outputs[0].token_ids


@INTERPRETED
@by_form
@pytest.mark.parametrize("rows_of_step", [5, 70])
def test_norms_and_gates_quantise_for_their_readers(
    monkeypatch: pytest.MonkeyPatch, rows_of_step: int, form: str
) -> None:
    """The bits of a block are those of rows that are quantised where they are read. By block, only attention's own
    result has a launch for that; a gate is applied to whole rows by no program, so by channel the MLP's has one too."""
    block = quantised_block(form)
    x = rows(5, rows_of_step, 256, torch.float32, "cpu")
    launches: list[int] = []

    def recorded(x: torch.Tensor, form: RowForm) -> QuantisedRows:
        launches.append(x.shape[1])
        return quantise(x, form)

    for module in (quantising, triton_rows):
        monkeypatch.setattr(module, "quantise", recorded)

    def run() -> torch.Tensor:
        launches.clear()
        stream = Stream(x.clone(), TritonOps(), 1e-6)
        stream.add(x.flip(0))
        for _ in range(2):
            block(stream, torch.arange(rows_of_step), lambda layer, inputs: inputs.qkv_NXD[:, :4])
        return stream.settle()

    got = run()
    assert launches == ([128, 208] if form == "channel" else [128]) * 2
    monkeypatch.setattr(Linear, "row_form", None)  # nobody is told of it
    assert torch.equal(run(), got) and launches == [256, 128, 256, 208] * 2


def quantised_block(form: str) -> Block:
    """A block on a CPU whose products are those of a GPU."""
    mixer = HeadsSpec(num_heads=4, num_kv_heads=2, head_dim=32, rope=RopeSpec(32, 10000.0))
    block = Block(LayerSpec(mixer, GatedMLPSpec(intermediate_size=208)), Site(0, 256, 1e-6, Ropes(1)))
    assert isinstance(block.mixer, Attention)
    block.mixer.rope.prepare("cpu")
    for seed, linear in enumerate(module for module in block.modules() if isinstance(module, Linear)):
        linear.store_as(FORMATS[form])
        scale = linear.get_parameter("weight_scale").data
        linear.weight.data.copy_(noise(seed, *linear.weight.shape, dtype=torch.float32, device="cpu"))
        scale.copy_(0.05 + 0.05 * noise(seed, *scale.shape, dtype=torch.float32, device="cpu").abs())
        linear.product = FP8Product(form_of(scale, FORMATS[form].powers), None, library=False)
    for seed, norm in enumerate((block.mixer_norm, block.mlp_norm)):
        assert norm is not None
        norm.data.copy_(noise(9 + seed, 256, dtype=torch.float32, device="cpu"))
    return block.requires_grad_(False)
