"""A process that has imported what takes long to import, and runs programs, each in a fork of itself: nothing of a
program stays for the next one, as if it had a process of its own, which would take seconds to start.

Run as a process of its own: python -m support.doubles.forks MODULE...
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn


@dataclass
class Forks:
    process: subprocess.Popen[str]

    def run(
        self, module: str, *arguments: str, environment: Mapping[str, str] | None = None, path: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a module as a program, with these variables added to its environment. path: where it looks for modules
        first."""
        assert self.process.stdin is not None and self.process.stdout is not None
        with tempfile.TemporaryDirectory() as directory:
            written = [Path(directory, name) for name in ("stdout", "stderr")]
            asked = {
                "module": module,
                "arguments": arguments,
                "environment": dict(environment or {}),
                "path": [] if path is None else [str(path)],
                "written": [str(file) for file in written],
            }
            print(json.dumps(asked), file=self.process.stdin, flush=True)
            code = int(self.process.stdout.readline())
            return subprocess.CompletedProcess([module, *arguments], code, *(file.read_text() for file in written))


@contextmanager
def forks(modules: Sequence[str], environment: Mapping[str, str] | None = None) -> Iterator[Forks]:
    """Forks of a process that has imported these modules. environment: all of its variables, by default this one's."""
    process = subprocess.Popen(
        [sys.executable, "-m", "support.doubles.forks", *modules],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=Path(__file__).parents[2],
    )
    with process:  # which closes its input, and so ends it
        yield Forks(process)


def main() -> None:
    for module in sys.argv[1:]:
        importlib.import_module(module)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _become(json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _become(asked: dict[str, Any]) -> NoReturn:
    """Run the module as the interpreter would, and end the process."""
    for number, file in enumerate((os.devnull, *asked["written"])):
        os.dup2(os.open(file, os.O_RDWR | os.O_CREAT), number)
    os.environ.update(asked["environment"])
    sys.path[:0] = asked["path"]
    sys.argv[1:] = asked["arguments"]
    code = 0
    try:
        runpy.run_module(asked["module"], run_name="__main__", alter_sys=True)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
