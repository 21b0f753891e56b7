"""From a target and a text to a head that drafts for it: `generate` the target's continuations, then `fit` a head."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

import stridelm.builtin
from stridelm.cache.layout import HeadsKV
from stridelm.models.layers.decoder import Decoder, DecoderSpec
from stridelm.models.loader import build_empty, load_config, load_model
from stridelm.text.tokenizer import checkpoint_eos_ids
from stridelm.train.continuations import Continuations, Plan, Source, continuations, weights_hash
from stridelm.train.frozen_kind import FrozenKVKind
from stridelm.train.head_export import export_head
from stridelm.train.head_kinds import Eagle3Kind, HeadKind, MtpKind
from stridelm.train.head_objective import HeadObjective
from stridelm.train.prepare import load_tokenizer
from stridelm.train.recipe import parameter_count
from stridelm.train.record import provenance
from stridelm.train.settings import ContinuationSettings, HeadRunSettings, OptimSettings
from stridelm.train.stages import WORK, place
from stridelm.train.tokens import TokenFile
from stridelm.train.trainer import Result, Trainer, resumable
from stridelm.train.windows import Rows

logger = logging.getLogger(__name__)

KINDS: dict[str, type[HeadKind]] = {kind.stage: kind for kind in (MtpKind, Eagle3Kind, FrozenKVKind)}


@dataclass(frozen=True)
class Prompts:
    """Two token files in the target's vocabulary."""

    train: TokenFile
    valid: TokenFile


def prompts_in(file: Path, target: Path) -> Prompts:
    """The token file and its validation side, valid.bin in the same folder. Raises ValueError if either is missing or
    was not written with the target's tokenizer."""
    valid = file.with_name("valid.bin")
    if file.name == valid.name or not valid.is_file():
        raise ValueError(f"{file} has no held-out side: there must be a valid.bin beside it; encode text with --data")
    tokenizer = load_tokenizer(target)
    return Prompts(TokenFile(file, tokenizer), TokenFile(valid, tokenizer))


def train_head(
    kind: HeadKind,
    out: Path,
    target: Path,
    prompts: Prompts,
    s: ContinuationSettings,
    run: HeadRunSettings,
    optim: OptimSettings,
    said: Path | None = None,
) -> Result:
    """Generate continuations, unless that is already done, and fit a head. said: folder of the continuations, which
    several heads may share (default: in `out`). Raises ValueError, before anything runs, for what cannot be trained."""
    run = replace(run, length=s.length)
    spec = check_target(target, s.length)
    kind.check(spec)
    for text in (prompts.train, prompts.valid):
        if text.info.vocab_size > spec.vocab_size:
            have = f"{text.path} has a vocabulary of {text.info.vocab_size} tokens, {target} only {spec.vocab_size}"
            raise ValueError(f"{have}; encode the text with the target's own tokenizer")
    if run.resume:
        resumable(out / WORK)
    train, held_out = generate(target, prompts, s, run, said or out / WORK)
    return fit(kind, out, target, train, held_out, run, optim, s)


def generate(
    target: Path, prompts: Prompts, s: ContinuationSettings, run: HeadRunSettings, folder: Path
) -> tuple[Continuations, Continuations]:
    """The target's continuations of training prompts and of held-out ones, stored in `folder` and reused from there.
    Raises ValueError if `folder` holds another target's, or if a text has too few tokens for a prompt."""
    device, _ = place(run)
    model = load_target(target, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    source = Source(model.spec.vocab_size, checkpoint_eos_ids(target), weights_hash(target))

    def side(name: str, text: TokenFile, sequences: int) -> Continuations:
        plan = Plan.of(s, sequences, run.seed, text, source)
        return continuations(folder / f"{name}.bin", plan, text, model, run.log_seconds)

    valid = side("valid", prompts.valid, max(1, run.eval_tokens // s.length))
    return side("train", prompts.train, -(-s.train_tokens // s.new_tokens)), valid


def fit(
    kind: HeadKind,
    out: Path,
    target: Path,
    train: Continuations,
    held_out: Continuations,
    run: HeadRunSettings,
    optim: OptimSettings,
    *settings: object,
) -> Result:
    """Train a new head on continuations and export the best checkpoint to `out`. settings: further settings to
    record."""
    device, compile = place(run)
    model = load_target(target, device, torch.float32)
    head = kind.build(model, train, run.seed)
    logger.info("%s: %.2fM parameters, %s", kind.stage, parameter_count(head) / 1e6, device)
    objective = HeadObjective(head, model, kind, held_out, compile=compile)
    batches = {run.length: Rows(train.on(device), run.seed)}
    result = Trainer(kind.stage, objective, batches, run, optim, out / WORK).train()
    facts = {
        "parameters": parameter_count(head),
        "target": {"name": _name(target), "weights_sha256": train.plan.target},
        "data": {"train": train.facts(), "held_out": held_out.facts()},
        "result": asdict(result),
    }
    record = provenance(kind.stage, device, kind.settings, run, optim, *settings, seed=run.seed, **facts)
    export_head(kind, head, json.loads((target / "config.json").read_text(encoding="utf-8")), out, record)
    return result


def check_target(path: Path, length: int) -> DecoderSpec:
    """The target's shape. Raises ValueError if it cannot generate up to `length` tokens here."""
    spec = build_empty(load_config(path), path).spec
    if not all(isinstance(state, HeadsKV) for state in spec.states()):
        raise ValueError(f"{path} has layers that do not keep keys and values; heads cannot be trained for it here")
    if any(state.scale != state.key_dim**-0.5 for state in spec.states() if isinstance(state, HeadsKV)):
        raise ValueError(f"{path} does not scale attention by its heads' width; heads cannot be trained for it here")
    if length > spec.max_length:
        have = f"--prompt-tokens and --new-tokens make {length}, {path} has a context of {spec.max_length}"
        raise ValueError(f"{have}; lower them")
    windows = [layer.mixer.window for layer in spec.layers]
    if any(window is not None and window < length for window in windows):
        raise ValueError(f"layers of {path} see fewer than {length} tokens; lower --prompt-tokens or --new-tokens")
    return spec


def load_target(path: Path, device: torch.device, dtype: torch.dtype) -> Decoder:
    return load_model(path, dtype=dtype, device=device, serving=False).requires_grad_(False)


def _name(target: Path) -> str:
    within = Path(stridelm.builtin.__file__).parent in target.resolve().parents
    return "the built-in model" if within else target.resolve().name
