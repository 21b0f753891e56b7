"""Plants faults in a copy of the source, one at a time, and runs the tests on it: what do they catch?

    python tools/mutations.py                       # with the tests of `make test`
    python tools/mutations.py --all                 # with all tests
    python tools/mutations.py --only salt --only window

Each run stops at the first failing test. Fails if a fault is not caught, or cannot be planted because its line is gone.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "stridelm"


@dataclass(frozen=True)
class Fault:
    name: str
    file: str
    line: str
    instead: str
    first: str
    """Where a test of it is most likely; the others run after these."""


FAULTS = (
    Fault(
        "acceptance",
        "verify/rejection.py",
        "at(q_RV, token) < at(p_RV",
        "at(q_RV, token) < 1.2 * at(p_RV",
        "unit/verify",
    ),
    Fault("residual", "verify/rejection.py", "(p_RV - q_RV).clamp(min=0.0)", "(p_RV - q_RV).abs()", "unit/verify"),
    Fault(
        "position",
        "verify/exact.py",
        "batch.positions[batch.decisions[rows]] + 1",
        "batch.positions[batch.decisions[rows]]",
        "laws/test_identity.py",
    ),
    Fault(
        "probabilities",
        "sample/sampler.py",
        "logits_MV.float() / self.table",
        "logits_MV.float() * self.table",
        "unit/sample",
    ),
    Fault("attempts", "kernels/noise.py", "_ATTEMPTS + 4 * known_M + kind", "_ATTEMPTS + 4 * known_M", "unit/verify"),
    Fault("salt", "cache/prefix.py", "if names else root_of(salt)", "if names else ROOT", "unit/cache"),
    Fault(
        "chain",
        "cache/prefix.py",
        "tokens).tobytes(), digest_size=16, key=previous)",
        "tokens).tobytes(), digest_size=16)",
        "unit/cache",
    ),
    Fault("whole hit", "cache/ledger.py", "(len(tokens) - after) // self", "len(tokens) // self", "unit/cache"),
    Fault(
        "window",
        "cache/ledger.py",
        "max(0, computed - window + 1) //",
        "max(0, computed - window + 2) //",
        "unit/cache",
    ),
    Fault("leak", "cache/ledger.py", "self._pages[group].drop(table[old:left])", "pass", "unit/cache"),
    Fault(
        "least length",
        "engine/emit.py",
        "if count > params.min_tokens:",
        "if count >= params.min_tokens:",
        "unit/engine",
    ),
    Fault("context", "engine/emit.py", "or request.known >= self._max_length", "", "unit/engine"),
    Fault(
        "noise again",
        "engine/intake.py",
        "renews_noise=adaptive and rule.lossless",
        "renews_noise=False and rule.lossless",
        "laws",
    ),
    Fault("slots", "schedule/planner.py", "if len(admitted) == slots:", "if len(admitted) > slots:", "unit/schedule"),
    Fault(
        "turns",
        "schedule/fairness.py",
        "return request.priority, place, request.arrival",
        "return request.priority, request.arrival, place",
        "unit/schedule",
    ),
    Fault("rank", "sample/logprobs.py", "ranks=before_MV.sum(-1) + 1", "ranks=before_MV.sum(-1)", "unit/sample"),
    Fault(
        "presence",
        "kernels/edit.py",
        "tl.minimum(output_B, 1.0) * tl.load(presence",
        "output_B * tl.load(presence",
        "unit/kernels",
    ),
    Fault(
        "roles",
        "server/callers.py",
        "Caller(digest[:6].hex(), operator,",
        "Caller(digest[:6].hex(), True,",
        "unit/server",
    ),
    Fault("fair line", "server/fair_line.py", "self._lines.move_to_end(tenant)", "pass", "unit/server"),
    Fault(
        "stretch",
        "models/layers/rope.py",
        "return scaled, _yarn_attention_factor(factor, p)",
        "return scaled, 1.0",
        "oracle",
    ),
)


def planted(fault: Fault, directory: Path) -> Path:
    """A copy of `src` with the fault. Raises ValueError if its line is not there, or not once."""
    copy = directory / "src" / "stridelm"
    shutil.copytree(PACKAGE, copy, symlinks=True)
    text = (copy / fault.file).read_text(encoding="utf-8")
    if text.count(fault.line) != 1:
        raise ValueError(f"{fault.name}: {fault.file} has {text.count(fault.line)} times {fault.line!r}; mend the list")
    (copy / fault.file).write_text(text.replace(fault.line, fault.instead), encoding="utf-8")
    return copy.parent


def catches(fault: Fault, options: list[str], jobs: int) -> str | None:
    """The first test that fails with the fault; None if all pass."""
    with tempfile.TemporaryDirectory() as directory:
        source = planted(fault, Path(directory))
        path = os.pathsep.join(filter(None, (str(source), os.environ.get("PYTHONPATH"))))
        env = {**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CI": "true"}
        for places in ([f"tests/{fault.first}"], ["tests"]):
            command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", str(jobs), "-p", "no:cacheprovider", *options]
            ran = subprocess.run([*command, *places], cwd=ROOT, env=env, capture_output=True, text=True)
            failed = [line for line in ran.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
            if failed:
                return failed[0].split(" - ")[0].split(" ", 1)[1]
            if ran.returncode not in (0, 5):
                raise RuntimeError(f"pytest ended with {ran.returncode}:\n{ran.stdout[-2000:]}{ran.stderr[-2000:]}")
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="with all tests")
    parser.add_argument("--only", action="append", choices=[fault.name for fault in FAULTS], help="repeatable")
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    missed = []
    for fault in FAULTS:
        if args.only and fault.name not in args.only:
            continue
        began = time.monotonic()
        by = catches(fault, [] if args.all else ["--quick"], args.jobs)
        missed += [fault.name] * (by is None)
        print(f"{fault.name:14} {'NOT CAUGHT' if by is None else by} ({time.monotonic() - began:.0f} s)", flush=True)
    print(f"not caught: {', '.join(missed) or 'none'}")
    return bool(missed)


if __name__ == "__main__":
    raise SystemExit(main())
