"""All settings of training, as frozen dataclasses. The command line is generated from these fields, so each has its
own help text."""

from __future__ import annotations

from dataclasses import dataclass

from stridelm.values import option


@dataclass(frozen=True)
class ModelShape:
    """Shape of a new Qwen3-style model. The defaults make 13.6M parameters with a vocabulary of 4,096."""

    hidden: int = option(384, "width of the residual stream")
    layers: int = option(8, "number of blocks")
    heads: int = option(6, "query heads")
    kv_heads: int = option(2, "key/value heads")
    head_dim: int = option(64, "width of a head")
    mlp: int = option(960, "width of the gated MLP")
    context: int = option(2048, "longest context in tokens")
    rope_theta: float = option(10_000.0, "base of the rotary embedding")


@dataclass(frozen=True)
class DataSettings:
    """From text to tokens."""

    vocab_size: int = option(4096, "vocabulary of a new tokenizer, special tokens included")
    held_out: str = option("0.02", "validation packages (comma-separated), or the fraction of bytes to hold out")
    suffixes: str = option(".py", "suffixes of the files to read, comma-separated")
    near_duplicates: bool = option(True, "drop near-duplicate files (unused when data/ is already split)")


@dataclass(frozen=True)
class OptimSettings:
    """Muon for matrices, AdamW for embeddings and norms, one warm-up-stable-decay schedule for both."""

    muon_lr: float = option(0.02, "peak learning rate of matrices (Keller Jordan's scale)")
    adam_lr: float = option(3e-3, "peak learning rate of embeddings and norms")
    momentum: float = option(0.95, "Muon's momentum")
    muon_decay: float = option(0.1, "decoupled weight decay of matrices, times the learning rate")
    adam_decay: float = option(0.1, "decoupled weight decay of embeddings, times the learning rate")
    clip: float = option(1.0, "gradient norm above which gradients are scaled down (0: never)")
    warmup: float = option(0.02, "share of the run that warms up")
    decay: float = option(0.35, "share of the run, at its end, in which the rate falls to zero")


@dataclass(frozen=True)
class RunSettings:
    """How long and on what to train, and how the run is monitored and saved."""

    steps: int | None = option(None, "optimiser steps (give this or --minutes)")
    minutes: float | None = option(None, "wall time of training in minutes, compilation excluded")
    seed: int = option(0, "seed of weights, batch order and anchors")
    batch_tokens: int = option(131_072, "tokens per step")
    length: int = option(2048, "tokens per sequence")
    short_length: int = option(0, "sequence length in the first part of the run (0: always --length)")
    short_share: float = option(0.7, "share of the run that uses --short-length, if that is set")
    eval_steps: int = option(250, "steps between validations")
    eval_tokens: int = option(1_000_000, "validation tokens, the same ones every time")
    patience: int = option(8, "validations without improvement before decay begins early, and then before stopping")
    save_minutes: float = option(2.0, "minutes between checkpoints for --resume")
    log_steps: int = option(20, "steps between log records")
    log_seconds: float = option(10.0, "seconds between progress lines when the output is not a terminal")
    device: str = option("auto", "torch device; auto uses CUDA if available")
    compile: bool | None = option(None, "torch.compile the loss (default: on CUDA)")
    resume: bool = option(False, "resume from the state saved in --out")

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.minutes is None):
            raise ValueError("specify how long to train: give either --steps or --minutes")
        longest = max(self.length, self.short_length)
        if self.length < 1 or self.batch_tokens < longest:
            raise ValueError(f"--batch-tokens {self.batch_tokens} must hold at least one sequence of {longest} tokens")
        if self.eval_steps < 1 or self.log_steps < 1:
            raise ValueError("--eval-steps and --log-steps must be at least 1")


@dataclass(frozen=True)
class BaseSettings:
    """Next-token training."""

    input_noise: float = option(0.0, "share of input tokens replaced by the mask token: regularisation for many epochs")


@dataclass(frozen=True)
class MaskSettings:
    """Online self-distillation of mask-token prediction."""

    k_max: int = option(8, "maximum tokens of a window: one real row and k_max - 1 masks")
    anchors: int = option(256, "mask blocks per sequence")
    mask_weight: float = option(1.0, "weight of the mask rows' cross-entropy against the teacher")
    protect_weight: float = option(2.0, "weight of KL(base || student) on real rows, which keeps plain decoding")
    text_weight: float = option(0.0, "weight of next-token cross-entropy on real rows")
    plain_limit: float = option(
        0.03, "a checkpoint whose plain loss exceeds the base's by more than this share is refused"
    )

    def __post_init__(self) -> None:
        if self.k_max < 2:
            raise ValueError("--k-max must be at least 2: one real row and one mask")
        if self.anchors < 1:
            raise ValueError("--anchors must be at least 1")


@dataclass(frozen=True)
class MaskOptimSettings(OptimSettings):
    """As for a base model, but starting from trained weights: lower rates, which fall from the end of the warm-up."""

    muon_lr: float = option(0.01, "peak learning rate of matrices (Keller Jordan's scale)")
    adam_lr: float = option(1.5e-3, "peak learning rate of embeddings and norms")
    muon_decay: float = option(0.05, "decoupled weight decay of matrices, times the learning rate")
    adam_decay: float = option(0.05, "decoupled weight decay of embeddings, times the learning rate")
    warmup: float = option(0.05, "share of the run that warms up")
    decay: float = option(0.95, "share of the run, at its end, in which the rate falls to zero")


@dataclass(frozen=True)
class ContinuationSettings:
    """The target's continuations that a head learns from."""

    prompt_tokens: int = option(128, "tokens of a prompt")
    new_tokens: int = option(384, "tokens that the target generates per prompt, fewer if it ends the text")
    train_tokens: int = option(12_000_000, "continuation tokens to train on, excluding prompts")
    greedy_share: float = option(0.5, "share of the prompts continued greedily; the others at temperature 1")
    generate_batch: int = option(2048, "sequences generated at once")

    @property
    def length(self) -> int:
        """Tokens of a sequence."""
        return self.prompt_tokens + self.new_tokens

    def __post_init__(self) -> None:
        if self.prompt_tokens < 2 or self.new_tokens < 1 or self.train_tokens < 1 or self.generate_batch < 1:
            raise ValueError(
                "--prompt-tokens must be at least 2; --new-tokens, --train-tokens and --generate-batch at least 1"
            )
        if not 0 <= self.greedy_share <= 1:
            raise ValueError(f"--greedy-share {self.greedy_share} must be from 0 to 1")


@dataclass(frozen=True)
class HeadRunSettings(RunSettings):
    """How long to train, and how the run is monitored and saved. A sequence is a prompt and its continuation."""

    batch_tokens: int = option(32_768, "tokens per step, including prompts")
    length: int = option(512, "tokens of a sequence, as in the continuations")
    eval_steps: int = option(500, "steps between validations")
    eval_tokens: int = option(131_072, "tokens of held-out sequences, including prompts")


@dataclass(frozen=True)
class HeadSettings:
    """A head unrolled over its own output."""

    unroll: int = option(4, "depths that a head is trained for")
    discount: float = option(1.0, "weight of a depth relative to the one before it")

    def __post_init__(self) -> None:
        if self.unroll < 1 or self.discount <= 0:
            raise ValueError("--unroll must be at least 1 and --discount above 0")


@dataclass(frozen=True)
class MtpSettings(HeadSettings):
    """One multi-token prediction module, applied recursively (FastMTP)."""

    discount: float = option(0.6, "weight of a depth relative to the one before it")


@dataclass(frozen=True)
class EagleSettings(HeadSettings):
    """One llama layer over three of the target's inner states (EAGLE-3)."""

    discount: float = option(0.8, "weight of a depth relative to the one before it")
    draft_vocab_size: int = option(32_000, "tokens that the head can draft: the target's most frequent, at most all")
    heads: int | None = option(None, "query heads of the layer (default: the target's)")
    kv_heads: int | None = option(None, "key/value heads of the layer (default: the target's)")
    mlp: int | None = option(None, "width of the layer's gated MLP (default: the target's)")

    def __post_init__(self) -> None:
        HeadSettings.__post_init__(self)
        if (
            min(self.draft_vocab_size, *(1 if size is None else size for size in (self.heads, self.kv_heads, self.mlp)))
            < 1
        ):
            raise ValueError("--draft-vocab-size, --heads, --kv-heads and --mlp must be at least 1")


@dataclass(frozen=True)
class FrozenKVSettings(HeadSettings):
    """Layers that read the target's own keys and values (Gemma 4's assistants)."""

    discount: float = option(0.6, "weight of a depth relative to the one before it")
    layers: int = option(2, "layers; the last reads full attention, those before it windows, if the target has some")
    hidden: int | None = option(None, "width of the layers (default: half the target's)")
    heads: int | None = option(None, "query heads of a layer (default: the target's)")
    mlp: int | None = option(None, "width of the gated MLPs (default: four times the layers')")

    def __post_init__(self) -> None:
        HeadSettings.__post_init__(self)
        if min(self.layers, *(1 if size is None else size for size in (self.hidden, self.heads, self.mlp))) < 1:
            raise ValueError("--layers, --hidden, --heads and --mlp must be at least 1")


@dataclass(frozen=True)
class HeadOptimSettings(OptimSettings):
    """Muon for matrices, AdamW for output rows and norms. What the target has learnt about tokens is reused."""

    adam_lr: float = option(1e-3, "peak learning rate of output rows and norms")
    decay: float = option(0.5, "share of the run, at its end, in which the rate falls to zero")
