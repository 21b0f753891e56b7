"""How an engine is set up: one flat frozen dataclass. The command line is generated from its fields, and
`LLM(**kwargs)` takes the same names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Integral
from os import PathLike
from typing import Any, Literal

from stridelm.options import Given, takes_options
from stridelm.params import Speculation
from stridelm.values import check_flag, option, settle_number, token_ids

DEFAULT_CAPTURE_MEMORY = 2.0
"""GiB."""


@takes_options
@dataclass(frozen=True)
class EngineConfig:
    """Raises ValueError, on construction, for a value that could never work."""

    model: str | None = option(None, "checkpoint directory; the built-in model if not given")
    drafter: str = option(
        "auto",
        "drafter: none, ngram, suffix, mask, mtp, eagle, medusa, model, hybrid, or auto for the best available",
    )
    depth: int | Literal["auto"] | None = option(
        "auto",
        "drafted rows in a chain (k - 1 for mask-token decoding); auto: at most the drafter's own default, chosen at "
        "every step by what was accepted and how long steps took, where depths can be chosen; None: always the "
        "drafter's own default",
    )
    acceptance: str = option(
        "exact",
        "acceptance rule: exact (same output as plain decoding), rejection or block (lossless: same distribution), "
        "typical, relaxed or trust (lossy), or, to measure speed only, synthetic:N or synthetic-trust:N (simulated: N "
        "tokens per step on average, whatever the model predicts)",
    )
    options: Given = field(default=(), kw_only=True)
    """Options registered by drafters and rules: each is also a keyword argument and an attribute."""
    mask_token_id: int | Sequence[int] | None = option(None, "mask token of the checkpoint, or one for each offset")
    drafter_model: str | Sequence[str] | None = option(
        None, "directory with a drafter's own weights (a head or a small model), or several; the drafter is recognised"
    )
    generation_config: str = option(
        "auto",
        "default sampling parameters: auto (the checkpoint's generation_config.json), vllm (neutral ones), or a "
        "directory with such a file, whose max_new_tokens is also a limit",
    )
    load_format: str = option("auto", "auto: the checkpoint's safetensors; dummy: random weights, to measure speed")
    quantization: str | None = option(
        None,
        "fp8: store a dense checkpoint's matrices in 8 bits while it loads, with scales for blocks of 128 x 128; "
        "quantised checkpoints are recognised without it",
    )
    dtype: str = option("auto", "auto, bfloat16, float16, float32 or float64")
    kv_cache_dtype: str = option(
        "auto",
        "how KV is stored: auto (in the model's dtype) or fp8 (8 bits, e4m3: half the memory of bfloat16, with the "
        "checkpoint's k_scale and v_scale where it has them)",
    )
    device: str = option("auto", "auto, cpu, cuda or cuda:N")
    attention: str = option(
        "auto",
        "attention backend: auto for the best on the device, host (CPU), triton (GPU), flashinfer (GPU, if "
        "installed), or reference",
    )
    deterministic: bool | None = option(
        None, "make outputs bitwise independent of the batch; on by default on a CPU, off on a GPU"
    )
    enforce_eager: bool = option(False, "on a GPU: launch kernels one by one, capture no steps")
    capture: str = option(
        "startup", "on a GPU, when steps are captured: startup (before the first request) or lazy (when first needed)"
    )
    capture_memory: float | None = option(
        None, "on a GPU: GiB that captured steps may take; once it is used up, further steps run eagerly; by default 2"
    )
    page_size: int = option(16, "tokens in a page of KV")
    num_pages: int | None = option(None, "pages of KV; by default as many as kv_memory_fraction allows")
    kv_memory_fraction: float | None = option(
        None,
        "share of free memory that KV may take; by default 0.25 on a CPU, and on a GPU 0.9, or all but 3 GiB where "
        "that is more",
    )
    max_num_seqs: int = option(32, "maximum number of requests running at once")
    max_num_batched_tokens: int = option(1024, "maximum rows of one step: prompt, decode and draft rows together")
    itl_target_ms: float = option(
        40.0,
        "milliseconds between tokens to stay within while prompts arrive: beside requests that decode, prompts get as "
        "many rows of a step as fit, or as double the step's time; up to twice as long if more prompts wait than can "
        "be read within 0.2 s; 0 for no limit",
    )
    max_model_len: int | None = option(None, "maximum context length, prompt and output; the model's own by default")
    enable_prefix_caching: bool = option(True, "reuse the KV of shared prefixes")
    per_request_spec_decode_metrics: Literal["none", "summary", "detailed"] = option(
        "none",
        "what answers and RequestOutput.metrics say of a request's drafts (vLLM's name): none; summary, counts; or "
        "detailed, also how many tokens every step drafted and accepted",
    )
    check_drafting: bool = option(
        True,
        "before the engine is ready, try its drafting heads on a few built-in prompts, and warn if nothing is accepted",
    )
    strict: bool = option(False, "check that the ledger balances at every step")
    check_pages: bool = option(
        False,
        "check page indices before they are used, and name the request of an invalid one; slow, captures no steps",
    )
    skip_tokenizer_init: bool = option(False, "run on token ids alone; text and stop strings are refused")

    def __post_init__(self) -> None:
        for name in ("page_size", "max_num_seqs", "max_num_batched_tokens"):
            settle_number(self, name, 1, 2**31 - 1, whole=True)
        # A context holds at least a token of prompt and one of output.
        for name, minimum in (("num_pages", 1), ("max_model_len", 2)):
            settle_number(self, name, minimum, 2**31 - 1, whole=True, optional=True)
        if isinstance(self.generation_config, PathLike):
            object.__setattr__(self, "generation_config", str(self.generation_config))
        if not isinstance(self.generation_config, str) or not self.generation_config:
            raise ValueError(f"generation_config is auto, vllm or a directory; got {self.generation_config!r}")
        if self.load_format not in ("auto", "dummy"):
            raise ValueError(f"unknown load_format {self.load_format!r}; choose auto or dummy")
        if self.quantization not in (None, "fp8"):
            raise ValueError(f"unknown quantization {self.quantization!r}; choose fp8, or leave it out")
        if self.kv_cache_dtype == "fp8_e4m3":
            object.__setattr__(self, "kv_cache_dtype", "fp8")
        if self.kv_cache_dtype not in ("auto", "fp8"):
            raise ValueError(f"unknown kv_cache_dtype {self.kv_cache_dtype!r}; choose auto or fp8 (e4m3)")
        for name in (
            "enable_prefix_caching",
            "check_drafting",
            "strict",
            "check_pages",
            "skip_tokenizer_init",
            "enforce_eager",
        ):
            check_flag(name, getattr(self, name))
        if self.capture not in ("startup", "lazy"):
            raise ValueError(f"unknown capture {self.capture!r}; choose startup or lazy")
        level = self.per_request_spec_decode_metrics
        if level not in ("none", "summary", "detailed"):
            raise ValueError(f"unknown per_request_spec_decode_metrics {level!r}; choose none, summary or detailed")
        settle_number(self, "itl_target_ms", 0.0, 1e6)
        settle_number(self, "capture_memory", 0.0, 1024.0, open_low=True, optional=True)
        if not self.may_capture:
            self.refuse_capture_options("with enforce_eager or check_pages nothing is captured")
        if self.deterministic is not None:
            check_flag("deterministic", self.deterministic)
        if self.kv_memory_fraction is not None:
            if self.num_pages is not None:
                raise ValueError(
                    "num_pages fixes the pool, so kv_memory_fraction would have no effect; give one of them"
                )
            settle_number(self, "kv_memory_fraction", 0.0, 1.0, open_low=True)
        if not all(isinstance(path, str | PathLike) for path in self.drafter_models):
            raise ValueError(f"drafter_model takes a directory, or a sequence of them; got {self.drafter_model!r}")
        if self.mask_token_id is not None:
            object.__setattr__(self, "mask_token_id", _masks(self.mask_token_id))
        _ = self.speculation  # raises if the fields do not make a valid one

    def refuse_capture_options(self, why: str) -> None:
        """Raise ValueError if a capture option is set although nothing will be captured."""
        is_set = {"capture": self.capture != "startup", "capture_memory": self.capture_memory is not None}
        unused = [name for name, value in is_set.items() if value]
        if unused:
            raise ValueError(f"{why}, so {' and '.join(unused)} would have no effect; leave it out")

    @property
    def drafter_models(self) -> tuple[str, ...]:
        """`drafter_model` as a sequence."""
        value: Any = self.drafter_model
        return () if value is None else tuple(value) if isinstance(value, list | tuple) else (value,)

    @property
    def may_capture(self) -> bool:
        """Whether steps may be captured, if there is a GPU."""
        return not (self.enforce_eager or self.check_pages)

    @property
    def kv_in_eight_bits(self) -> bool:
        return self.kv_cache_dtype == "fp8"

    @property
    def spec_decode_metrics(self) -> str | None:
        """`per_request_spec_decode_metrics`; None for none."""
        level = self.per_request_spec_decode_metrics
        return None if level == "none" else level

    @property
    def speculation(self) -> Speculation:
        """The default for requests that set none of their own."""
        depth = None if self.depth == "auto" else self.depth
        return Speculation(self.drafter, depth, self.acceptance, **dict(self.options))


def _masks(value: int | Sequence[int]) -> tuple[int, ...]:
    """A single mask token becomes a tuple of one."""
    return tuple(token_ids("mask_token_id", [value] if isinstance(value, Integral) else value))
