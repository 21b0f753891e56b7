"""Products of eight-bit floats by the library (torch's scaled_mm: cuBLASLt, CUTLASS), for many rows.

It keeps Hopper's tensor cores twice as busy as the kernel of fp8.py. By block it adds in the same order, 128 columns
after another, and gave the same bits wherever its kernel does not split the sum; it takes a multiple of four rows. By
channel a few numbers in a million round to their other neighbour.

Legend: as in fp8.py.
"""

from __future__ import annotations

import logging

import torch
import torch.nn.functional as F

from stridelm.kernels.agreement import agree
from stridelm.kernels.ahead import only_compiles
from stridelm.kernels.fp8 import FEW_ROWS, product
from stridelm.kernels.plain_fp8 import BLOCK, E4M3, form_of, rows_per_scale
from stridelm.kernels.quantise import quantise
from stridelm.kernels.row_forms import QuantisedRows, RowForm

logger = logging.getLogger(__name__)

FASTER_FROM = FEW_ROWS + 1
"""Rows from which it is faster than our kernel."""
CAPABILITY = (9, 0)
"""The cards that it has been measured on, and the only ones for which it has blocks of 128."""
EACH = 4
"""By block, rows and a row's blocks come in multiples of this, since scales are read 16 bytes at a time."""
TRIED = 64
"""Where equal bits are promised, rows come in multiples of this, so that few numbers of them have to be tried."""
_RUNS: dict[tuple[object, ...], bool] = {}
"""Whether the library took the product of a shape."""


def can_multiply(weight_OI: torch.Tensor, scale_QS: torch.Tensor, bias_O: torch.Tensor | None, form: RowForm) -> bool:
    """Whether the library multiplies rows of this form by this weight with bfloat16 results: tried once per shape."""
    outputs, inputs = weight_OI.shape
    by_block = form_of(scale_QS).by_block
    if form.by_block is not by_block:  # it tells by the scales' shape how rows are quantised
        return False
    if not weight_OI.is_cuda or torch.cuda.get_device_capability(weight_OI.device) != CAPABILITY:
        return False
    if by_block and (rows_per_scale(outputs, scale_QS.shape[0]) != BLOCK or inputs % (EACH * BLOCK)):
        return False
    if only_compiles():
        return True
    key = weight_OI.shape, scale_QS.shape, bias_O is None, weight_OI.device
    if key not in _RUNS:
        x = quantise(torch.zeros(BLOCK, inputs, dtype=torch.bfloat16, device=weight_OI.device), form)
        try:
            multiply(x, weight_OI, scale_QS, bias_O)
        except torch.OutOfMemoryError:
            return False
        except (RuntimeError, ValueError) as error:  # what torch raises depends on who refuses
            logger.info("our kernel multiplies many rows by a weight of %s in eight bits: %s", [*key[0]], error)
            _RUNS[key] = False
        else:
            _RUNS[key] = True
    return _RUNS[key]


def multiply(
    x_NI: QuantisedRows,
    weight_OI: torch.Tensor,
    scale_QS: torch.Tensor,
    bias_O: torch.Tensor | None,
    multiple: int = EACH,
) -> torch.Tensor:
    """x W^T + b: [N, O] in x's dtype, which is bfloat16. Needs `can_multiply`. multiple: up to which rows are filled up
    by block."""
    rows = x_NI.shape[0]
    if only_compiles():  # our kernel, in case the library turns out not to take it
        return product(x_NI, weight_OI, scale_QS, bias_O)
    if not x_NI.form.by_block:
        recipes = F.ScalingType.RowWise, F.ScalingType.RowWise
    else:
        x_NI, recipes = padded(x_NI, multiple), (F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128)
    y = F.scaled_mm(
        x_NI.q_NI,
        weight_OI.t(),
        x_NI.scales_SN.t(),
        recipes[0],
        scale_QS.t(),
        recipes[1],
        bias=bias_O,
        output_dtype=x_NI.dtype,
    )
    return y[:rows]


def agrees(x_NI: QuantisedRows, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> bool:
    """Whether the library's product with a multiple of TRIED rows gives our kernel's bits: tried once, on numbers whose
    products cancel, so that of each sum only the rounding is left, which shows in what order it was added. By channel
    both scales are multiplied in another order, which few numbers show.

    A trial takes three times the weight's memory for a moment.
    """
    if not x_NI.form.by_block:
        return False
    rows, device = -(-x_NI.shape[0] // TRIED) * TRIED, weight_OI.device

    def both() -> tuple[torch.Tensor, torch.Tensor]:
        nothing = None if bias_O is None else torch.zeros_like(bias_O)  # beside which a rounding would not show
        asked = *_cancelling(rows, weight_OI.shape, device, x_NI.form), nothing
        return product(*asked), multiply(*asked)

    return agree(("fp8", weight_OI.shape, bias_O is None, rows, device), both)


def _cancelling(
    rows: int, shape: torch.Size, device: torch.device, form: RowForm
) -> tuple[QuantisedRows, torch.Tensor, torch.Tensor]:
    """Rows, and a weight by block with its scales, whose second half of columns takes away what the first adds."""
    outputs, half = shape[0], shape[1] // 2
    numbers = torch.Generator(device).manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=numbers, dtype=torch.bfloat16, device=device)

    weight, scale = drawn(outputs, half), drawn(-(-outputs // BLOCK), half // BLOCK).float().abs()
    x = quantise(drawn(rows, half).repeat(1, 2), form)
    return x, torch.cat([weight.to(E4M3), weight.neg_().to(E4M3)], 1), scale.repeat(1, 2)


def padded(x_NI: QuantisedRows, multiple: int) -> QuantisedRows:
    """With rows of zeros below, up to a multiple of so many."""
    more = -x_NI.shape[0] % multiple
    if not more:
        return x_NI
    q_NI = F.pad(x_NI.q_NI.view(torch.uint8), (0, 0, 0, more)).view(E4M3)
    return QuantisedRows(q_NI, F.pad(x_NI.scales_SN, (0, more)), x_NI.dtype, x_NI.form)
