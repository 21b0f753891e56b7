"""AVX512-BF16 instructions for compiled code: products of rows of bfloat16, summed in float32 (Intel, Instruction Set
Extensions Programming Reference, chapter 2). With the names of amx.py, for CPUs that have no AMX.

A VDPBF16PS adds the products of two inputs to 16 sums. Inputs are taken in parts of 512, or of 1,024 if there are more
than that: the pairs of a part one after another, and the parts likewise. So a sum's bits depend on the order of its
inputs alone, whatever the number of rows, and are those of oneDNN's kernels for such CPUs (but for a single row of more
than 1,024 inputs, where it keeps to parts of 512).
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"
from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from llvmlite import binding, ir
from numba.core import cgutils, types
from numba.core.extending import intrinsic, register_jitable

from stridelm.kernels.host.address import start_of
from stridelm.kernels.host.arithmetic import compiles_for

ROWS = 64
"""Most rows of a product by itself. With twice as many, oneDNN's kernels are as fast."""
LAYER_ROWS = 128
"""Most rows of layers that are one call, which spares what some seventy calls of oneDNN take to begin: with more rows
than that, oneDNN's products gain as much."""
PAIRS = 16
"""Pairs of inputs in a block."""
OUTPUTS = 64
"""Outputs in a block."""
FEW = 65_536
"""Outputs of all rows together, up to which a product by itself is faster than oneDNN's."""

_HELD = 4
"""Rows whose sums are held in registers: four vectors of sums each, and 32 registers."""
_ALONE, _SEVERAL = 4, 2
"""Places that a group of rows fetches for each pair of inputs, if it is the only one and if it is not. A pair's outputs
are four lines: the groups fetch them all between them, and lines next to those that are fetched come along."""
_PARTS = (256, 512)
"""Pairs of a part of the inputs: the first of these, or the second if there are more than that."""
_LANES = 16
_LONG, _PAIR = ir.IntType(64), ir.IntType(32)
_PAIRS, _SUMS = ir.VectorType(_PAIR, _LANES), ir.VectorType(ir.FloatType(), _LANES)
_VECTORS = OUTPUTS // _LANES


def is_available() -> bool:
    """Whether this CPU has AVX512-BF16."""
    return compiles_for("avx512bf16")


@register_jitable
def configuration(rows):
    """Nothing needs to be configured."""
    return np.zeros(1, np.uint8)


@register_jitable
def configure(configuration):
    pass


@register_jitable
def release():
    pass


@intrinsic
def multiply(typing, x_NI, weight_OIPB, block, following, sums_NB):
    """Write the products of all rows with one block of outputs to `sums`, and have the CPU fetch the block that is
    multiplied next meanwhile. x_NI: uint16; weight_OIPB: uint32, each a pair of inputs, in blocks of PAIRS pairs by
    OUTPUTS outputs; sums_NB: float32. I is a multiple of 2 PAIRS."""

    def generate(context, builder, signature, arguments):
        return _generate(context, builder, signature, arguments, 4, following=arguments[3])

    return types.void(x_NI, weight_OIPB, types.intp, types.intp, sums_NB), generate


@intrinsic
def multiply_cached(typing, x_NI, weight_OIPB, block, sums_NB):
    """The same with a weight that is in a near cache: nothing is fetched."""

    def generate(context, builder, signature, arguments):
        return _generate(context, builder, signature, arguments, 3, following=None)

    return types.void(x_NI, weight_OIPB, types.intp, sums_NB), generate


def _generate(context, builder, signature, arguments, sums_index, following):
    """A call of one function for all places of a module: inlined into each, it took a minute to compile."""
    array = context.make_array(signature.args[0])(context, builder, arguments[0])
    rows, inputs = cgutils.unpack_tuple(builder, array.shape)
    x, weight, sums = (start_of(context, builder, signature, arguments, i) for i in (0, 1, sums_index))
    pairs = builder.lshr(inputs, _LONG(1))
    block_bytes = builder.mul(pairs, _LONG(4 * OUTPUTS))
    block = _at(builder, weight, builder.mul(arguments[2], block_bytes))
    ahead = block if following is None else _at(builder, weight, builder.mul(following, block_bytes))
    function = _function(builder.module, fetches=following is not None)
    builder.call(function, [x, block, ahead, sums, rows, pairs])
    return context.get_dummy_value()


def _function(module, fetches):
    """(x, block, block to be fetched, sums, rows, pairs) -> nothing."""
    name = "stridelm_multiply_and_fetch" if fetches else "stridelm_multiply"
    if name in module.globals:
        return module.globals[name]
    address = ir.IntType(8).as_pointer()
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [address] * 4 + [_LONG] * 2), name)
    function.linkage = "internal"
    function.attributes.add("noinline")
    x, weight, ahead, sums, rows, pairs = function.args
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    few, many = map(_LONG, _PARTS)
    size = builder.select(builder.icmp_unsigned("<=", pairs, many), few, many)
    whole, rest = builder.udiv(rows, _LONG(_HELD)), builder.urem(rows, _LONG(_HELD))
    groups = builder.udiv(builder.add(rows, _LONG(_HELD - 1)), _LONG(_HELD))
    with cgutils.for_range_slice(builder, _LONG(0), pairs, size, _LONG) as (start, _):
        stop = builder.add(start, size)
        part = start, builder.select(builder.icmp_unsigned("<", stop, pairs), stop, pairs)

        def some(group, count, places):
            share = _Share.of(builder, ahead, group, groups, pairs, places) if fetches else None
            _multiply_rows(builder, (x, weight, sums), builder.mul(group, _LONG(_HELD)), count, pairs, part, share)

        with builder.if_else(builder.icmp_unsigned("==", groups, _LONG(1))) as (alone, several):
            with alone:
                for count in range(1, _HELD + 1):
                    with builder.if_then(builder.icmp_unsigned("==", rows, _LONG(count))):
                        some(_LONG(0), count, _ALONE)
            with several:
                with cgutils.for_range(builder, whole) as loop:
                    some(loop.index, _HELD, _SEVERAL)
                for count in range(1, _HELD):
                    with builder.if_then(builder.icmp_unsigned("==", rest, _LONG(count))):
                        some(whole, count, _SEVERAL)
    builder.ret_void()
    return function


@dataclass(frozen=True)
class _Share:
    """A group's share of the block that is fetched: so many bytes for each pair of its own block, at as many places."""

    start: ir.Value
    size: ir.Value
    fetches: int

    @classmethod
    def of(cls, builder, ahead, group, groups, pairs, fetches):
        size = builder.udiv(_LONG(4 * OUTPUTS), groups)
        return cls(_at(builder, ahead, builder.mul(group, builder.mul(pairs, size))), size, fetches)

    def fetch(self, builder, pair):
        first = _at(builder, self.start, builder.mul(pair, self.size))
        apart = builder.udiv(self.size, _LONG(self.fetches))
        for number in range(self.fetches):
            fetch(builder, _at(builder, first, builder.mul(apart, _LONG(number))))


def _multiply_rows(builder, addresses, first, count, pairs, part, share):
    """Add one part of the inputs to the sums of `count` rows from `first` on; the first part overwrites them. The count
    is known as this is compiled. part: its first pair, and the one after its last. share: of what is fetched, if
    anything is."""
    x, weight, sums = addresses
    start, stop = part
    row_bytes = builder.mul(pairs, _LONG(4))
    rows = [_at(builder, x, builder.mul(builder.add(first, _LONG(row)), row_bytes)) for row in range(count)]
    before, body = builder.block, builder.append_basic_block("pairs")
    after = builder.append_basic_block("pairs_end")
    builder.branch(body)
    builder.position_at_end(body)
    pair = builder.phi(_LONG)
    pair.add_incoming(start, before)
    totals = [[builder.phi(_SUMS) for _ in range(_VECTORS)] for _ in range(count)]
    block = _at(builder, weight, builder.mul(pair, _LONG(4 * OUTPUTS)))
    vectors = [_load(builder, _at(builder, block, _LONG(4 * _LANES * number)), _PAIRS) for number in range(_VECTORS)]
    if share is not None:
        share.fetch(builder, pair)
    made = []
    for row, held in zip(rows, totals, strict=True):
        given = _spread(builder, _load(builder, _at(builder, row, builder.mul(pair, _LONG(4))), _PAIR))
        made.append([_add_products(builder, total, given, vector) for total, vector in zip(held, vectors, strict=True)])
        for total, following in zip(held, made[-1], strict=True):
            total.add_incoming(ir.Constant(_SUMS, None), before)
            total.add_incoming(following, body)
    following = builder.add(pair, _LONG(1))
    pair.add_incoming(following, body)
    builder.cbranch(builder.icmp_unsigned("<", following, stop), body, after)
    builder.position_at_end(after)
    overwrites = builder.icmp_unsigned("==", start, _LONG(0))
    for row, held in enumerate(made):
        out = _at(builder, sums, builder.mul(builder.add(first, _LONG(row)), _LONG(4 * OUTPUTS)))
        for number, total in enumerate(held):
            at = _at(builder, out, _LONG(4 * _LANES * number))
            total = builder.select(overwrites, total, builder.fadd(total, _load(builder, at, _SUMS)))
            builder.store(total, builder.bitcast(at, _SUMS.as_pointer()), align=4)


def _add_products(builder, total, given, part):
    """By its name in assembly: the type that LLVM gives to the instruction's operands changes with its version."""
    binding.initialize_native_asmparser()
    kind = ir.FunctionType(_SUMS, [_SUMS, _PAIRS, _PAIRS])
    return builder.call(ir.InlineAsm(kind, "vdpbf16ps $3, $2, $0", "=v,0,v,v", side_effect=False), [total, given, part])


def _spread(builder, pair):
    """In all lanes."""
    one = builder.insert_element(ir.Constant(_PAIRS, ir.Undefined), pair, _PAIR(0))
    return builder.shuffle_vector(one, ir.Constant(_PAIRS, ir.Undefined), ir.Constant(_PAIRS, None))


def _load(builder, address, kind):
    return builder.load(builder.bitcast(address, kind.as_pointer()), align=4)


def _at(builder, address, offset):
    return builder.gep(address, [offset])


def fetch(builder, address):
    """Have the CPU fetch what lies there into its nearest cache."""
    kinds = [address.type, _PAIR, _PAIR, _PAIR]
    called = builder.module.declare_intrinsic("llvm.prefetch", kinds[:1], ir.FunctionType(ir.VoidType(), kinds))
    builder.call(called, [address, _PAIR(0), _PAIR(3), _PAIR(1)])
