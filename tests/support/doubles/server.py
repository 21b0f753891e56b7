"""A real server in a process of its own, for tests over HTTP."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any

import httpx2 as httpx  # openai's own
import openai
import psutil

from stridelm import LLM, SamplingParams
from stridelm.llm import CompletionOutput
from support.doubles.processes import children_of

CHATML = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% for call in message.tool_calls or [] %}"
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    '{% endfor %}{{ "\n" }}{% endfor %}'
    '{% if tools %}tools: {{ tools | map(attribute="function.name") | join(" ") }}\n{% endif %}'
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Calls stand in it as in Hermes' messages."""
START_S = 90
PROMPT = "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n"


@dataclass
class Served:
    """A running server, its address, and its log file."""

    process: subprocess.Popen[str]
    url: str
    line: str
    """What it printed when it was ready."""
    log: Path

    def http(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, **options)

    def openai(self, key: str = "none", address: str | None = None) -> Any:
        """An OpenAI client. Typed as Any, since by its types nearly every field of a response may be None. address: it
        connects from there."""
        http = None if address is None else httpx.Client(transport=httpx.HTTPTransport(local_address=address))
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60, http_client=http)

    @property
    def engine(self) -> psutil.Process:
        """The engine's process."""
        [engine] = engines_of(self.process.pid)
        return engine

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        """However fast the machine is, nothing is computed meanwhile."""
        engine = self.engine
        engine.suspend()
        try:
            yield
        finally:
            engine.resume()

    def stop(self) -> int:
        """Stop it as an operator would. Returns the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


@contextmanager
def serving(
    tmp_path: Path, *options: str, environment: dict[str, str] | None = None, template: bool = True
) -> Iterator[Served]:
    """A server of the built-in model at a free port, checking its ledger at every step; with the tests' chat template,
    or with the model's. Unless options say more of it, drafts have one depth: a chosen one would depend on how busy the
    machine is; and drafting is not tried before it is ready, since the built-in heads are known to fit."""
    file, log = tmp_path / "chat.jinja", tmp_path / "server.log"
    file.write_text(CHATML, encoding="utf-8")
    command = [sys.executable, "-m", "stridelm.cli.main", "serve", "--port", "0"]
    command += ["--chat-template", str(file)] if template else []
    command += ["--strict", "--max-num-seqs", "8", "--max-model-len", "512", *options]
    if not any(option.startswith(("--drafter", "--depth")) for option in options):
        command += ["--depth", "3"]
    if "--check-drafting" not in options:
        command += ["--no-check-drafting"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", **(environment or {})}
    with log.open("w", encoding="utf-8") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=env)
        try:
            line = _ready_line(process, log)
            yield Served(process, re.findall(r"http://\S+", line)[0], line, log)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def engines_of(pid: int) -> list[psutil.Process]:
    """Engine processes that this process has started and that run."""
    return children_of(pid, "stridelm.server.engine_process")


def _ready_line(process: subprocess.Popen[str], log: Path) -> str:
    stdout: IO[str] | None = process.stdout
    assert stdout is not None
    line = stdout.readline()  # returns if the server dies
    assert "serving" in line, f"the server did not start:\n{log.read_text(encoding='utf-8')}"
    return line


def settle(served: Served, seconds: float = 10.0) -> dict[str, float]:
    """The engine's gauges once nothing runs any more; fails if that takes too long."""
    until = time.monotonic() + seconds
    while True:
        figures = gauges(served)
        if figures["stride_requests_running"] == figures["stride_requests_waiting"] == 0:
            return figures
        assert time.monotonic() < until, figures
        time.sleep(0.05)


def until(what: str, true: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait until the condition is true; fails with `what` if that takes too long."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, what
        time.sleep(0.05)


def working(served: Served) -> int:
    """The number of live workers, not counting the processes that fork them."""
    return sum(len(children_of(nursery.pid)) for nursery in children_of(served.process.pid, "nursery"))


def gauges(served: Served) -> dict[str, float]:
    """Every sample of /metrics by name; those with several labels are summed."""
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[str, float] = {}
    with served.http() as client:
        text = client.get("/metrics").text
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


@cache
def llm() -> LLM:
    """The offline API, in the test's own process."""
    return LLM(max_model_len=512, depth=3)


def offline(prompts: Sequence[str], **params: Any) -> list[CompletionOutput]:
    """What the offline API returns for the same prompts."""
    return [out.outputs[0] for out in llm().generate(list(prompts), SamplingParams(**params))]
