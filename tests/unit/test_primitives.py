"""oneDNN and torch keep a bounded number of compiled products, unless the user's environment sets it."""

from __future__ import annotations

import os
import subprocess
import sys

from stridelm.primitives import KEPT, settle_primitives

GROWTH = """
import random
import psutil, torch
from stridelm import LLM, SamplingParams
llm = LLM(max_model_len=512, max_num_seqs=8, dtype="bfloat16", check_drafting=False)
sizes = random.Random(0).sample(range(1, 500), 80)
def resident():
    return psutil.Process().memory_info().rss
def read(lengths):
    for n in lengths:
        llm.generate([[300 + (i * n) % 3000 for i in range(n)]], SamplingParams(max_tokens=1, speculation="off"))
    return resident()
first = read(sizes[:20])
print((read(sizes[20:]) - first) >> 20)
"""


def growth(**kept: str) -> int:
    """MiB that are permanently used by prompts of sixty more lengths."""
    environment = {name: value for name, value in os.environ.items() if name not in KEPT} | kept
    done = subprocess.run([sys.executable, "-c", GROWTH], env=environment, capture_output=True, text=True, check=True)
    return int(done.stdout)


def test_prompts_of_many_lengths_take_little_memory_for_good() -> None:
    """26 MiB instead of 111 were measured. A processor for which nothing is compiled uses nothing either way."""
    unbounded = growth(**dict.fromkeys(KEPT, "1024"))
    assert growth() < max(unbounded / 2, 20)


def test_what_the_user_says_holds() -> None:
    environment = {"LRU_CACHE_CAPACITY": "7"}
    settle_primitives(environment)
    assert environment == KEPT | {"LRU_CACHE_CAPACITY": "7"}
