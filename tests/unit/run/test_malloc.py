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


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's malloc is asked to")
def test_holes_in_the_heap_are_given_back() -> None:
    done = subprocess.run([sys.executable, "-c", HOLES], check=True, capture_output=True, text=True)
    assert int(done.stdout) > 200e6
