"""What a request holds is measured before anything is made of it."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from attacks.content_attacks import post
from support.server import Served

MIB = 1 << 20


def peak_mib(pid: int) -> float:
    """Most memory that a process and its children have had at once, each."""
    processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    statuses = [Path(f"/proc/{one.pid}/status").read_text(encoding="utf-8") for one in processes]
    return sum(int(text.partition("VmHWM:")[2].split()[0]) for text in statuses) / 1024


@pytest.mark.parametrize("name", ["many samples of a long prompt", "many samples of a long prompt, SGLang's"])
def test_a_prompt_is_measured_once(stormed: Served, name: str) -> None:
    """Before it is multiplied by its samples: what is too long is refused, and costs what its body does."""
    before = peak_mib(stormed.process.pid)
    answer = post(stormed.url, name)
    assert answer.status_code == 400 and "max_model_len" in answer.json()["error"]["message"], answer.text
    assert peak_mib(stormed.process.pid) - before < 150
