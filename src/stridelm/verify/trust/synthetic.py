"""Simulated acceptance (verify/synthetic.py) of trusted windows, for benchmarks only."""

from __future__ import annotations

import torch

from stridelm.kernels.step_ops import Sureness
from stridelm.verify.rule import VerifyInput
from stridelm.verify.synthetic import draw_accepted
from stridelm.verify.trust.rule import Trust


class SyntheticTrust(Trust):
    """Trusted windows, cut to the number drawn instead of by confidence."""

    name = "synthetic-trust"
    simulated = True
    like = "trust"

    def sureness(self, inputs: VerifyInput) -> Sureness:
        """Row j of a window has confidence -j, and the threshold is that of the last row to emit."""
        rows, columns = inputs.nodes.shape
        place = torch.arange(0, -columns, -1, dtype=torch.float32, device=inputs.nodes.device)
        return place.expand(rows, -1), -draw_accepted(inputs).float()
