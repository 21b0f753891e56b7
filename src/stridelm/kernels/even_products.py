"""Products on a CPU, in which a row's bits do not depend on its place among the rows of its matrix.

Libraries divide a matrix's rows among kernels of several heights. At most widths all of them add a row's terms in the
same order. Some do not where the last terms of a sum, or on AMD's processors the last outputs, do not fill a vector,
and where a product has so few outputs that it is run as if rows were columns (docs/decisions/0003-row-invariance.md).
Zeros lead away from such widths: they are added exactly, and outputs that they make are cut off.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

VECTOR = 4
"""Sums of a multiple of so many terms, and of so many outputs, end alike in kernels of all heights."""
EVEN = 16
"""Other sums are lengthened to a multiple of this, and products with fewer outputs are given so many."""


def evened(a_RI: torch.Tensor, b_IO: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two matrices, or batches of them, with the zeros that their product needs: it begins with the outputs of the
    product without, which must be copied from it: operations on rows may add in another order where there are gaps
    between them. At other widths they are returned as they are."""
    width, out = b_IO.shape[-2:]
    terms, outputs = -width % EVEN if width % VECTOR else 0, max(EVEN - out, -out % VECTOR)
    a_RI = F.pad(a_RI, (0, terms)) if terms else a_RI
    return a_RI, F.pad(b_IO, (0, outputs, 0, terms)) if terms or outputs else b_IO
