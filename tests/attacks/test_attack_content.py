"""What a request holds is measured before anything is made of it."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from attacks.content_attacks import post
from support.server import Served


def peaks(served: Served) -> dict[int, float]:
    """Most MiB that the server and its engine have had, by process. Workers have a limit of their own."""
    processes = [psutil.Process(served.process.pid), engine_of(served)]
    statuses = {one.pid: Path(f"/proc/{one.pid}/status").read_text(encoding="utf-8") for one in processes}
    return {pid: int(text.partition("VmHWM:")[2].split()[0]) / 1024 for pid, text in statuses.items()}


def engine_of(served: Served) -> psutil.Process:
    children = psutil.Process(served.process.pid).children()
    return next(one for one in children if "stridelm.server.engine_process" in one.cmdline())


@pytest.mark.parametrize("name", ["many samples of a long prompt", "many samples of a long prompt, SGLang's"])
def test_a_prompt_is_measured_once(stormed: Served, name: str) -> None:
    """Before it is multiplied by its samples: what is too long is refused, and costs what its body does."""
    before = peaks(stormed)
    answer = post(stormed.url, name)
    assert answer.status_code == 400 and "max_model_len" in answer.json()["error"]["message"], answer.text
    after = peaks(stormed)
    assert all(after[pid] - before[pid] < 150 for pid in before)
