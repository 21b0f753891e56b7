"""A case as plain data: a checkpoint, an engine's options, requests and faults. Its `repr` is Python that makes it
again, so that a failure can be kept as a test."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

Ids = tuple[int, ...]
EXACT_ON_GPU = {"deterministic": True, "attention": "triton"}
IN_EIGHT_BITS = ("quantization", "kv_cache_dtype")
"""Options by which weights or KV are in eight bits."""


PLAIN_BLOCKS = ("llama", "mistral", "qwen2", "qwen3")
"""Families of dense models whose layers are alike: the oracle computes them in eight bits, too, and their widths may be
any."""


class Shown:
    """A repr without the fields that have their default."""

    def __repr__(self) -> str:
        assert hasattr(self, "__dataclass_fields__")
        given = []
        for f in fields(self):  # type: ignore[arg-type]  # its subclasses are dataclasses
            value = getattr(self, f.name)
            default = f.default_factory() if callable(f.default_factory) else f.default
            if value != default:
                given.append(f"{f.name}={value!r}")
        return f"{type(self).__name__}({', '.join(given)})"


@dataclass(frozen=True, repr=False)
class Checkpoint(Shown):
    """What fuzz.checkpoints writes to disk."""

    family: str = "qwen3"
    variant: str = "untied"
    """Name of a set of config changes (tests/support/oracles/models.py, and the fuzzer's own)."""
    vocab: int = 64
    scale: float = 8.0
    """Of the weights: the larger, the more peaked are the model's distributions."""
    cyclic: bool = False
    """The next token is nearly determined by the last one, and heads know the rule: nearly all drafts are accepted."""
    modules: str = ""
    """Form and number of MTP modules inside the checkpoint, such as "deepseek1"."""
    heads: tuple[str, ...] = ()
    """Drafters' weights in directories of their own: modules, eagle1, eagle3, speculators, assistant, medusa,
    model."""
    speaks: bool = False
    """It has a byte-level tokenizer of at most 290 ids, and a vocabulary of 300 or more."""
    seed: int = 0
    widths: Ids = ()
    """Hidden width, heads, KV heads, a head's width and the MLP's; empty: those of all small checkpoints."""


def has_assistant(family: str, variant: str) -> bool:
    """Whether such a model has a layer with full attention and keys and values by head, which assistants read."""
    slides = variant in ("window", "all-layers-slide") or (family == "mistral" and not variant)
    return family not in ("deepseek_v3", "kimi_k2") and not slides


@dataclass(frozen=True, repr=False)
class Ask(Shown):
    """A request."""

    prompt: Ids
    params: dict[str, Any] = field(default_factory=dict)
    """SamplingParams except `speculation`; if it samples, a seed is always set."""
    speculation: dict[str, Any] = field(default_factory=dict)
    arrival: int = 0
    """Step before which it is added."""
    abort: int | None = None
    """Step before which it is aborted."""
    sample: int = 0

    @property
    def rule(self) -> str:
        return str(self.speculation.get("acceptance", "exact")).partition(":")[0]

    @property
    def drafter(self) -> str:
        return str(self.speculation.get("drafter", "none"))


@dataclass(frozen=True, repr=False)
class BadRequest(Shown):
    """A request that must be refused with a ValueError, and without side effects, while others run."""

    at: int
    prompt: tuple[Any, ...]
    params: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, repr=False)
class ClosedStream(Shown):
    """A stream that its reader closes after this many pieces."""

    at: int
    ask: Ask
    after: int = 1


@dataclass(frozen=True, repr=False)
class Raises(Shown):
    """A stage of the engine raises whenever it works for a request that has this many tokens."""

    stage: str
    request: int
    tokens: int


Fault = BadRequest | ClosedStream | Raises
"""Misuse by callers, sudden departures, and exceptions inside the engine."""


@dataclass(frozen=True, repr=False)
class Case(Shown):
    checkpoint: Checkpoint = Checkpoint()
    engine: dict[str, Any] = field(default_factory=dict)
    """EngineConfig's fields. On a CPU `attention="bounds"` is a backend of the tests with which the host reads one step
    late."""
    requests: tuple[Ask, ...] = ()
    faults: tuple[Fault, ...] = ()
    traced: bool = True
    """Whether every step is recorded, from which lossy rules are replayed. A traced engine has no lag."""
    policy: int | None = None
    """Seed of a policy that draws chosen depths at random; None: the engine's own policy, with made-up times."""

    @property
    def dtype(self) -> str:
        return str(self.engine.get("dtype", "float32"))

    @property
    def device(self) -> str:
        return str(self.engine.get("device", "cpu"))

    @property
    def chooses(self) -> bool:
        """Whether any request's depth is chosen."""
        asked = any(ask.speculation.get("depth") == "auto" for ask in self.requests)
        return asked or self.engine.get("drafter") == "auto"

    @property
    def in_eight_bits(self) -> frozenset[str]:
        """The options by which weights or KV are in eight bits."""
        return frozenset(option for option in IN_EIGHT_BITS if self.engine.get(option) == "fp8")

    @property
    def precision(self) -> str:
        """How precisely the oracle can compare, a key of its margins if it can at all."""
        if self.in_eight_bits and not (self.dtype == "float64" and self.checkpoint.family in PLAIN_BLOCKS):
            return "eight bits"
        return self.dtype if self.device == "cpu" else f"{self.dtype} on a GPU"

    def on(self, device: str) -> Case:
        """The same case on another device, with deterministic settings."""
        return self if device == "cpu" else replace(self, engine={**self.engine, "device": device, **EXACT_ON_GPU})
