"""What a compiled kernel does before it waits for the kernel launched before it (kernels/dependent.py)."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from typing import Any

STEP = {"starts", "counts", "firsts", "reals", "tables", "tile_span", "tile_row"}
READ_STEPS = {"attention_device": STEP, "attention_splits": STEP}
"""Modules whose kernels read what describes the step before they wait, these arrays: numbers, one by one."""
READ_WEIGHTS = {"head_products": {"weight"}, "latent_queries": {"weight"}}
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
TILES = {"table", "pairs"}
READ_TILES = {"experts": TILES, "fp8_experts": TILES, "shared_experts": TILES}
"""Modules whose kernels also read, if they are not gated, which tiles there are and which pairs these have. The product
before has read them, too, after it had waited."""
READ_PAIRS = {"fp8_experts"}
"""Those that read several of these at once."""
UNKNOWN = "unknown"
_LABEL = re.compile(r"^\$?(\w+):")
_BRANCH = re.compile(r"(@!?%p\d+\s+)?bra(?:\.uni)?\s+\$?(\w+)")
_COPY = re.compile(r"\bcp\.async\.bulk\.tensor\.\d+d\.shared::c\w+\.global\S* \[%r\d+\], \[(%rd\d+)")
"""From a matrix that is described there."""
_WRITE = re.compile(r"\b(st|red|atom)\.(?!shared|local|param)|\bcp\.async|multimem")
_READ = re.compile(r"\bld\.global\S*?(\.v\d)?\.[bfsu]\d+\s+(?:\{[^}]*\}|%\w+), \[ ?(%rd\d+)")
_PARAMETER = re.compile(r"\bld\.param\S*\s+(%rd\d+), \[\w+_param_(\d+)")
_COMPUTED = re.compile(r"(?:@!?%p\d+\s+)?(?!ld|st|red|atom)[a-z][\w.:]*\s+(%rd\d+), (.*);")


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
    arrays: list[str] = field(default_factory=list)
    """Those that are read, by the names of arguments; or UNKNOWN."""


def known_of(kernel: Any, made: Any) -> dict[str, Any]:
    """Which kernel was compiled, and what it does before it waits. made: what Triton made of it."""
    module = kernel.__module__.rpartition(".")[2]
    constants = {kernel.arg_names[at[0]]: value for at, value in made.src.constants.items()}
    return {
        "name": kernel.__name__,
        "module": module,
        "gated": constants.get("ACTIVATION") is not None,
        "before": before_waiting(made.asm["ptx"], _parameters(made.src.signature)),
    }


def _parameters(signature: dict[str, str]) -> list[str]:
    """For each parameter of a compiled kernel, the array that it points to, or nothing. A descriptor is followed by the
    length and the stride of each dimension."""
    names = []
    for name, kind in signature.items():
        dimensions = kind.count(",") + 1 if kind.startswith("tensordesc") else 0
        names += [name if kind.startswith("*") else ""] * (1 + 2 * dimensions) if kind != "constexpr" else []
    return names


def before_waiting(ptx: str, parameters: list[str]) -> dict[str, Any]:
    """Of a kernel's code as PTX; as a dict, for JSON. parameters: as of _parameters."""
    lines = [line.strip() for line in ptx[ptx.index(".entry") :].splitlines()]
    labels = {label[1]: i for i, line in enumerate(lines) if (label := _LABEL.match(line))}
    sources = _sources(lines)
    found, copied, arrays, seen, todo = Before(), set[str](), set[str](), set[int](), [0]
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
                arrays |= {parameters[number] for number in sources[read[2]]} - {""} or {UNKNOWN}
            if branch := _BRANCH.search(line):
                todo.append(labels[branch[2]])
                if not branch[1]:
                    break
            if re.match(r"(@!?%p\d+\s+)?ret;", line):
                found.ends = True
                break
            i += 1
    found.copied = len(copied)
    found.arrays = sorted(arrays)
    return asdict(found)


def _sources(lines: list[str]) -> dict[str, set[int]]:
    """The parameters from which each address is computed, whatever may have been loaded to compute it too."""
    sources, computed = defaultdict[str, set[int]](set), list[tuple[str, set[str]]]()
    for line in lines:
        if parameter := _PARAMETER.search(line):
            sources[parameter[1]].add(int(parameter[2]))
        elif made := _COMPUTED.match(line):
            computed.append((made[1], set(re.findall(r"%rd\d+", made[2]))))
    known = -1
    while known != (known := sum(map(len, sources.values()))):
        for register, operands in computed:
            sources[register].update(*(sources[operand] for operand in operands))
    return sources


def check_waits(kernels: list[dict[str, Any]]) -> None:
    """No kernel writes, ends or reads before it waits what may not be complete, and those that have their weights
    copied early do. kernels: each with its module, `gated` and `before`."""
    for kernel in kernels:
        before, module = Before(**kernel["before"]), kernel["module"]
        tiles = set() if kernel["gated"] else READ_TILES.get(module, set())
        known = READ_STEPS.get(module) or READ_WEIGHTS.get(module) or tiles
        assert not before.writes and not before.ends, kernel
        assert not before.numbers or module in READ_STEPS or tiles, kernel
        assert not before.vectors or module in READ_WEIGHTS or (tiles and module in READ_PAIRS), kernel
        assert known.issuperset(before.arrays), kernel
        assert before.copied == COPIED.get(module, (0, 0))[kernel["gated"]], kernel
