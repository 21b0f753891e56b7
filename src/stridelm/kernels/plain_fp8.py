"""The arithmetic of weights in eight-bit floats (e4m3: Micikevicius et al. 2022, arXiv 2209.05433), in torch.

A number's scale is the largest magnitude beside it over 448, e4m3's largest, in float32, and where scales are powers of
two (UE8M0: Mishra et al. 2025, arXiv 2506.08027) it is rounded up to one. Rows are quantised as they come, each by
itself: every 128 columns, or the whole row, as the weight is. Products are summed in float32.

Legend: N rows, I input width, O output width; Q rows of scales and S columns of them; K columns of a block.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from stridelm.kernels.row_forms import QuantisedRows, RowForm, Rows

E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max
LEAST = 1e-12
"""What the largest magnitude counts as at least, so that zeros have a scale."""
BLOCK = 128
MANTISSA = (1 << 23) - 1
"""Of a float32."""
CHUNK = 1 << 24
"""Numbers of a weight that are widened at once, to multiply or to quantise it."""


def plain_product(
    x_NI: Rows,
    weight_OI: torch.Tensor,
    scale_QS: torch.Tensor,
    bias_O: torch.Tensor | None,
    by: Callable[..., torch.Tensor] = F.linear,
    powers: bool = False,
) -> torch.Tensor:
    """x W^T + b in x's dtype, with x quantised, if it is not yet, and both widened to float32 (float64 if x is). Runs
    on any device.

    by: multiplies the widened matrices; a row's bits are as independent of other rows as this product's.
    powers: whether scales are powers of two.
    """
    wide = torch.promote_types(x_NI.dtype, torch.float32)
    x = widened_rows(x_NI if isinstance(x_NI, QuantisedRows) else quantise(x_NI, form_of(scale_QS, powers)), wide)
    outputs, inputs = weight_OI.shape
    step = max(1, CHUNK // (inputs * BLOCK)) * BLOCK
    group = rows_per_scale(outputs, scale_QS.shape[0])
    parts = [
        by(x, widened(weight_OI[at : at + step], scale_QS[at // group :], group, dtype=wide), None)
        for at in range(0, outputs, step)
    ]
    y = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    return (y if bias_O is None else y + bias_O.to(wide)).to(x_NI.dtype)


def form_of(scale_QS: torch.Tensor, powers: bool = False) -> RowForm:
    """The form of the rows that a weight with these scales is multiplied by. powers: whether they are powers of two."""
    if powers:
        return RowForm.POWERS
    return RowForm.BLOCKS if scale_QS.shape[1] > 1 else RowForm.WHOLE


def fits(form: RowForm, scale_QS: torch.Tensor, inputs: int) -> bool:
    """Whether rows of this form have as many scales as a weight of so many inputs has for each of its own."""
    return scale_QS.shape[1] == (-(-inputs // BLOCK) if form.by_block else 1)


def quantise(x_NI: torch.Tensor, form: RowForm) -> QuantisedRows:
    width = x_NI.shape[1]
    x = x_NI.float()
    x_NSK = F.pad(x, (0, -width % BLOCK)).unflatten(1, (-1, BLOCK)) if form.by_block else x[:, None]
    scale = _scale(x_NSK.abs().amax(-1, keepdim=True))
    if form is RowForm.POWERS:
        scale = up_to_power(scale)
    q_NI = (x_NSK / scale).to(E4M3).flatten(1)[:, :width]
    return QuantisedRows(q_NI.contiguous(), scale[..., 0].t().contiguous(), x_NI.dtype, form)


def widened_rows(rows: QuantisedRows, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[N, I]: what is left of rows after quantisation."""
    q_NI, scales_NS, width = rows.q_NI.to(dtype), rows.scales_SN.t().to(dtype), rows.shape[1]
    if not rows.form.by_block:
        return q_NI * scales_NS
    q_NSK = F.pad(q_NI, (0, -width % BLOCK)).unflatten(1, (-1, BLOCK))
    return (q_NSK * scales_NS[..., None]).flatten(1)[:, :width]


def widened(
    weight_OI: torch.Tensor, scale_QS: torch.Tensor, group: int = BLOCK, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """The matrix that a weight and its scales stand for; `group` rows share a row of scales."""
    outputs, inputs = weight_OI.shape
    scale = scale_QS[: -(-outputs // group)].to(dtype).repeat_interleave(group, 0)[:outputs]
    if scale.shape[1] > 1:
        scale = scale.repeat_interleave(BLOCK, 1)[:, :inputs]
    return weight_OI.to(dtype) * scale


def quantised(weight_OI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(weight, scales) by block of a matrix. In pieces, since what a piece is widened to takes several times its
    memory."""
    pieces = weight_OI.split(max(1, CHUNK // (weight_OI.shape[1] * BLOCK)) * BLOCK)
    weights, scales = zip(*map(_quantised, pieces), strict=True)
    return (weights[0], scales[0]) if len(pieces) == 1 else (torch.cat(weights), torch.cat(scales))


def _quantised(weight_OI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    outputs, inputs = weight_OI.shape
    padded = F.pad(weight_OI.float(), (0, -inputs % BLOCK, 0, -outputs % BLOCK))
    x_QKSL = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    scale = _scale(x_QKSL.abs().amax((1, 3), keepdim=True))
    return (x_QKSL / scale).to(E4M3).reshape(padded.shape)[:outputs, :inputs], scale[:, 0, :, 0]


def _scale(largest: torch.Tensor) -> torch.Tensor:
    """The scale of numbers whose largest magnitude is given. CUDA would multiply by 1 / 448, which is not exact, if 448
    were a Python number."""
    return largest.clamp_min(LEAST) / torch.full((), LARGEST, device=largest.device)


def up_to_power(scale: torch.Tensor) -> torch.Tensor:
    """The least power of two that is not below each of these float32 numbers, which are normal and positive."""
    return ((scale.view(torch.int32) + MANTISSA) & ~MANTISSA).view(torch.float32)


def rows_per_scale(rows: int, scales: int) -> int:
    """How many rows of a weight share a row of scales: a power of two up to BLOCK."""
    return next(size for size in (1, 2, 4, 8, 16, 32, 64, 128) if -(-rows // size) == scales)
