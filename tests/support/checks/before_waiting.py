"""What a compiled kernel does before it waits for the kernel launched before it (kernels/dependent.py)."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

READ_STEPS = {"attention_device", "attention_splits"}
"""Modules whose kernels read what describes the step before they wait: numbers, one by one."""
READ_WEIGHTS = {"head_products", "latent_queries"}
"""Modules whose kernels read weights before they wait."""
COPIED = {
    "products": (1, 1),
    "sums_in_parts": (1, 1),
    "fp8": (1, 1),
    "experts": (1, 0),
    "fp8_experts": (1, 0),
    "shared_experts": (2, 1),
}
"""Of how many matrices, its weights, a module's kernels have blocks copied to shared memory before they wait: plain
ones and gated ones."""
READ_TABLES = {"experts", "fp8_experts", "shared_experts"}
"""Modules whose kernels also read, if they are not gated, which tiles there are, numbers: the product before has read
them, too, after it had waited."""
READ_PAIRS = {"fp8_experts"}
"""Those that then read as well which pairs a tile has, several at once."""
_LABEL = re.compile(r"^\$?(\w+):")
_BRANCH = re.compile(r"(@!?%p\d+\s+)?bra(?:\.uni)?\s+\$?(\w+)")
_COPY = re.compile(r"\bcp\.async\.bulk\.tensor\.\d+d\.shared::c\w+\.global\S* \[%r\d+\], \[(%rd\d+)")
"""From a matrix that is described there."""
_WRITE = re.compile(r"\b(st|red|atom)\.(?!shared|local|param)|\bcp\.async|multimem")
_READ = re.compile(r"\bld\.global\S*?(\.v\d)?\.[bfsu]\d+")


@dataclass
class Before:
    """Instructions on some path to the first wait, or to an end without one."""

    writes: int = 0
    """To memory, and copies from it, which may write wherever they are told."""
    numbers: int = 0
    """Reads of one number."""
    vectors: int = 0
    """Reads of several."""
    ends: bool = False
    """A thread may end without waiting."""
    copied: int = 0
    """Matrices of which blocks are copied to shared memory."""


def known_of(kernel: Any, made: Any) -> dict[str, Any]:
    """Which kernel was compiled, and what it does before it waits. made: what Triton made of it."""
    module = kernel.__module__.rpartition(".")[2]
    constants = {kernel.arg_names[at[0]]: value for at, value in made.src.constants.items()}
    return {
        "name": kernel.__name__,
        "module": module,
        "gated": constants.get("ACTIVATION") is not None,
        "before": before_waiting(made.asm["ptx"]),
    }


def before_waiting(ptx: str) -> dict[str, Any]:
    """Of a kernel's code as PTX; as a dict, for JSON."""
    lines = [line.strip() for line in ptx[ptx.index(".entry") :].splitlines()]
    labels = {label[1]: i for i, line in enumerate(lines) if (label := _LABEL.match(line))}
    found, copied, seen, todo = Before(), set[str](), set[int](), [0]
    while todo:
        i = todo.pop()
        while i < len(lines) and i not in seen:
            seen.add(i)
            line = lines[i]
            if "griddepcontrol.wait" in line:
                break
            if copy := _COPY.search(line):
                copied.add(copy[1])
            else:
                found.writes += bool(_WRITE.search(line))
            if read := _READ.search(line):
                found.vectors += bool(read[1])
                found.numbers += not read[1]
            if branch := _BRANCH.search(line):
                todo.append(labels[branch[2]])
                if not branch[1]:
                    break
            if re.match(r"(@!?%p\d+\s+)?ret;", line):
                found.ends = True
                break
            i += 1
    found.copied = len(copied)
    return asdict(found)


def check_waits(kernels: list[dict[str, Any]]) -> None:
    """No kernel writes, ends or reads before it waits what may not be complete, and those that have their weights
    copied early do. kernels: each with its module, `gated` and `before`."""
    for kernel in kernels:
        before, module = Before(**kernel["before"]), kernel["module"]
        reads_table = module in READ_TABLES and not kernel["gated"]
        assert not before.writes and not before.ends, kernel
        assert not before.numbers or module in READ_STEPS or reads_table, kernel
        assert not before.vectors or module in READ_WEIGHTS or (reads_table and module in READ_PAIRS), kernel
        assert before.copied == COPIED.get(module, (0, 0))[kernel["gated"]], kernel
