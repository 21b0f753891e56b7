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


def plant(fault: Fault, root: Path) -> str:
    """The file's text before. Raises ValueError if the line is not there, or not once."""
    file = root / "src" / "stridelm" / fault.file
    text = file.read_text(encoding="utf-8")
    if text.count(fault.line) != 1:
        raise ValueError(f"{fault.name}: {fault.file} has {text.count(fault.line)} times {fault.line!r}; mend the list")
    file.write_text(text.replace(fault.line, fault.instead), encoding="utf-8")
    return text


def first_failure(root: Path, jobs: int, words: list[str]) -> str | None:
    """The first test that fails in a copy of the project; None if none does."""
    path = os.pathsep.join(filter(None, (str(root / "src"), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CI": "true"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", str(jobs), "-p", "no:cacheprovider", *words]
    ran = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True)
    failed = [line for line in ran.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if not failed and ran.returncode not in (0, 5):
        raise RuntimeError(f"pytest ended with {ran.returncode}:\n{ran.stdout[-2000:]}{ran.stderr[-2000:]}")
    return failed[0].split(" - ")[0].split(" ", 1)[1] if failed else None


def catches(fault: Fault, options: list[str], jobs: int) -> str | None:
    """The first test that fails with the fault and not without; None if there is none."""
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory) / "project"
        # With what lies compiled beside its source: to compile it anew would take most of the time.
        shutil.copytree(ROOT, root, symlinks=True, ignore=shutil.ignore_patterns(".venv", ".git", "build"))
        text, others = plant(fault, root), list[str]()
        for place in (f"tests/{fault.first}", "tests"):
            while failed := first_failure(root, jobs, [*options, *others, place]):
                (root / "src" / "stridelm" / fault.file).write_text(text, encoding="utf-8")
                if first_failure(root, 0, [failed]) is None:
                    return failed
                others.append(f"--deselect={failed}")
                plant(fault, root)
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
