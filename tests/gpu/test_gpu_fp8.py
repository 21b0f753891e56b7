"""Weights in eight bits on a GPU: against the definition, against themselves bit for bit, captured, in the engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from stridelm.kernels import fp8_library
from stridelm.kernels.fp8 import no_arrivals, parts_of
from stridelm.kernels.quantise import quantise
from stridelm.kernels.triton_rows import TritonOps
from stridelm.models.layers.fp8 import FP8Product, chosen
from stridelm.models.layers.fp8_experts import FP8Experts, GroupedFP8Experts, chosen_fp8_experts
from stridelm.models.layers.products import tiled_product
from support.checkpoints.fp8 import BLOCK, FORMS, SUMS, write_fp8
from support.checks.fp8 import (
    ROW_FORMS,
    Case,
    ExpertsCase,
    check_gated,
    check_given_rows,
    check_parts_left_to_a_norm,
    check_product,
    check_quantised,
    check_quantised_gate,
    check_quantised_norms,
    check_sums_in_parts,
    check_tiles,
    product,
)
from support.checks.identity import TEMPERATURES, check_crowd, check_identity, mixed_jobs
from support.checks.linear import check_row_bits
from support.doubles.stand import Stand
from support.doubles.tree_drafter import registered
from support.gpu import NEEDS_GPU
from support.oracles.fp8 import check_fp8

pytestmark = [
    *NEEDS_GPU,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter's kernels run on the CPU"),
]
by_form = pytest.mark.parametrize("form", FORMS)
by_sum = pytest.mark.parametrize("form", SUMS)
every_dtype = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
SHAPES = [(1, 128, (96,)), (5, 336, (130,)), (17, 48, (64, 40)), (70, 1296, (256, 128, 72)), (300, 4096, (1024,))]
PUBLISHED = [((4096, 1024, 1024), 4096), ((14336, 14336), 4096), ((4096,), 14336), ((576,), 7168), ((2048,), 4096)]
"""Matrices and inputs of an 8B model, of DeepSeek-V3's latents, and of a 30B mixture's attention."""


@by_form
@every_dtype
@pytest.mark.parametrize(("count", "inputs"), [(1, 128), (5, 200), (33, 2064), (300, 14336)])
def test_quantised_rows(count: int, inputs: int, dtype: torch.dtype, form: str) -> None:
    """The kernel divides and rounds as the definition does, bit for bit."""
    check_quantised(count, inputs, form, dtype, "cuda")


@by_form
@pytest.mark.parametrize(
    ("width", "dtype"),
    [
        *((width, torch.bfloat16) for width in (48, 200, 1296, 2048, 4096, 7168)),
        (1296, torch.float16),
        (1296, torch.float32),
    ],
    ids=str,
)
def test_rows_are_quantised_where_they_are_made(width: int, dtype: torch.dtype, form: str) -> None:
    """By norms and gates; a norm's own bits are the same whether or not it quantises."""
    check_quantised_norms(TritonOps(), 33, width, form, dtype, "cuda")
    check_quantised_gate(TritonOps(), 33, width, form, dtype, "cuda")


@by_form
@pytest.mark.parametrize("count", [1, 16, 33, 64])
@pytest.mark.parametrize(("outs", "inputs"), [((200, 200), 336), ((14336, 14336), 4096)])
def test_given_rows(outs: tuple[int, ...], inputs: int, count: int, form: str) -> None:
    check_given_rows(Case(count, inputs, outs, form, torch.bfloat16, "cuda"))


@by_form
@every_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_product(shape: tuple[int, int, tuple[int, ...]], dtype: torch.dtype, form: str) -> None:
    check_product(Case(*shape, form, dtype, "cuda"))


@by_sum
@pytest.mark.parametrize("count", [1, 16, 64, 300])
@pytest.mark.parametrize(("outs", "inputs"), PUBLISHED)
def test_fast(outs: tuple[int, ...], inputs: int, count: int, form: str) -> None:
    case = Case(count, inputs, outs, form, torch.bfloat16, "cuda")
    check_product(case, partial(product, arrivals=no_arrivals(case.x.device)))


@pytest.mark.parametrize("form", ["block", "powers"])
@pytest.mark.parametrize("count", [1, 16, 32])
@pytest.mark.parametrize(("out", "inputs"), [(4096, 14336), (4096, 4096), (6144, 4096), (200, 2064)])
def test_sums_in_parts(out: int, inputs: int, count: int, form: str) -> None:
    """The same bits whichever program of a tile is the last one, which hundreds of launches vary."""
    case = Case(count, inputs, (out,), form, torch.float32, "cuda")
    parts = parts_of(-(-out // 64), -(-inputs // BLOCK), case.x.device)
    assert parts > 1
    if form == "block":
        check_sums_in_parts(case, parts, repeats=200)
    check_parts_left_to_a_norm(case, torch.bfloat16)


@by_sum
def test_captured_sums_in_parts(form: str) -> None:
    """Products on one stream may share the counts: replays, and products that follow one another in one of them."""
    case = Case(9, 4096, (1024,), form, torch.bfloat16, "cuda")
    arrivals, x = no_arrivals(case.x.device), case.x.clone()
    run = partial(product, weight_OI=case.weight, scale=case.scale, bias_O=case.bias, arrivals=arrivals)
    wanted = [run(rows) for rows in (case.x, case.x.flip(0))]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = [run(x) for _ in range(20)]
    for replay in range(100):
        x.copy_((case.x, case.x.flip(0))[replay % 2])
        graph.replay()
        assert all(torch.equal(each, wanted[replay % 2]) for each in out)
    assert not bool(arrivals.any())


@by_form
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu"])
@pytest.mark.parametrize(("count", "out"), [(1, 128), (5, 96), (40, 20), (64, 1024)])
def test_gated(count: int, out: int, activation: str, form: str) -> None:
    check_gated(Case(count, 1296, (out, out), form, torch.bfloat16, "cuda"), activation)


@by_sum
@pytest.mark.parametrize(("outs", "inputs"), [((192, 192), 208), ((1024, 1024), 4096), ((512, 512), 14336)])
def test_bits_of_every_tile(outs: tuple[int, ...], inputs: int, form: str) -> None:
    """All tiles add in the same order, gated or not."""
    check_tiles(Case(200, inputs, outs, form, torch.bfloat16, "cuda"))


@by_form
@pytest.mark.parametrize(("outs", "inputs"), PUBLISHED)
def test_bits_of_any_number_of_rows(outs: tuple[int, ...], inputs: int, form: str) -> None:
    case = Case(2048, inputs, outs, form, torch.bfloat16, "cuda")
    run = chosen(case.weight, case.scale, deterministic=True, powers=case.powers)
    assert isinstance(run, FP8Product)
    counts = (1, 2, 7, 16, 17, 33, 64, 65, 100, 300, 1024, 2048)
    check_row_bits(lambda x: run(x, case.weight, case.scale, None), case.x, counts=counts)
    case.x = case.x[:33]
    check_product(case)


LIBRARY = [*PUBLISHED, ((1536, 576), 7168), ((128, 72), 512), ((24,), 1024)]


@by_form
@pytest.mark.parametrize("count", [65, 66, 67, 100, 300])
@pytest.mark.parametrize(("outs", "inputs"), LIBRARY)
def test_library(outs: tuple[int, ...], inputs: int, count: int, form: str) -> None:
    """Many rows, any number of them, of weights that the library multiplies by; the others are left to our kernel."""
    case = Case(count, inputs, outs, form, torch.bfloat16, "cuda")
    run = chosen(case.weight, case.scale, case.bias, deterministic=False, powers=case.powers)
    check_product(case, run)
    x, agreed = quantise(case.x, ROW_FORMS[form]), []
    for bias in (None, case.bias):
        runs = fp8_library.can_multiply(case.weight, case.scale, bias, ROW_FORMS[form])
        if runs and fp8_library.agrees(x, case.weight, bias):
            ours = product(x, case.weight, case.scale, bias, powers=case.powers)
            assert torch.equal(fp8_library.multiply(x, case.weight, case.scale, bias, fp8_library.TRIED), ours)
            agreed.append(bias)
        print(outs, inputs, count, form, "without bias" if bias is None else "biased", "runs" if runs else "is refused")
    if form == "channel":
        assert not agreed
    elif isinstance(run, FP8Product) and run.library and inputs == 4096:  # longer sums may be split
        assert len(agreed) == 2


@by_sum
@pytest.mark.parametrize("count", [100, 129])
def test_captured_library(count: int, form: str) -> None:
    """A replay reads the rows that are there then."""
    case = Case(count, 4096, (1024,), form, torch.bfloat16, "cuda")
    run, x = chosen(case.weight, case.scale, deterministic=False, powers=case.powers), case.x.clone()
    assert isinstance(run, FP8Product)
    if not run.library:
        pytest.skip("the library has no such product for this card")
    run(x, case.weight, case.scale, None)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(x, case.weight, case.scale, None)
    for rows in (case.x.flip(0), case.x):
        x.copy_(rows)
        graph.replay()
        assert torch.equal(out, run(rows, case.weight, case.scale, None))


@by_sum
def test_captured(form: str) -> None:
    """A replay reads the rows that are there then."""
    case = Case(9, 1024, (512, 512), form, torch.bfloat16, "cuda")
    x = case.x.clone()
    run = partial(product, weight_OI=case.weight, scale=case.scale, bias_O=None, activation="silu")
    run(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(x)
    for rows in (case.x.flip(0), case.x):
        x.copy_(rows)
        graph.replay()
        assert torch.equal(out, run(rows))


@by_form
@pytest.mark.parametrize("sizes", [(160, 64), (256, 128), (256, 320), (2048, 768)], ids=str)
@pytest.mark.parametrize("count", [1, 4, 5, 64, 700])
def test_experts(count: int, sizes: tuple[int, int], form: str) -> None:
    """In a few launches and, in float64 or on other cards, all rows through each; any number of rows per expert."""
    case = ExpertsCase(count, 8, 2, *sizes, form, torch.bfloat16, "cuda")
    products = chosen_fp8_experts(case.layer, deterministic=True, powers=case.powers)
    assert isinstance(products, GroupedFP8Experts)
    case.check_parts(products, TritonOps())
    if count < 64:
        case.check_parts(FP8Experts(case.layer, products.by, case.powers), TritonOps())


@by_sum
@pytest.mark.parametrize("count", [1, 5, 300])
def test_captured_experts(count: int, form: str) -> None:
    """A captured call is for any choice of experts: it reads nothing on the host."""
    case = ExpertsCase(count, 16, 4, 256, 128, form, torch.bfloat16, "cuda")
    products, chosen_NK = GroupedFP8Experts(case.layer, tiled_product, case.powers), case.chosen.clone()

    def call(chosen: torch.Tensor) -> torch.Tensor:
        return products(case.inputs(chosen), TritonOps())

    call(chosen_NK)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(chosen_NK)
    for choice in (15 - case.chosen, case.chosen):
        chosen_NK.copy_(choice)
        graph.replay()
        assert torch.equal(out, call(choice))


# In the engine

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64},
    "qwen3": {"hidden_size": 136, "intermediate_size": 208},
    "deepseek_v3": {"hidden_size": 144},
    "qwen3_moe": {"hidden_size": 144, "num_experts": 8},
}
"""Widths that are whole blocks, or end within one; one that is no multiple of 16, for which there is no kernel."""


@pytest.fixture(scope="module", autouse=True)
def _trees() -> Iterator[None]:
    with registered():
        yield


@by_form
@pytest.mark.parametrize("model", MODELS)
def test_logits(checkpoint: Callable[..., Path], tmp_path: Path, model: str, form: str) -> None:
    """What is loaded on a GPU is what is loaded on a CPU. An H200 adds products of e4m3 to 13 bits, and then a number
    may be rounded to the next one of e4m3; attention among larger weights would magnify that."""
    path = write_fp8(tmp_path / "stored", checkpoint(model, scale=1.0, **MODELS[model]), form)
    check_fp8(path, form, 33, "cuda", close=0.05)


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("form", [*FORMS, "while loading"])
@pytest.mark.parametrize("model", MODELS)
def test_identity(checkpoint: Callable[..., Path], tmp_path: Path, model: str, form: str, temperature: float) -> None:
    """Requests with different drafters in one batch, and after preemptions, emit what they emit alone."""
    path, options = checkpoint(model, **MODELS[model]), {}
    if form == "while loading":
        options = {"quantization": "fp8"}
    else:
        path = write_fp8(tmp_path / "stored", path, form)
    stand = Stand(path, "bfloat16", "cuda", options=options)
    check_identity(stand, mixed_jobs(stand, 8, temperature, ["nothing", "everything"], seed=3))
    check_crowd(stand, temperature, ["nothing"])
