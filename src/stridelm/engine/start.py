"""Starts an engine. On a GPU, the kernels that it lacks are compiled first, on all cores; otherwise each would be
compiled when it is first launched, one after another."""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import torch

from stridelm.builtin import builtin_path
from stridelm.cache.pool import free_memory
from stridelm.compiled import naming_caches
from stridelm.config import EngineConfig
from stridelm.engine.check_drafting import check_drafting
from stridelm.engine.engine import Engine
from stridelm.engine.load import resolve_device
from stridelm.kernels import compilations
from stridelm.kernels.ahead import compiling
from stridelm.kernels.ready_mark import ReadyMark
from stridelm.progress import bar, size

logger = logging.getLogger(__name__)

T = TypeVar("T")


@naming_caches()
def start(config: EngineConfig) -> Engine:
    """An engine, ready for requests, whose drafting has been tried. Raises ValueError for settings that do not fit
    together, and if the disk has no place for the kernels that are compiled."""
    mark = _mark(config)
    if mark is not None and not mark.is_set:
        compile_ahead(config)
    engine = Engine(config)
    if config.check_drafting:
        check_drafting(engine)
    if mark is not None:
        try:
            mark.set()
        except OSError as error:
            logger.debug("the kernels' cache cannot be written: %s", error)
    if engine.loaded.device.type == "cuda":
        _give_back(engine.loaded.device)
    return engine


def _give_back(device: torch.device) -> None:
    """Return memory that only the start needed: steps of every size have run, and PyTorch has kept what they took."""
    gc.collect()
    free = free_memory(device)
    held, used = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
    logger.info("ready: %s free on %s; PyTorch holds %s, %s of them in use", size(free), device, size(held), size(used))


def compile_ahead(config: EngineConfig) -> None:
    """Compile what this engine's start will launch, as far as it is missing. If that fails, the start compiles it."""
    from stridelm.engine.rehearsal import rehearse  # imports torch's tools for tracing

    compilations.watch()
    began = time.perf_counter()
    workers = _Workers(len(os.sched_getaffinity(0)))
    try:
        with compiling(workers):
            try:
                rehearse(shapes_alone(config))
                workers.wait()
            except ValueError as error:  # the start itself will raise it
                logger.debug("no kernels are compiled ahead: %s", error)
            except KeyboardInterrupt:
                workers.shutdown(wait=False, cancel_futures=True)
                raise
        logger.info("%d kernels compiled ahead in %.1f s", compilations.count(), time.perf_counter() - began)
    except Exception:
        logger.warning("kernels could not be compiled ahead; they are compiled one after another", exc_info=True)
    finally:
        workers.shutdown(cancel_futures=True)


def shapes_alone(config: EngineConfig) -> EngineConfig:
    """The same engine with random weights and without text: it launches the same kernels."""
    return replace(config, load_format="dummy", skip_tokenizer_init=True, strict=False, check_drafting=False)


class _Workers(ThreadPoolExecutor):
    """Threads are enough: Triton compiles nine tenths of the time without the interpreter's lock."""

    def __init__(self, count: int) -> None:
        super().__init__(count, thread_name_prefix="compile")
        self._submitted: list[Future[Any]] = []

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future = super().submit(fn, *args, **kwargs)
        self._submitted.append(future)
        return future

    def wait(self) -> None:
        """Wait for all that was submitted, with a bar for what is not done yet."""
        missing = [future for future in self._submitted if not future.done()]
        with bar("compiling kernels", len(missing), "kernels") as advance:
            for _ in as_completed(missing):
                advance(1)


def _mark(config: EngineConfig) -> ReadyMark | None:
    """Of an engine like this one; None if nothing is compiled at its start, or nothing could be kept."""
    if config.capture != "startup" or not config.may_capture or config.attention not in ("auto", "triton"):
        return None
    device = resolve_device(config.device)
    if device.type != "cuda" or not find_spec("triton"):
        return None
    model = Path(config.model) if config.model is not None else builtin_path()
    configs = [folder / "config.json" for folder in (model, *map(Path, config.drafter_models))]
    texts = [file.read_text(encoding="utf-8") for file in configs if file.is_file()]
    try:
        return ReadyMark("\n".join([repr(shapes_alone(config)), *texts]), device)
    except OSError as error:
        logger.debug("the kernels' cache cannot be written: %s", error)
        return None
