"""The servers that http_load.py compares: ones that run already, and ones that it starts and stops."""

from __future__ import annotations

import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stridelm.bench.http.server import Server

READY_S = 900.0
"""Other servers compile their kernels for minutes."""
STOP_S = 60.0
LOG_LINES = 20


@contextmanager
def started(name: str, command: Sequence[str], log: Path) -> Iterator[Server]:
    """A server that runs within the context. command: without the port. Raises RuntimeError, with the end of its log,
    if it does not get ready."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen([*command, "--port", str(port)], stdout=output, stderr=subprocess.STDOUT)
    try:
        yield _when_ready(name, process, f"http://127.0.0.1:{port}", log)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def stride_command(engine: Mapping[str, Any], max_num_seqs: int, more: str) -> list[str]:
    """engine: options of the engine, by name; `model` is a directory, or absent for the built-in model."""
    options = dict(engine)
    model = [options.pop("model")] if "model" in options else []
    command = [sys.executable, "-m", "stridelm.cli.main", "serve", *model, "--no-access-log", "--drafter", "none"]
    return [*command, *_words({**options, "max_num_seqs": max_num_seqs}), *shlex.split(more)]


def vllm_command(program: str, engine: Mapping[str, Any], max_num_seqs: int, more: str) -> list[str]:
    """vLLM with the same engine options as Stride, which takes them by vLLM's names."""
    options = {name: value for name, value in engine.items() if name in SHARED}
    command = [*shlex.split(program), "serve", engine["model"]]
    return [*command, *_words({**options, "max_num_seqs": max_num_seqs}), *shlex.split(more)]


def installed_vllm() -> str | None:
    """The path of vLLM's command, if there is one."""
    return shutil.which("vllm")


SHARED = {"load_format", "dtype", "max_num_batched_tokens", "max_model_len", "enable_prefix_caching"}


def _words(options: Mapping[str, Any]) -> list[str]:
    words: list[str] = []
    for name, value in options.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        else:
            words += [f"--{option}", str(value)]
    return words


def _when_ready(name: str, process: subprocess.Popen[bytes], url: str, log: Path) -> Server:
    end = time.monotonic() + READY_S
    while process.poll() is None and time.monotonic() < end:
        try:
            return Server.at(url, name)
        except ValueError:
            time.sleep(0.5)
    last = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:])
    raise RuntimeError(f"{name} did not get ready: {shlex.join(map(str, process.args))}\n{last}")  # type: ignore[arg-type]
