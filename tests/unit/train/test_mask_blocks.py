"""Many windows in one pass give what each would give in a pass of its own, and see no future."""

from __future__ import annotations

import pytest
import torch

from stridelm.models.layers.decoder import Decoder
from stridelm.train.blocks import CHUNKS, block_chunks, block_logits, block_mask, sample_anchors
from stridelm.train.objective import plain_hidden
from stridelm.train.recipe import new_model, qwen3_config
from stridelm.train.settings import ModelShape

LENGTH, SLOTS, ANCHORS, VOCAB = 40, 3, 5, 97
Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Real rows, block rows, anchors."""


@pytest.fixture(scope="module")
def model() -> Decoder:
    shape = ModelShape(hidden=24, layers=2, heads=4, kv_heads=2, head_dim=8, mlp=32, context=64)
    model = new_model(qwen3_config(shape, VOCAB, 0), seed=0).double().requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():  # residual projections start at zero, which would hide a leak
        parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


@pytest.fixture
def rows() -> Rows:
    generator = torch.Generator().manual_seed(2)
    real = torch.randint(0, VOCAB, (2, LENGTH), generator=generator)
    block = torch.randint(0, VOCAB, (2, ANCHORS * SLOTS), generator=generator)
    return real, block, sample_anchors(LENGTH, ANCHORS, SLOTS, generator)


def test_a_block_is_a_plain_causal_pass_over_its_prefix_and_itself(model: Decoder, rows: Rows) -> None:
    real, block, anchors = rows
    real_logits, block_rows = block_logits(model, real, block, anchors)
    for number, anchor in enumerate(anchors.tolist()):
        own = block[:, number * SLOTS : (number + 1) * SLOTS]
        plain = torch.cat((real[:, : anchor + 1], own), dim=1)
        expected = model.logits(plain_hidden(model, plain)).unflatten(0, plain.shape)
        torch.testing.assert_close(block_rows[:, number], expected[:, anchor + 1 :])
        torch.testing.assert_close(real_logits[:, : anchor + 1], expected[:, : anchor + 1])


def test_real_rows_do_not_know_that_there_are_blocks(model: Decoder, rows: Rows) -> None:
    real, block, anchors = rows
    plain = model.logits(plain_hidden(model, real)).unflatten(0, real.shape)
    torch.testing.assert_close(block_logits(model, real, block, anchors)[0], plain)


@pytest.mark.parametrize("chunks", [1, CHUNKS])
def test_no_future_and_no_other_block_leaks(model: Decoder, rows: Rows, chunks: int) -> None:
    real, block, anchors = rows
    _, before = block_logits(model, real, block, anchors, chunks)
    for number, anchor in enumerate(anchors.tolist()):
        changed_real, changed_block = real.clone(), block.clone()
        changed_real[:, anchor + 1 :] = (changed_real[:, anchor + 1 :] + 1) % VOCAB
        others = torch.arange(ANCHORS * SLOTS) // SLOTS != number
        changed_block[:, others] = (changed_block[:, others] + 1) % VOCAB
        _, after = block_logits(model, changed_real, changed_block, anchors, chunks)
        assert torch.equal(after[:, number], before[:, number])
        assert not torch.equal(after, before)


def test_a_row_sees_what_comes_before_it_in_its_block_and_nothing_after(model: Decoder, rows: Rows) -> None:
    real, block, anchors = rows
    _, before = block_logits(model, real, block, anchors)
    changed = block.clone()
    changed[:, 1::SLOTS] = (changed[:, 1::SLOTS] + 1) % VOCAB
    _, after = block_logits(model, real, changed, anchors)
    assert torch.equal(after[:, :, 0], before[:, :, 0])
    assert (after[:, :, 1:] != before[:, :, 1:]).any(-1).all()


def test_chunks_change_nothing(model: Decoder, rows: Rows) -> None:
    real, block, anchors = rows
    for one, many in zip(
        block_logits(model, real, block, anchors),
        block_logits(model, real, block, anchors, CHUNKS),
        strict=True,
    ):
        torch.testing.assert_close(one, many)


@pytest.mark.parametrize("seed", range(20))
def test_chunk_limits_hold_for_every_sampled_anchor(seed: int) -> None:
    anchors = sample_anchors(LENGTH, ANCHORS, SLOTS, torch.Generator().manual_seed(seed))
    assert (anchors.diff() > 0).all()
    assert anchors[-1] + SLOTS < LENGTH
    for chunk in block_chunks(anchors, LENGTH, SLOTS, CHUNKS):
        assert (anchors[chunk.start // SLOTS : chunk.stop // SLOTS] < chunk.limit).all()


def test_the_mask_is_the_one_drawn_in_the_docstring() -> None:
    mask = block_mask(torch.tensor([1, 4]), 6, 3)
    drawn = {1: "11....110...", 3: "11111....1..", 0: "11....1....."}
    for row, text in drawn.items():
        assert mask[row].tolist() == [c == "1" for c in text]


def test_too_many_anchors_are_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match="--anchors"):
        sample_anchors(8, 6, 3, torch.Generator())
