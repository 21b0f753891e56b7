"""What a kernel may do before it waits, as the check of compiled kernels reads it from their code."""

from __future__ import annotations

from typing import Any

import pytest

from support.checks.before_waiting import COPIED, UNKNOWN, Before, before_waiting, check_waits

WAITS = "griddepcontrol.wait;"
READS = "@%p1 ld.global.b32 { %r1 }, [ %rd1 + 0 ];"
READS_MANY = "ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];"
WRITES = "st.global.b32 [ %rd1 + 0 ], { %r1 };"
COPIES = "cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, %r2;"
ASKS = "@%p1 cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%rd1, {%r2, %r3}], [%r4];"
ENDS = "ret;"
EARLY_END = f"@%p1 bra $L__BB0_2;\n{ENDS}\n$L__BB0_2:\n"


def of(*lines: str) -> Before:
    return Before(**before_waiting("\n".join((".visible .entry kernel()", "{", *lines, "}")), ["x", "y"]))


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ((WAITS, READS, WRITES, COPIES, ENDS), Before()),
        ((READS, READS_MANY, WAITS, WRITES, ENDS), Before(numbers=1, vectors=1, arrays=[UNKNOWN])),
        ((WRITES, WAITS, ENDS), Before(writes=1)),
        ((COPIES, WAITS, ENDS), Before(writes=1)),
        ((ASKS, ASKS, WAITS, ASKS.replace("%rd1", "%rd2"), ENDS), Before(copied=1)),
        ((ASKS, ASKS.replace("%rd1", "%rd2"), WAITS, ENDS), Before(copied=2)),
        (("st.shared.b32 [ %r1 ], %r2;", WAITS, ENDS), Before()),
        ((EARLY_END, WAITS, ENDS), Before(ends=True)),
        ((READS, ENDS), Before(numbers=1, ends=True, arrays=[UNKNOWN])),
        (("@%p1 bra $L__BB0_2;", WAITS, WRITES, ENDS, "$L__BB0_2:", WAITS, WRITES, ENDS), Before()),
        (
            ("@%p1 bra $L__BB0_2;", WAITS, WRITES, ENDS, "$L__BB0_2:", READS, WRITES, ENDS),
            Before(1, 1, ends=True, arrays=[UNKNOWN]),
        ),
        (("bra.uni $L__BB0_2;", "$L__BB0_1:", WRITES, ENDS, "$L__BB0_2:", WAITS, "bra.uni $L__BB0_1;"), Before()),
    ],
    ids=map(str, range(12)),
)
def test_what_comes_before(code: tuple[str, ...], found: Before) -> None:
    """On every path, in whatever order its blocks are written down."""
    assert of(*code) == found


def test_which_arrays_are_read() -> None:
    """By how their addresses are computed, around a loop too; a number that was loaded is no address."""
    code = (
        "ld.param.b64 %rd5, [kernel_param_0];",
        "ld.param.b64 %rd6, [kernel_param_1];",
        "mad.wide.s32 %rd4, %r9, 4, %rd5;",
        "$L__BB0_1:",
        "mov.b64 %rd1, %rd2;",
        READS,
        "add.s64 %rd2, %rd4, 64;",
        "ld.global.b64 { %rd7 }, [ %rd6 + 0 ];",
        "@%p1 bra $L__BB0_1;",
        WAITS,
        ENDS,
    )
    assert of(*code[:7], *code[8:]).arrays == ["x"]
    assert of(*code).arrays == ["x", "y"]
    assert of(*code[:7], WAITS, *code[7:]).arrays == ["x"]
    assert of(code[0], code[1], code[7], "add.s64 %rd1, %rd7, 4;", READS, WAITS, ENDS).arrays == [UNKNOWN, "y"]


@pytest.mark.parametrize(
    ("module", "gated", "before"),
    [
        ("triton_norms", False, {"numbers": 1}),
        ("triton_norms", False, {"writes": 1}),
        ("attention_device", False, {"vectors": 1}),
        ("attention_device", False, {"numbers": 1, "arrays": ["queries"]}),
        ("attention_device", False, {"ends": True}),
        ("head_products", False, {"vectors": 1, "arrays": ["x"]}),
        ("head_products", False, {"numbers": 1}),
        ("products", False, {"copied": 2}),
        ("products", True, {"copied": 0}),
        ("fp8", False, {"numbers": 1}),
        ("fp8", True, {"copied": 0}),
        ("fp8_experts", True, {"vectors": 1}),
        ("quantise", False, {"copied": 1}),
        ("experts", True, {"numbers": 1}),
        ("experts", False, {"vectors": 1}),
        ("experts", False, {"numbers": 1, "arrays": ["table", "x"]}),
        ("fp8_experts", False, {"vectors": 1, "arrays": ["x_scales"]}),
        ("shared_experts", True, {"copied": 2}),
    ],
)
def test_what_is_refused(module: str, gated: bool, before: dict[str, Any]) -> None:
    good = {"copied": COPIED.get(module, (0, 0))[gated]}
    with pytest.raises(AssertionError):
        check_waits([{"module": module, "gated": gated, "before": good | before}])
    check_waits([{"module": module, "gated": gated, "before": good}])
