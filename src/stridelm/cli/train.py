"""`stride train base` and `stride train mask`: from a folder of text to a model that says several tokens a
step."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import Any

from stridelm.cli.options import add_options, read_options
from stridelm.train.settings import (
    BaseSettings,
    DataSettings,
    MaskOptimSettings,
    MaskSettings,
    ModelShape,
    OptimSettings,
    RunSettings,
)

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


def add_parser(subparsers: Any) -> None:
    """Add `train` and its stages to the main command."""
    parser = subparsers.add_parser("train", help="train a base model or mask-token prediction", description=__doc__)
    stages = parser.add_subparsers(dest="stage", metavar="STAGE", required=True)
    for name, (summary, settings) in STAGES.items():
        stage = stages.add_parser(name, help=summary, description=summary)
        if name == "mask":
            stage.add_argument("--base", type=Path, required=True, help="checkpoint directory to start from")
        stage.add_argument("--data", type=Path, required=True, help="text, train/ and valid/ text, or token files")
        stage.add_argument("--out", type=Path, required=True, help="directory of the new checkpoint")
        stage.add_argument("--tokenizer", type=Path, help="tokenizer directory (default: train one; mask: the base's)")
        for cls in settings:
            add_options(stage.add_argument_group((cls.__doc__ or cls.__name__).split(".")[0]), cls)


def run(args: argparse.Namespace) -> int:
    """Run the chosen stage. Raises ValueError for settings or data that do not fit."""
    from stridelm.train.prepare import prepare
    from stridelm.train.stages import WORK, train_base, train_mask

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    settings = read_options(args, RunSettings)
    text = read_options(args, DataSettings)
    if args.stage == "base":
        shape = read_options(args, ModelShape)
        data = prepare(args.data, args.out / WORK, args.tokenizer, text, shape.context, settings.seed)
        base, optim = read_options(args, BaseSettings), read_options(args, OptimSettings)
        result = train_base(args.out, data, shape, base, settings, optim)
    else:
        mask, optim = read_options(args, MaskSettings), read_options(args, MaskOptimSettings)
        data = prepare(args.data, args.out / WORK, args.tokenizer or args.base, text, settings.length, settings.seed)
        result = train_mask(args.out, args.base, data, mask, settings, optim)
    print(f"{args.out}: best at step {result.best_step} of {result.step}", *_shown(result.best), sep="  ")
    return 0


def _shown(metrics: dict[str, float]) -> list[str]:
    return [f"{name} {value:.4f}" for name, value in metrics.items()]
