"""An H100 that is not there, for code that asks what it is and launches nothing: torch and Triton are told of it, and
Triton compiles for it, with the assembler that it ships.

Run as a process of its own, since it changes both for good: rehearses a start, and prints as JSON how many kernels it
launched, how many of them were then compiled, and how many tensors without memory are left.

    python -m support.doubles.absent_gpu CONFIG GUARD COMPILED

CONFIG: fields of EngineConfig as JSON. GUARD: a library made by `compile_guard`. COMPILED: how many kernels to compile.
"""

from __future__ import annotations

import ctypes
import gc
import json
import re
import subprocess
import sys
import tempfile
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.cpp_extension import include_paths, library_paths
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from stridelm.config import EngineConfig
from stridelm.engine import start
from stridelm.kernels import compilations

GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
static c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> guard;
static c10::impl::DeviceGuardImplRegistrar registrar(c10::DeviceType::CUDA, &guard);
"""
"""What a build of torch without CUDA lacks to slice a tensor that claims to be on a GPU."""

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


class Utils:
    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 227 << 10}


class Driver:
    """Triton's, as far as it is needed to compile."""

    utils = Utils()

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def stack_bytes(cubin: bytes) -> int:
    """Bytes of a thread's stack, which is where registers are spilled to."""
    return _most(cubin, "STACK")


def registers(cubin: bytes) -> int:
    """Of a thread."""
    return _most(cubin, "REG")


def _most(cubin: bytes, what: str) -> int:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        shown = subprocess.run([CUOBJDUMP, "-res-usage", file.name], check=True, capture_output=True, text=True).stdout
    return max(int(size) for size in re.findall(rf"{what}:(\d+)", shown))


def compile_guard(directory: Path) -> Path:
    source, library = directory / "guard.cpp", directory / "guard.so"
    source.write_text(GUARD)
    folders = [*(f"-I{path}" for path in include_paths()), *(f"-L{path}" for path in library_paths())]
    subprocess.run(["g++", "-std=c++20", "-shared", "-fPIC", source, *folders, "-lc10", "-o", library], check=True)
    return library


def install(guard: str) -> None:
    if torch.version.cuda is None:
        ctypes.CDLL(guard)
    driver.set_active(Driver())
    answers: dict[str, Any] = {
        "device_count": 1,
        "get_device_capability": (9, 0),
        "get_device_properties": SimpleNamespace(multi_processor_count=132),
        "mem_get_info": (78 << 30, 80 << 30),
        "memory_allocated": 0,
        "max_memory_allocated": 0,
        "is_current_stream_capturing": False,
        "graph_pool_handle": (0, 0),
        "set_device": None,
        "empty_cache": None,
        "reset_peak_memory_stats": None,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, answer=answer: answer)


class Few(start._Workers):
    """Compiles only the first kernels."""

    left = 0
    launched = 0

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        Few.launched += 1
        if Few.left:
            Few.left -= 1
            return super().submit(fn, *args, **kwargs)
        dropped: Future[Any] = Future()
        dropped.cancel()
        dropped.set_running_or_notify_cancel()
        return dropped


def main() -> None:
    install(sys.argv[2])
    Few.left = int(sys.argv[3])
    start._Workers = Few  # type: ignore[misc]
    start.compile_ahead(EngineConfig(**json.loads(sys.argv[1])))
    gc.collect()
    left = sum(isinstance(each, FakeTensor) for each in gc.get_objects())
    print(json.dumps({"launched": Few.launched, "compiled": compilations.count(), "left": left}))


if __name__ == "__main__":
    main()
