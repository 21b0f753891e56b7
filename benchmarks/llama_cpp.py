"""llama.cpp through its C interface, from a prebuilt library: greedy decoding of several streams at once.

Of the structs that it takes by value, only the first fields are used, whose places are the same in all versions of the
last years; the rest is passed on as its own functions for defaults return it. Larger structs than its own may be
passed, since it reads and writes only what it knows.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

BATCH = 2048
"""Rows that one call takes, as by its default."""


class Params(ctypes.Structure):
    """llama_model_params, or llama_context_params, whose first fields these are."""

    _fields_ = (
        ("n_ctx", ctypes.c_uint32),
        ("n_batch", ctypes.c_uint32),
        ("n_ubatch", ctypes.c_uint32),
        ("n_seq_max", ctypes.c_uint32),
        ("rest", ctypes.c_uint64 * 128),
    )


class Batch(ctypes.Structure):
    """llama_batch."""

    _fields_ = (
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.c_void_p),
        ("embd", ctypes.c_void_p),
        ("pos", ctypes.c_void_p),
        ("n_seq_id", ctypes.c_void_p),
        ("seq_id", ctypes.c_void_p),
        ("logits", ctypes.c_void_p),
    )


class ThreadpoolParams(ctypes.Structure):
    """ggml_threadpool_params."""

    _fields_ = (("rest", ctypes.c_uint64 * 256),)


LOG = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
MESSAGES: deque[bytes] = deque(maxlen=20)
"""What it logged last, for error messages."""
KEEP = LOG(lambda level, text, data: MESSAGES.append(text))
"""Lives as long as the library, which calls it."""


class LlamaCpp:
    """A model in llama.cpp, with a context for some streams.

    Raises ValueError if there is no library in the folder or below it, and RuntimeError if it cannot load the model.
    """

    def __init__(self, folder: Path, model: Path, streams: int, threads: int, length: int) -> None:
        """length: tokens of each stream, prompt and output together."""
        self._ggml, self._llama = _open(folder)
        self.version = _version(self._llama)
        self._llama.llama_backend_init()
        self._model = self._llama.llama_model_load_from_file(
            str(model).encode(), self._llama.llama_model_default_params()
        )
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {model}:\n{_said()}")
        self.vocab: int = self._llama.llama_vocab_n_tokens(self._llama.llama_model_get_vocab(self._model))
        params = self._llama.llama_context_default_params()
        # Each stream has its own part of the context, which is padded to a multiple of 256.
        params.n_ctx, params.n_batch, params.n_seq_max = streams * (-(-length // 256) * 256), BATCH, streams
        self._context = self._llama.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp makes no context:\n{_said()}")
        # Threads that live as long as the context: by itself it starts new ones for every step.
        wanted = self._ggml.ggml_threadpool_params_default(threads)
        self._pool = self._threads("ggml_threadpool_new", ctypes.c_void_p)(ctypes.addressof(wanted))
        self._llama.llama_set_n_threads(self._context, threads, threads)
        self._llama.llama_attach_threadpool(self._context, self._pool, self._pool)

    def close(self) -> None:
        """Free everything. The context goes first: it still uses its threads when others are attached."""
        self._llama.llama_free(self._context)
        self._threads("ggml_threadpool_free", None)(self._pool)
        self._llama.llama_model_free(self._model)

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
        """So many tokens after each prompt, greedily, all prompts at once. Not more prompts than streams."""
        self._llama.llama_memory_clear(self._llama.llama_get_memory(self._context), True)
        outputs: list[list[int]] = []
        for stream, prompt in enumerate(prompts):
            outputs.append([int(self._read(stream, prompt).argmax())])
        for step in range(1, tokens):
            rows = [
                (output[-1], len(prompt) + step - 1, stream)
                for stream, (prompt, output) in enumerate(zip(prompts, outputs))
            ]
            self._decode(rows, range(len(rows)))
            for stream, output in enumerate(outputs):
                output.append(int(self._logits(stream).argmax()))
        return outputs

    def logits_after(self, ids: Sequence[int]) -> np.ndarray:
        """Logits of the token after these: a float32 array of the vocabulary's size."""
        self._llama.llama_memory_clear(self._llama.llama_get_memory(self._context), True)
        return self._read(0, ids).copy()

    def _threads(self, name: str, result: Any) -> Any:
        """A function of the library that computes on this CPU, which is one of many in the folder."""
        cpu = self._ggml.ggml_backend_reg_by_name(b"CPU")
        place = self._ggml.ggml_backend_reg_get_proc_address(cpu, name.encode())
        return ctypes.CFUNCTYPE(result, ctypes.c_void_p)(place)

    def _read(self, stream: int, ids: Sequence[int]) -> np.ndarray:
        """Logits after a prompt, until the next call."""
        for first in range(0, len(ids), BATCH):
            part = ids[first : first + BATCH]
            rows = [(token, first + i, stream) for i, token in enumerate(part)]
            self._decode(rows, [len(rows) - 1])
        return self._logits(len(rows) - 1)

    def _decode(self, rows: Sequence[tuple[int, int, int]], wanted: Sequence[int]) -> None:
        """rows: (token, position, stream) of each. wanted: those whose logits are computed."""
        token, position, stream = np.array(rows, dtype=np.int32).T.copy()
        count = np.ones(len(rows), dtype=np.int32)
        logits = np.zeros(len(rows), dtype=np.int8)
        logits[list(wanted)] = 1
        streams = stream.ctypes.data + stream.itemsize * np.arange(len(rows), dtype=np.uint64)  # a pointer for each
        arrays = [each.ctypes.data for each in (position, count, streams, logits)]
        status = self._llama.llama_decode(self._context, Batch(len(rows), token.ctypes.data, None, *arrays))
        if status:
            raise RuntimeError(f"llama.cpp cannot decode {len(rows)} rows (status {status}):\n{_said()}")

    def _logits(self, row: int) -> np.ndarray:
        found: np.ndarray = np.ctypeslib.as_array(
            self._llama.llama_get_logits_ith(self._context, row), shape=(self.vocab,)
        )
        return found


def _open(folder: Path) -> tuple[Any, Any]:
    """(ggml, llama), with the computing libraries beside them loaded."""
    found = sorted(folder.rglob("libllama.*so*"))
    if not found:
        raise ValueError(f"there is no libllama.so in {folder} or below it; {REMEDY}")
    place = found[0].parent
    base, ggml = sorted(place.glob("libggml-base*.so*")), sorted(place.glob("libggml.*so*"))
    if not base or not ggml:
        raise ValueError(f"there is a {found[0].name} in {place}, but no libggml.so and libggml-base.so; {REMEDY}")
    ctypes.CDLL(str(base[0]), mode=ctypes.RTLD_GLOBAL)
    loader = ctypes.CDLL(str(ggml[0]), mode=ctypes.RTLD_GLOBAL)
    llama = ctypes.CDLL(str(found[0]))
    everything = ctypes.CDLL(None)  # what is global by now: a function may be in either
    llama.llama_log_set.argtypes = [LOG, ctypes.c_void_p]
    llama.llama_log_set(KEEP, None)
    loader.ggml_backend_load_all_from_path.argtypes = [ctypes.c_char_p]
    loader.ggml_backend_load_all_from_path(str(place).encode())
    _declare(everything, llama)
    return everything, llama


REMEDY = (
    "get a prebuilt one by `npm pack @node-llama-cpp/linux-x64`, unpack it, and name its folder, "
    "or that of your own build, with --llama-cpp"
)


def _declare(ggml: Any, llama: Any) -> None:
    pointer, integer = ctypes.c_void_p, ctypes.c_int32
    for library, name, result, arguments in (
        (ggml, "ggml_threadpool_params_default", ThreadpoolParams, [ctypes.c_int]),
        (ggml, "ggml_backend_reg_by_name", pointer, [ctypes.c_char_p]),
        (ggml, "ggml_backend_reg_get_proc_address", pointer, [pointer, ctypes.c_char_p]),
        (llama, "llama_backend_init", None, []),
        (llama, "llama_model_default_params", Params, []),
        (llama, "llama_context_default_params", Params, []),
        (llama, "llama_model_load_from_file", pointer, [ctypes.c_char_p, Params]),
        (llama, "llama_model_get_vocab", pointer, [pointer]),
        (llama, "llama_vocab_n_tokens", integer, [pointer]),
        (llama, "llama_init_from_model", pointer, [pointer, Params]),
        (llama, "llama_get_memory", pointer, [pointer]),
        (llama, "llama_memory_clear", None, [pointer, ctypes.c_bool]),
        (llama, "llama_set_n_threads", None, [pointer, integer, integer]),
        (llama, "llama_attach_threadpool", None, [pointer, pointer, pointer]),
        (llama, "llama_decode", integer, [pointer, Batch]),
        (llama, "llama_get_logits_ith", ctypes.POINTER(ctypes.c_float), [pointer, integer]),
        (llama, "llama_free", None, [pointer]),
        (llama, "llama_model_free", None, [pointer]),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments


def _said() -> str:
    return b"".join(MESSAGES).decode(errors="replace")


def _version(llama: Any) -> str | None:
    """Older ones do not say."""
    if not hasattr(llama, "llama_version"):
        return None
    llama.llama_version.restype = ctypes.c_char_p
    found: str = llama.llama_version().decode()
    return found
