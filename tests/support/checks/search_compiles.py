"""Compiles the search for a row's cut for an H100 that is not there, and prints as JSON what it became.

Run as a process of its own, since it changes Triton for good: python -m support.checks.search_compiles
"""

from __future__ import annotations

import json
import re
from typing import Any

import torch
from triton.runtime import driver

from stridelm.kernels.logit_rows import KEY_BITS
from stridelm.kernels.search import DIGITS, MAX_REGISTERS, MAX_TURNS, WARPS, search
from support.doubles.absent_gpu import Driver

ROWS, PROGRAMS, VOCAB = 4, 33, 128256


def main() -> None:
    driver.set_active(Driver())
    found: list[dict[str, Any]] = []
    floats, ints = torch.empty(ROWS), torch.empty(ROWS, dtype=torch.int64)
    for dtype, top_k, top_p in ((d, k, p) for d in KEY_BITS for k, p in ((True, True), (False, True), (True, False))):
        made = search.warmup(
            torch.empty(ROWS, VOCAB, dtype=dtype),
            torch.empty(ROWS, MAX_TURNS.value, DIGITS.value, dtype=torch.int64),
            torch.empty(ROWS, dtype=torch.int32),
            floats,
            ints if top_k else None,
            floats if top_p else None,
            floats,
            floats,
            floats,
            ints,
            VOCAB,
            VOCAB,
            KEY_BITS[dtype],
            5,
            top_k,
            top_p,
            grid=(ROWS, PROGRAMS),
            num_warps=WARPS,
            maxnreg=MAX_REGISTERS,
        )
        code = made.asm["ptx"]
        registers = re.search(r"\.maxnreg\s+(\d+)", code)
        found.append(
            {
                "shared": made.metadata.shared,
                "registers": int(registers[1]) if registers else None,
                "threads": 32 * made.metadata.num_warps,
                "releases": len(re.findall(r"atom\S*gpu\.acq_rel", code)),
            }
        )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
