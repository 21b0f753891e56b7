"""Inside `dry`, the device has shapes and nothing else, and the host computes."""

from __future__ import annotations

import numpy as np
import torch

from stridelm.run.dry import dry
from stridelm.upload import download, upload

GPU = torch.device("cuda", 0)


def test_the_host_computes_and_reads_zeros() -> None:
    with torch.inference_mode(), dry():
        numbers = torch.tensor([3, 4]) * 2
        there = upload([1, 2, 3], GPU)
        there.add_(1)
        back = torch.full((3,), 7)
        back.copy_(there, non_blocking=True)
        assert numbers.tolist() == [6, 8]
        assert (there.device, there.shape, there.dtype) == (GPU, (3,), torch.int64)
        assert (there.sum().item(), torch.equal(there, there)) == (0, False)
        assert back.tolist() == there.cpu().tolist() == [0, 0, 0]
        assert np.array_equal(download(there), np.zeros(3))
        assert numbers.numpy().tolist() == [6, 8]


def test_addresses_tell_what_is_aligned() -> None:
    with dry():
        x = torch.empty(4, 9, dtype=torch.bfloat16, device=GPU)
        assert x.data_ptr() % 16 == 0
        assert x.narrow(0, 1, 1).data_ptr() % 16 == 18 % 16
        assert x.view(-1).narrow(0, 8, 8).data_ptr() % 16 == 0


def test_tensors_of_before_stay_as_they_were() -> None:
    """Also when what is computed inside is copied into them: only the device would have written it."""
    kept = torch.ones(2)
    with dry():
        there = kept.to(GPU)
        assert there.device == GPU
        there.mul_(2)
    assert kept.tolist() == [1, 1]
