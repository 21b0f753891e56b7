"""Matrix products in which a row's bits do not depend on how many rows run beside it.

A library product picks its kernel by the number of rows, and another kernel may add in another order. Measurements
(docs/decisions/0003-row-invariance.md) leave these ways to run a product:

- plain: the library's, whose bits may change with the row count;
- in order: on a GPU in 16-bit precision, our kernel for few rows, where it is at least as fast, and the library's for
  many; what is added to the stream in parts, if the product has few rows and outputs and equal bits are not
  promised; if equal bits are promised, the library's only for shapes at which it was seen to agree;
- packed: bfloat16 on a CPU through oneDNN with the weight reordered once, two to three times faster than the unpacked
  call on few rows. Whether a row's bits depend on the number of rows depends on the CPU: with AVX512-BF16 they were
  seen not to, with AMX they do for some shapes, but not within a few dozen rows. So if equal bits are promised, each
  shape is tried: all rows at once, else in pieces as tall as keep them, else in padded tiles. Few rows go through our
  own kernel over the same memory, if it was seen to give the same bits: it takes less time to call;
- tiled: the rows in tiles of a fixed height, each a product of the same shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from stridelm.kernels.even_products import evened
from stridelm.kernels.ops import Parts

if TYPE_CHECKING:
    from stridelm.kernels.host.product import FewRows

TILE_ROWS = 16
"""Height of a tile. Every product of a tiled layer has this many rows."""
FEW_ROWS_BY_HEAD = 64
"""Up to this many rows our kernel is faster than the library's product by heads."""
PIECES = (256, 64, 32, 16)
"""Heights of pieces, the fastest first."""
TRIED_ROWS = (*range(1, 18), 24, 31, 32, 33, 48, 63, 64, 65, 100, 127, 128, 129, 191, 255, 256, 257, 333, 1000)
"""Numbers of rows at which a product is tried."""
MAX_TRIED = 1 << 25
"""Maximum size of a trial's result: a head over a large vocabulary is never run on that many rows at once."""

Product = Callable[..., torch.Tensor]
"""Takes rows and a matrix's tensors: here a weight and a bias, which may be None. One with a method `fuses_gate(rows,
is_given)` also takes an activation after them, to apply a gate (`Ops.gate`) to the product, and what the gate
multiplies if that is given, where that method returns True because it is at least as fast as a launch for each.

One with a `row_form`, which is a RowForm, also takes QuantisedRows of that form. One with a method `gated_rows` takes
the same arguments by it where it fuses the gate, and after the activation a RowForm, in which it may return the result.
One with a method `parts` takes the same arguments by it, and returns Parts whose sum is the product, or None.
"""
Way = Callable[[torch.Tensor], Product]
"""Makes a product for a weight."""


def tiled_product(x_NI: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The product in tiles of TILE_ROWS rows, the last one padded with zeros."""
    rows, width = x_NI.shape
    if not rows:  # a head that only keeps up needs its entries, and no output
        return x_NI.new_empty(0, weight.shape[0])
    tiles = -(-rows // TILE_ROWS)
    x = F.pad(x_NI, (0, 0, 0, tiles * TILE_ROWS - rows)).view(tiles, TILE_ROWS, width)
    if x.is_cuda:  # cuBLAS may also choose by the number of tiles, so each tile is a separate call
        y = torch.stack([tile @ weight.t() for tile in x])
    else:
        x, even = evened(x, weight.t())
        y = torch.bmm(x, even.expand(tiles, *even.shape))
    y = y.reshape(tiles * TILE_ROWS, -1)[:rows, : weight.shape[0]].contiguous()
    return y if bias is None else y + bias


def takes_few_rows(x_NHI: torch.Tensor) -> bool:
    """Whether rows are multiplied by heads in our kernel, whether equal bits are promised or not."""
    return x_NHI.is_cuda and 0 < x_NHI.shape[0] <= FEW_ROWS_BY_HEAD and x_NHI.itemsize == 2


def product_by_head(x_NHI: torch.Tensor, weight_HIO: torch.Tensor) -> torch.Tensor:
    """[N, H, O]: each head's rows times that head's matrix, by the library, which writes rows as they are read next. On
    a GPU few rows take our kernel, which is faster and may be launched early."""
    if takes_few_rows(x_NHI):
        return exact_product_by_head(x_NHI, weight_HIO)
    y_NHO = x_NHI.new_empty(*x_NHI.shape[:2], weight_HIO.shape[2])
    torch.bmm(x_NHI.transpose(0, 1), weight_HIO, out=y_NHO.transpose(0, 1))
    return y_NHO


def exact_product_by_head(x_NHI: torch.Tensor, weight_HIO: torch.Tensor) -> torch.Tensor:
    """The same, in which a row's bits do not depend on how many rows run beside it."""
    if x_NHI.is_cuda and x_NHI.dtype != torch.float64:
        from stridelm.kernels.head_products import head_products

        return head_products(x_NHI, weight_HIO)
    # Every call has the same shape, for which a library has one kernel.
    rows, out = x_NHI.shape[0], weight_HIO.shape[2]
    if not x_NHI.is_cuda:
        x_NHI, weight_HIO = evened(x_NHI, weight_HIO)
    tiles = F.pad(x_NHI, (0, 0, 0, 0, 0, -rows % TILE_ROWS)).split(TILE_ROWS)
    return torch.cat([product_by_head(tile, weight_HIO) for tile in tiles])[:rows, :, :out].contiguous()


def padded_product(x_NI: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The library's product, with a single row run as two: oneDNN takes a matrix-vector path for one row."""
    if x_NI.shape[0] > 1:
        return F.linear(x_NI, weight, bias)
    return F.linear(x_NI.expand(2, -1), weight, bias)[:1]


def wide_product(x_NI: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The library's product in float32 (float64 for float64), not rounded to x's dtype."""
    return F.linear(*_widened(x_NI, weight), bias)


def wide_tiled_product(x_NI: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The same in tiles."""
    return tiled_product(*_widened(x_NI, weight), bias)


def _widened(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.to(wide), weight.to(wide)


class InOrderProduct:
    """A 16-bit product on a GPU that always adds a row's terms in the same order (kernels/products.py), unless its sums
    are left in parts."""

    def __init__(self, deterministic: bool, ones: torch.Tensor | None = None) -> None:
        """ones: of `ones_of_parts`, if sums may be left in parts."""
        assert ones is None or not deterministic
        self.deterministic, self.ones = deterministic, ones

    def is_ours(self, x: torch.Tensor, gated: bool) -> bool:
        """Whether our kernel is at least as fast as the library's, so that it runs even without `deterministic`."""
        from stridelm.kernels.products import FEW_ROWS, GATED_ROWS

        rows = x.shape[0]
        return any(rows in some for some in GATED_ROWS) if gated else 0 < rows <= FEW_ROWS

    def fuses_gate(self, x: torch.Tensor, is_given: bool = False) -> bool:
        return self.is_ours(x, gated=not is_given)

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        activation: str | None = None,
        up: torch.Tensor | None = None,
    ) -> torch.Tensor:
        from stridelm.kernels.products import library_agrees, product

        if activation is not None or self.is_ours(x, gated=False):
            return product(x, weight, bias, activation, up)
        if self.deterministic and x.shape[0] and not library_agrees(x, weight, bias):
            return product(x, weight, bias)
        return F.linear(x, weight, bias)

    def parts(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Parts | None:
        """The same for [N, I] in parts [N, P, O] that whoever reads them adds up, where that is faster."""
        from stridelm.kernels.sums_in_parts import added_parts, pays_in_parts

        if self.ones is None or bias is not None or not pays_in_parts(x.shape[0], weight):
            return None
        return with_ones(added_parts(x, weight), self.ones)


def ones_of_parts(device: torch.device) -> torch.Tensor:
    """Weights of the parts in which sums of few rows are left."""
    from stridelm.kernels import fp8

    return torch.ones(fp8.FEW_ROWS * fp8.MOST_PARTS, device=device)


def with_ones(sums_NPO: torch.Tensor, ones: torch.Tensor) -> Parts:
    """Parts whose sum is that of `sums`."""
    rows, parts, _ = sums_NPO.shape
    return Parts(sums_NPO, ones[: rows * parts].view(rows, parts))


class PackedProduct:
    """The product with a bfloat16 CPU weight that was reordered once into oneDNN's own layout."""

    ROWS_HINT = 2
    few: FewRows | None = None
    """Our kernel for few rows."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), self.ROWS_HINT)

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if self.few is not None and self.few.is_fast(x.shape[0]):
            return self.few(x, bias)
        return torch.ops.mkldnn._linear_pointwise.default(x, self.packed, bias, "none", [], "")


class PackedPieces(PackedProduct):
    """The same, in pieces of at most `height` rows: few rows cost what they cost in one."""

    def __init__(self, weight: torch.Tensor, height: int) -> None:
        super().__init__(weight)
        self.height = height

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        run = super().__call__
        if x.shape[0] <= self.height:
            return run(x, weight, bias)
        return torch.cat([run(piece, weight, bias) for piece in x.split(self.height)])


class PackedTiles(PackedProduct):
    """The same, in tiles of TILE_ROWS rows, the last one padded: on a CPU where even those few change the bits."""

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        rows = x.shape[0]
        tiles = F.pad(x, (0, 0, 0, -rows % TILE_ROWS)).split(TILE_ROWS)
        return torch.cat([super(PackedTiles, self).__call__(tile, weight, bias) for tile in tiles])[:rows]


def keeps_bits(way: Way, shape: torch.Size, dtype: torch.dtype, biased: bool) -> bool:
    """Whether a row's bits are independent of the number of rows and of its index among them.

    Tried once per shape and number of threads, on numbers whose products cancel to zero, so that only the rounding,
    which depends on the order of adding, is left of each sum. (With random numbers, a 16-bit result hides nearly all of
    it.)
    """
    key = (way, shape, dtype, biased, torch.get_num_threads())
    if key not in _TRIED:
        counts = [count for count in TRIED_ROWS if count * shape[0] <= MAX_TRIED]
        x, weight, bias = _cancelling(counts[-1], shape, dtype, biased)
        product = way(weight)
        whole = product(x, weight, bias)
        _TRIED[key] = all(
            torch.equal(product(x[part], weight, bias), whole[part])
            for count in counts
            for part in (slice(count), slice(len(x) - count, None))
        )
    return _TRIED[key]


_TRIED: dict[tuple[Way, torch.Size, torch.dtype, bool, int], bool] = {}


def _cancelling(
    rows: int, shape: torch.Size, dtype: torch.dtype, biased: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Rows, weight and bias whose products are zero but for rounding."""
    out, width = shape
    numbers = torch.Generator().manual_seed(0)
    half_x, half_w = (torch.randn(n, width // 2, generator=numbers, dtype=dtype) for n in (rows, out))
    x, weight = (F.pad(torch.cat(halves, dim=1), (0, width % 2)) for halves in ((half_x, half_x), (half_w, -half_w)))
    return x, weight, torch.zeros(out, dtype=dtype) if biased else None


def few_rows(way: Way, product: PackedProduct, shape: torch.Size, biased: bool) -> FewRows | None:
    """Our kernel for few rows of a packed weight, if it gives the product's bits: tried once per way, shape and number
    of threads, which also shows whether oneDNN packs the weight as our kernel reads it."""
    from stridelm.kernels.host.product import FewRows

    few = FewRows.of(product.packed, shape)
    if few is None:
        return None
    key = (way, shape, biased, torch.get_num_threads())
    if key not in _AGREED:
        x, weight, bias = _cancelling(few.max_rows, shape, torch.bfloat16, biased)
        tried = way(weight)
        assert isinstance(tried, PackedProduct)
        ours = FewRows.of(tried.packed, shape)
        _AGREED[key] = ours is not None and all(
            torch.equal(ours(x[:count], bias), tried(x[:count], weight, bias))
            for count in TRIED_ROWS
            if count <= few.max_rows
        )
    return few if _AGREED[key] else None


_AGREED: dict[tuple[Way, torch.Size, bool, int], bool] = {}


def bfloat16_is_native() -> bool:
    """Whether this CPU has bfloat16 multiplication (AVX512-BF16 or AMX), which makes it fast."""
    if not torch.backends.mkldnn.is_available() or not getattr(torch.cpu, "_is_avx512_bf16_supported", bool)():
        return False
    # ATEN_CPU_CAPABILITY and ONEDNN_MAX_CPU_ISA may disable what the CPU has; oneDNN then refuses to pack the weight.
    allowed = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return bool(allowed and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def chosen(weight: torch.Tensor, biased: bool, *, deterministic: bool) -> Product:
    """The fastest product for the weight's device and dtype; if equal bits are promised, among those that keep them."""
    if weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and bfloat16_is_native():
        asked = (weight.shape, weight.dtype, biased)
        ways = (way for way in _native_ways() if not deterministic or keeps_bits(way, *asked))
        way = next(ways, _tiled)
        product = way(weight)
        if isinstance(product, PackedProduct):
            product.few = few_rows(way, product, weight.shape, biased)
        return product
    if runs_in_order(weight):
        return InOrderProduct(deterministic, None if deterministic else ones_of_parts(weight.device))
    return tiled_product if deterministic else F.linear


def chosen_wide(weight: torch.Tensor, *, deterministic: bool) -> Product:
    """The fastest product without bias whose result is not rounded to 16 bits."""
    if weight.device.type == "cpu" and weight.dtype == torch.float32:
        from stridelm.kernels.host.router import scores

        return scores
    if runs_in_order(weight):
        from stridelm.kernels.sums_in_parts import scores as scores_in_order

        return scores_in_order
    return wide_tiled_product if deterministic else wide_product


def _native_ways() -> Sequence[Way]:
    """oneDNN's products."""
    return PACKED if hasattr(torch.ops.mkldnn, "_linear_pointwise") else (_padded,)


PACKED: tuple[Way, ...] = (
    PackedProduct,
    *(partial(PackedPieces, height=height) for height in PIECES),
    PackedTiles,
)
"""Ways to run a packed product, the fastest first."""


def _padded(_: torch.Tensor) -> Product:
    return padded_product


def _tiled(_: torch.Tensor) -> Product:
    return tiled_product


def runs_in_order(weight: torch.Tensor) -> bool:
    """Whether our kernels multiply by this weight."""
    if not weight.is_cuda:
        return False
    from stridelm.kernels.products import can_multiply

    return can_multiply(weight)
