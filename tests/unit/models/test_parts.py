"""Products whose sums a layer leaves in parts, on a CPU through Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from stridelm.kernels.ops import Ops, Parts
from stridelm.kernels.plain import PlainOps
from stridelm.kernels.sums_in_parts import added_parts, pays_in_parts
from stridelm.kernels.triton_rows import TritonOps
from stridelm.models.layers.attention import Attention, HeadsSpec
from stridelm.models.layers.block import Block, LayerSpec, Site, Stream
from stridelm.models.layers.linear import Linear
from stridelm.models.layers.mlp import GatedMLPSpec
from stridelm.models.layers.products import InOrderProduct, ones_of_parts
from stridelm.models.layers.rope import Ropes, RopeSpec
from support.checks.row_ops import noise
from support.doubles.interpreter import INTERPRETED

WIDTH, DTYPE = 128, torch.float16


@INTERPRETED
@pytest.mark.parametrize(("outputs", "number"), [(72, 4), (2112, 4), (2120, 2)])
@pytest.mark.parametrize("inputs", [1024, 1304, 2048])
def test_added_parts(inputs: int, outputs: int, number: int) -> None:
    """In float32, each of a part of the inputs, as many as run at once on a card of 132 processors; with the same bits
    whatever rows are beside it."""
    x, weight = (noise(i, n, inputs, dtype=DTYPE, device="cpu") for i, n in enumerate((40, outputs)))
    parts = added_parts(x, weight)
    each = -(-inputs // (number * 256)) * 256
    owns = [slice(first, first + each) for first in range(0, inputs, each)]
    assert parts.dtype == torch.float32 and parts.shape == (40, len(owns), outputs)
    for part, own in enumerate(owns):
        exact = x[:, own].double() @ weight[:, own].double().t()
        torch.testing.assert_close(parts[:, part].double(), exact, rtol=1e-5, atol=1e-4)
    assert all(torch.equal(added_parts(x[:count], weight), parts[:count]) for count in (1, 17))


def test_where_parts_pay() -> None:
    """On a card of 132 processors: for few rows, few outputs and rows of a weight that are long enough."""
    weight = torch.zeros(1, 1)
    cases = {(1, 4096, 4096): True, (64, 2048, 1024): True, (65, 2048, 4096): False, (0, 2048, 4096): False}
    cases |= {(1, 4288, 4096): False, (1, 2048, 1023): False}
    for (rows, outputs, inputs), expected in cases.items():
        assert pays_in_parts(rows, weight.expand(outputs, inputs)) == expected


@INTERPRETED
@pytest.mark.parametrize("ops", [PlainOps(), TritonOps()], ids=["plain", "triton"])
@pytest.mark.parametrize(("norms_after", "settles"), [(False, False), (True, False), (False, True)])
def test_a_block_leaves_them_to_the_next_norm(ops: Ops, norms_after: bool, settles: bool) -> None:
    """What attention and the MLP add to the stream is left in parts, unless a norm of it comes first; not by the MLP if
    none comes later. A promise of equal bits leaves none. The sum is the same but for rounding."""
    x, found = noise(5, 6, WIDTH, dtype=DTYPE, device="cpu"), {}
    for deterministic in (True, False):
        block, added = block_of(deterministic, norms_after, settles), []
        stream = Stream(x.clone(), ops, 1e-6)
        add = stream.add

        def recorded(delta: torch.Tensor | Parts, after_H: torch.Tensor | None = None) -> None:
            added.append(isinstance(delta, Parts))  # noqa: B023
            add(delta, after_H)  # noqa: B023

        stream.add = recorded  # type: ignore[method-assign]
        for _ in range(2):
            block(stream, torch.arange(6), lambda layer, inputs: inputs.qkv_NXD[:, :8])
        settled = stream.settle()
        assert settled.dtype == DTYPE
        leaves = not (deterministic or norms_after)
        assert added == [leaves, leaves and not settles] * 2
        found[deterministic] = settled
    torch.testing.assert_close(found[False], found[True], rtol=4e-3, atol=4e-3)
    assert norms_after or not torch.equal(found[False], x)


def block_of(deterministic: bool, norms_after: bool, settles: bool) -> Block:
    """A block on a CPU whose products are those of a GPU: the heads' values and the MLP's inner rows are 1,024 wide."""
    mixer = HeadsSpec(num_heads=8, num_kv_heads=2, head_dim=128, rope=RopeSpec(128, 10000.0))
    spec = LayerSpec(mixer, GatedMLPSpec(intermediate_size=1024))
    site = Site(0, WIDTH, 1e-6, Ropes(1))
    block = Block(replace(spec, norms_after=norms_after), site, settles=settles).to(DTYPE)
    assert isinstance(block.mixer, Attention)
    block.mixer.rope.prepare("cpu")
    for seed, parameter in enumerate(block.parameters()):
        parameter.data.copy_(noise(seed, *parameter.shape, dtype=DTYPE, device="cpu") / parameter.shape[-1] ** 0.5)
    ones = None if deterministic else ones_of_parts(torch.device("cpu"))
    for linear in block.modules():
        if isinstance(linear, Linear):
            linear.product = InOrderProduct(deterministic, ones)
    return block.requires_grad_(False)
