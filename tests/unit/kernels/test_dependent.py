"""What a kernel may do before it waits, as the check of compiled kernels reads it from their code."""

from __future__ import annotations

import pytest

from support.checks.before_waiting import COPIED, Before, before_waiting, check_waits

WAITS = "griddepcontrol.wait;"
READS = "@%p1 ld.global.b32 { %r1 }, [ %rd1 + 0 ];"
READS_MANY = "ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];"
WRITES = "st.global.b32 [ %rd1 + 0 ], { %r1 };"
COPIES = "cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, %r2;"
ASKS = "@%p1 cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%rd1, {%r2, %r3}], [%r4];"
ENDS = "ret;"
EARLY_END = f"@%p1 bra $L__BB0_2;\n{ENDS}\n$L__BB0_2:\n"


def of(*lines: str) -> Before:
    return Before(**before_waiting("\n".join((".visible .entry kernel()", "{", *lines, "}"))))


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ((WAITS, READS, WRITES, COPIES, ENDS), Before()),
        ((READS, READS_MANY, WAITS, WRITES, ENDS), Before(numbers=1, vectors=1)),
        ((WRITES, WAITS, ENDS), Before(writes=1)),
        ((COPIES, WAITS, ENDS), Before(writes=1)),
        ((ASKS, ASKS, WAITS, ASKS.replace("%rd1", "%rd2"), ENDS), Before(copied=1)),
        ((ASKS, ASKS.replace("%rd1", "%rd2"), WAITS, ENDS), Before(copied=2)),
        (("st.shared.b32 [ %r1 ], %r2;", WAITS, ENDS), Before()),
        ((EARLY_END, WAITS, ENDS), Before(ends=True)),
        ((READS, ENDS), Before(numbers=1, ends=True)),
        (("@%p1 bra $L__BB0_2;", WAITS, WRITES, ENDS, "$L__BB0_2:", WAITS, WRITES, ENDS), Before()),
        (("@%p1 bra $L__BB0_2;", WAITS, WRITES, ENDS, "$L__BB0_2:", READS, WRITES, ENDS), Before(1, 1, ends=True)),
        (("bra.uni $L__BB0_2;", "$L__BB0_1:", WRITES, ENDS, "$L__BB0_2:", WAITS, "bra.uni $L__BB0_1;"), Before()),
    ],
    ids=map(str, range(12)),
)
def test_what_comes_before(code: tuple[str, ...], found: Before) -> None:
    """On every path, in whatever order its blocks are written down."""
    assert of(*code) == found


@pytest.mark.parametrize(
    ("module", "gated", "before"),
    [
        ("triton_norms", False, {"numbers": 1}),
        ("triton_norms", False, {"writes": 1}),
        ("attention_device", False, {"vectors": 1}),
        ("attention_device", False, {"ends": True}),
        ("head_products", False, {"numbers": 1}),
        ("products", False, {"copied": 2}),
        ("products", True, {"copied": 0}),
        ("fp8", False, {"numbers": 1}),
        ("fp8", True, {"copied": 0}),
        ("fp8_experts", True, {"vectors": 1}),
        ("quantise", False, {"copied": 1}),
        ("experts", True, {"numbers": 1}),
        ("experts", False, {"vectors": 1}),
        ("shared_experts", True, {"copied": 2}),
    ],
)
def test_what_is_refused(module: str, gated: bool, before: dict[str, int]) -> None:
    good = {"copied": COPIED.get(module, (0, 0))[gated]}
    with pytest.raises(AssertionError):
        check_waits([{"module": module, "gated": gated, "before": good | before}])
    check_waits([{"module": module, "gated": gated, "before": good}])
