"""`stride train base` and `stride train mask`: train a model that emits several tokens per step, from a folder of text.
`stride train mtp`, `eagle3` and `frozen_kv`: train a head that drafts for a model."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stridelm.cli.options import add_options, given_options, read_options
from stridelm.train.settings import (
    BaseSettings,
    ContinuationSettings,
    DataSettings,
    EagleSettings,
    FrozenKVSettings,
    HeadOptimSettings,
    HeadRunSettings,
    MaskOptimSettings,
    MaskSettings,
    ModelShape,
    MtpSettings,
    OptimSettings,
    RunSettings,
)

if TYPE_CHECKING:
    from stridelm.train.trainer import Result

STAGES: dict[str, tuple[str, tuple[type, ...]]] = {
    "base": (
        "train a new model on a folder of text",
        (DataSettings, RunSettings, ModelShape, BaseSettings, OptimSettings),
    ),
    "mask": (
        "teach a base model mask-token prediction by self-distillation",
        (DataSettings, RunSettings, MaskSettings, MaskOptimSettings),
    ),
}
"""Stage -> what it does, and the settings that become its options."""

HEADS: dict[str, tuple[str, type]] = {
    "mtp": ("train a multi-token prediction module on a model's own continuations", MtpSettings),
    "eagle3": ("train an EAGLE-3 head on a model's own continuations", EagleSettings),
    "frozen_kv": ("train a head that reads a model's own keys and values, on its continuations", FrozenKVSettings),
}
"""The same for heads that draft for a model: each head's settings besides those that all heads share."""
HEAD_SETTINGS: tuple[tuple[type, tuple[str, ...]], ...] = (
    (ContinuationSettings, ()),
    (HeadRunSettings, ("length", "short_length", "short_share")),
    (HeadOptimSettings, ()),
    (DataSettings, ("vocab_size",)),
)
"""Settings that all heads share, with their fields that are not options because other settings determine them."""


def add_parser(subparsers: Any) -> None:
    """Add `train` and its stages to the main command."""
    parser = subparsers.add_parser("train", help="train a model or a drafter", description=__doc__)
    stages = parser.add_subparsers(dest="stage", metavar="STAGE", required=True)
    for name, (summary, settings) in STAGES.items():
        stage = stages.add_parser(name, help=summary, description=summary)
        if name == "mask":
            stage.add_argument("--base", type=Path, required=True, help="checkpoint directory to start from")
        stage.add_argument("--data", type=Path, required=True, help="text, train/ and valid/ text, or token files")
        stage.add_argument("--out", type=Path, required=True, help="directory for the new checkpoint")
        stage.add_argument("--tokenizer", type=Path, help="tokenizer directory (default: train one; mask: the base's)")
        for cls in settings:
            add_options(stage.add_argument_group(_title(cls)), cls)
    for name, (summary, own) in HEADS.items():
        stage = stages.add_parser(name, help=summary, description=summary)
        stage.add_argument("--target", type=Path, required=True, help="checkpoint directory of the model to draft for")
        prompts = stage.add_mutually_exclusive_group(required=True)
        prompts.add_argument("--tokens", type=Path, help="token file to take prompts from, with valid.bin beside it")
        prompts.add_argument("--data", type=Path, help="text, or train/ and valid/ text, to take prompts from")
        stage.add_argument("--out", type=Path, required=True, help="directory for the new head")
        stage.add_argument(
            "--said", type=Path, help="folder of continuations, shared between heads (default: in --out)"
        )
        for cls, skip in ((own, ()), *HEAD_SETTINGS):
            add_options(stage.add_argument_group(_title(cls)), cls, skip=skip)


def _title(cls: type) -> str:
    return (cls.__doc__ or cls.__name__).split(".")[0]


def run(args: argparse.Namespace) -> int:
    """Run the chosen stage. Raises ValueError for settings or data that do not fit together."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    result = _train_head(args) if args.stage in HEADS else _train_model(args)
    print(f"{args.out}: best at step {result.best_step} of {result.step}", *_shown(result.best), sep="  ")
    return 0


def _train_head(args: argparse.Namespace) -> Result:
    from stridelm.train.head_stages import KINDS, Prompts, check_target, prompts_in, train_head
    from stridelm.train.prepare import prepare
    from stridelm.train.stages import WORK

    said = read_options(args, ContinuationSettings)
    settings = read_options(args, HeadRunSettings, length=said.length)
    kind = KINDS[args.stage](read_options(args, HEADS[args.stage][1]))
    kind.check(check_target(args.target, said.length))  # before any text is encoded
    if args.tokens is not None:
        unused = ", ".join("--" + name.replace("_", "-") for name in given_options(args, DataSettings))
        if unused:
            raise ValueError(f"{unused} would have no effect on a token file; leave it out, or give text with --data")
        prompts = prompts_in(args.tokens, args.target)
    else:
        text = read_options(args, DataSettings)
        data = prepare(args.data, args.out / WORK / "text", args.target, text, said.length, settings.seed)
        prompts = Prompts(data.train, data.valid)
    optim = read_options(args, HeadOptimSettings)
    return train_head(kind, args.out, args.target, prompts, said, settings, optim, args.said)


def _train_model(args: argparse.Namespace) -> Result:
    from stridelm.train.prepare import prepare
    from stridelm.train.stages import WORK, train_base, train_mask

    settings = read_options(args, RunSettings)
    text = read_options(args, DataSettings)
    if args.stage == "base":
        shape = read_options(args, ModelShape)
        data = prepare(args.data, args.out / WORK, args.tokenizer, text, shape.context, settings.seed)
        base, optim = read_options(args, BaseSettings), read_options(args, OptimSettings)
        return train_base(args.out, data, shape, base, settings, optim)
    mask, optim = read_options(args, MaskSettings), read_options(args, MaskOptimSettings)
    data = prepare(args.data, args.out / WORK, args.tokenizer or args.base, text, settings.length, settings.seed)
    return train_mask(args.out, args.base, data, mask, settings, optim)


def _shown(metrics: dict[str, float]) -> list[str]:
    return [f"{name} {value:.4f}" for name, value in metrics.items()]
