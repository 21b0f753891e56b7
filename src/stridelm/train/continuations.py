"""Prompts from a text, continued by the target: the data from which its drafters learn to guess its tokens.

All prompts have the same length, so the sequences of a batch grow in step. Some are continued greedily, the others at
temperature 1. A file of continuations is written batch by batch, each a function of the seed and its number only: an
interrupted run resumes after the last complete batch.

Legend: N sequences of L tokens, P of them prompt and C continuation; B sequences of a batch, V tokens of a vocabulary.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stridelm.models.layers.decoder import Decoder, ModelInput
from stridelm.progress import bar
from stridelm.train.dense import CachedMix, flat_positions
from stridelm.train.settings import ContinuationSettings
from stridelm.train.tokens import TokenFile
from stridelm.train.windows import Windows, step_generator

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Plan:
    """What a file of continuations holds; written beside it. Two files with the same plan are equal, except for
    differences between devices in the order of adding."""

    sequences: int
    length: int
    prompt_tokens: int
    batch: int
    greedy_share: float
    seed: int
    dtype: str
    stops: tuple[int, ...]
    """Tokens that end a continuation; what follows one is meaningless."""
    prompts: str
    """SHA-256 of the text from which prompts are cut."""
    target: str
    """SHA-256 of the target's weights."""

    @classmethod
    def of(cls, s: ContinuationSettings, sequences: int, seed: int, text: TokenFile, source: Source) -> Plan:
        return cls(
            sequences=sequences,
            length=s.length,
            prompt_tokens=s.prompt_tokens,
            batch=min(s.generate_batch, sequences),
            greedy_share=s.greedy_share,
            seed=seed,
            dtype="uint16" if source.vocab_size <= 1 << 16 else "uint32",
            stops=source.stops,
            prompts=hashlib.sha256(np.asarray(text.tokens).tobytes()).hexdigest(),
            target=source.weights,
        )

    def is_greedy(self, first: int, count: int) -> np.ndarray:
        """Whether sequences number `first` and on are continued greedily: [count] bool, evenly mixed."""
        number = np.arange(first, first + count)
        return np.floor((number + 1) * self.greedy_share) > np.floor(number * self.greedy_share)


@dataclass(frozen=True)
class Source:
    """What files of continuations depend on in the target."""

    vocab_size: int
    stops: tuple[int, ...]
    weights: str
    """SHA-256."""


class Continuations:
    """A complete file of continuations."""

    def __init__(self, plan: Plan, rows_NL: np.ndarray) -> None:
        self.plan, self.rows_NL = plan, rows_NL

    def on(self, device: torch.device) -> torch.Tensor:
        """[N, L] int32."""
        return torch.from_numpy(self.rows_NL.astype(np.int32)).to(device)

    @cached_property
    def _live_NC(self) -> torch.Tensor:
        return live_tokens(self.on(torch.device("cpu")), self.plan.prompt_tokens, self.plan.stops)

    def counts(self, vocab_size: int) -> torch.Tensor:
        """[V] int64 how often each token was generated."""
        generated = self.on(torch.device("cpu"))[:, self.plan.prompt_tokens :]
        return generated[self._live_NC].bincount(minlength=vocab_size)

    def facts(self) -> dict[str, Any]:
        """For a provenance record. Continuation tokens are counted up to the one that ends a text."""
        plan = self.plan
        generated = self._live_NC.sum(1).numpy()
        greedy = plan.is_greedy(0, plan.sequences)
        return {
            "sequences": plan.sequences,
            "greedy_sequences": int(greedy.sum()),
            "prompt_tokens": plan.sequences * plan.prompt_tokens,
            "continuation_tokens": int(generated.sum()),
            "greedy_continuation_tokens": int(generated[greedy].sum()),
            "ended": int((generated < plan.length - plan.prompt_tokens).sum()),
            "seed": plan.seed,
            "sha256": hashlib.sha256(np.ascontiguousarray(self.rows_NL).tobytes()).hexdigest(),
            "prompts_sha256": plan.prompts,
        }


def continuations(path: Path, plan: Plan, text: TokenFile, model: Decoder, line_seconds: float) -> Continuations:
    """The continuations in `path`, after generating what is missing. The plan is written beside it as .json.

    model: on the device and in the dtype to generate with. line_seconds: seconds between progress lines.
    Raises ValueError if the file was started with another plan, or if the text is too short for its prompts.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _check_plan(path, plan)
    row_bytes = plan.length * np.dtype(plan.dtype).itemsize
    done = path.stat().st_size // (row_bytes * plan.batch) * plan.batch if path.is_file() else 0
    complete = path.is_file() and path.stat().st_size == plan.sequences * row_bytes
    if not complete:
        _write(path, plan, text, model, done, line_seconds)
    rows = np.memmap(path, dtype=np.dtype(plan.dtype).newbyteorder("<"), mode="r", shape=(plan.sequences, plan.length))
    return Continuations(plan, rows)


def _check_plan(path: Path, plan: Plan) -> None:
    description = path.with_suffix(".json")
    ours = json.loads(json.dumps(asdict(plan)))
    if not description.is_file():
        if path.exists():
            raise ValueError(
                f"{path} is not a file of continuations: {description.name} is missing; give another folder"
            )
        description.write_text(json.dumps(ours, indent=1) + "\n", encoding="utf-8")
        return
    theirs = json.loads(description.read_text(encoding="utf-8"))
    if theirs != ours:
        other = ", ".join(name for name in ours if theirs.get(name) != ours[name])
        raise ValueError(
            f"{path} was generated with another {other}; use the same settings, or delete it and {description.name}"
        )


def _write(path: Path, plan: Plan, text: TokenFile, model: Decoder, done: int, line_seconds: float) -> None:
    """Append the batches from sequence number `done` on."""
    device = model.norm.device
    prompts = Windows(torch.from_numpy(np.asarray(text.tokens).astype(np.int32)), plan.prompt_tokens, plan.seed)
    row_bytes, began, logged = plan.length * np.dtype(plan.dtype).itemsize, time.monotonic(), time.monotonic()
    with path.open("ab") as stream, bar("generating", plan.sequences, "sequences") as advance:
        stream.truncate(done * row_bytes)
        advance(done)
        for first in range(done, plan.sequences, plan.batch):
            count = min(plan.batch, plan.sequences - first)
            rows = go_on(
                model,
                prompts.batch(first, count)[:, : plan.prompt_tokens].to(device),
                plan.length,
                torch.from_numpy(plan.is_greedy(first, count)).to(device),
                step_generator(plan.seed, first, device),
            )
            rows.cpu().numpy().astype(np.dtype(plan.dtype).newbyteorder("<")).tofile(stream)
            stream.flush()
            advance(count)
            if time.monotonic() - logged > line_seconds:
                logged = time.monotonic()
                logger.info("generating %3.0f%%", 100 * (first + count) / plan.sequences)
    seconds = time.monotonic() - began
    speed = (plan.sequences - done) * (plan.length - plan.prompt_tokens) / max(seconds, 1e-9)
    logger.info("%s: %d sequences, %.0f s, %.0f tokens/s", path, plan.sequences, seconds, speed)


@torch.no_grad()
def go_on(
    model: Decoder, prompts_BP: torch.Tensor, length: int, greedy_B: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    """The prompts continued to `length` tokens, greedily or at temperature 1: [B, length] int64."""
    batch, start = prompts_BP.shape
    mix = CachedMix(batch, length)
    rows = torch.cat((prompts_BP, prompts_BP.new_zeros(batch, length - start)), dim=1)
    hidden = model(ModelInput(prompts_BP.flatten(), flat_positions(batch, start, rows.device), mix))
    hidden = hidden.view(batch, start, -1)[:, -1]
    for position in range(start, length):
        scores = model.logits(hidden).float()
        # Minus the logarithm of an exponential variable is Gumbel noise; the argmax of the sum draws from the softmax.
        noise = torch.empty_like(scores).exponential_(generator=generator).log_()
        rows[:, position] = token = (scores - noise.masked_fill_(greedy_B[:, None], 0.0)).argmax(-1)
        if position + 1 < length:
            hidden = model(ModelInput(token, torch.full_like(token, position), mix))
    return rows


def live_tokens(rows_BL: torch.Tensor, prompt_tokens: int, stops: tuple[int, ...]) -> torch.Tensor:
    """[B, L - P] bool: tokens of the continuations, up to and including the one that ends each."""
    generated = rows_BL[:, prompt_tokens:]
    ends = torch.zeros_like(generated, dtype=torch.bool)
    for stop in stops:
        ends |= generated == stop
    return ends.cumsum(1) - ends.long() == 0


def weights_hash(path: Path) -> str:
    """SHA-256 over a checkpoint's weight files."""
    digest = hashlib.sha256()
    for file in sorted(path.glob("*.safetensors")):
        with file.open("rb") as stream:
            while block := stream.read(1 << 24):
                digest.update(block)
    return digest.hexdigest()
