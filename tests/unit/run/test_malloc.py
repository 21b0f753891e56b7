"""Memory that is no longer used goes back to the system."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

HOLES = """
import psutil
from stridelm.run.malloc import give_back_memory

held = [b"x" * 100_000 for _ in range(4_000)]  # each too small for a mapping of its own: all lie in the heap
last = held.pop()
del held  # what lies at the end keeps the heap from shrinking
before = psutil.Process().memory_info().rss
give_back_memory()
print(before - psutil.Process().memory_info().rss)
"""


glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's malloc is asked to")


@glibc
def test_holes_in_the_heap_are_given_back() -> None:
    done = subprocess.run([sys.executable, "-c", HOLES], check=True, capture_output=True, text=True)
    assert int(done.stdout) > 200e6


DROPPED = """
import psutil, torch
torch.set_num_threads(1)
from stridelm import LLM
held = []
for _ in range(5):
    llm = LLM(device="cpu", dtype="float32", drafter="none", skip_tokenizer_init=True, itl_target_ms=0)
    kv = sum(tensor.nbytes for tensor in llm.engine.loaded.pool.tensors)
    held.append(psutil.Process().memory_info().rss)
    del llm
print(kv, *held)
"""


@glibc
def test_an_engine_that_is_dropped_leaves_its_memory_to_the_next() -> None:
    """A process that has had several has no more than with one."""
    done = subprocess.run([sys.executable, "-c", DROPPED], check=True, capture_output=True, text=True)
    kv, first, *later = map(int, done.stdout.split())
    assert max(later) - first < kv / 2
