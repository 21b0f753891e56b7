"""`stride inspect`: describe a checkpoint, how it would fill a device's memory, and the drafters it can use. Loads no
weights."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stridelm.cli.options import add_options, given_options
from stridelm.config import EngineConfig
from stridelm.options import settings
from stridelm.values import number

if TYPE_CHECKING:
    from rich.table import Table

    from stridelm.draft.base import Drafter, TargetInfo
    from stridelm.models.layers.decoder import Decoder

RELEVANT = (
    "drafter",
    "drafter_model",
    "mask_token_id",
    "max_model_len",
    "device",
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "capture_memory",
    "page_size",
    "num_pages",
    "kv_memory_fraction",
    "max_num_seqs",
    "max_num_batched_tokens",
)
"""Fields of EngineConfig that change the description."""


def add_parser(subparsers: Any) -> None:
    """Add `inspect` to the main command."""
    parser = subparsers.add_parser("inspect", help="describe a checkpoint", description=__doc__)
    parser.add_argument("model", nargs="?", metavar="MODEL", help="checkpoint directory (default: the built-in model)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument(
        "--memory",
        type=positive,
        metavar="GIB",
        help="plan for a GPU with so much free memory (default: what is free here)",
    )
    irrelevant = [name for name in settings(EngineConfig) if name not in RELEVANT]
    add_options(parser, EngineConfig, skip=irrelevant)


def run(args: argparse.Namespace) -> int:
    """Describe the checkpoint. Raises ValueError if it could not be loaded."""
    config = EngineConfig(**given_options(args, EngineConfig))
    facts = describe(config, args.memory)
    if args.json:
        sys.stdout.write(json.dumps(facts) + "\n")
        return 0
    from rich.console import Console

    console = Console()
    for table in (_model_table(facts), _memory_table(facts), _drafter_table(facts)):
        console.print(table)
    return 0


def positive(text: str) -> float:
    """A size in GiB. Raises ArgumentTypeError for one that is no memory."""
    try:
        return float(number("memory", float(text), 0, 2**20, open_low=True))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def describe(config: EngineConfig, memory: float | None = None) -> dict[str, Any]:
    """Everything that `stride inspect` prints. Reads only config.json and the headers of the weight files.

    memory: GiB that are free on a GPU; None for what is free on the config's device.
    """
    import torch

    from stridelm.builtin import builtin_path
    from stridelm.draft.settle import settle
    from stridelm.engine.load import check_drafters, check_given, describe_target, resolve_device
    from stridelm.models.files import read_headers
    from stridelm.models.layers.rope import lengthen
    from stridelm.models.loader import build_stored, check_headers, format_names, load_config
    from stridelm.text.tokenizer import VOCABULARY_FILES, checkpoint_eos_ids

    path = builtin_path() if config.model is None else Path(config.model)
    hf_config = load_config(path)
    if config.max_model_len is not None:
        lengthen(hf_config, config.max_model_len)
    device = resolve_device(config.device) if memory is None else torch.device("cuda")
    target = describe_target(config, hf_config, path, device)
    model, loading = build_stored(hf_config, path, quantization=config.quantization)
    weights = dict(read_headers(path))
    check_headers(model, loading, path)
    check_given(target, len(config.drafter_models))
    chosen = settle(config.speculation, target).drafter or ""
    anywhere = replace(target, device=torch.device("cpu"))
    check_drafters(config, anywhere, model, chosen)
    here = target if torch.cuda.is_available() else anywhere  # of a GPU that is not here, only the memory is known
    return {
        "model": str(path),
        "architecture": (getattr(hf_config, "architectures", None) or [hf_config.model_type])[0],
        "model_type": hf_config.model_type,
        **_shape(model),
        "context": target.max_length,
        "weight_formats": format_names(model),
        "stored": dict(Counter(str(tensor.dtype).removeprefix("torch.") for tensor in weights.values())),
        "weight_bytes": sum(tensor.nbytes for tensor in weights.values()),
        "kv_bytes_per_token": _kv_bytes(model),
        "memory": _memory(config, target, here, model, memory, chosen),
        "tokenizer": any((path / name).is_file() for name in VOCABULARY_FILES),
        **_chat_formats(path),
        "eos_token_ids": list(checkpoint_eos_ids(path)),
        "mask_token_ids": list(target.mask_token_ids),
        "auto": _automatic(target),
        "drafters": _drafters(here, model),
    }


def _chat_formats(path: Path) -> dict[str, str | None]:
    """How tool calls and reasoning of the model's messages are read, unless an option says otherwise. Reads only the
    chat template and tokenizer_config.json."""
    from stridelm.chat.formats import reasoning_format_of, tool_format_of
    from stridelm.text.tokenizer import read_json

    config, file = read_json(path / "tokenizer_config.json"), path / "chat_template.jinja"
    if config.get("response_template"):
        return dict.fromkeys(("tool_call_parser", "reasoning_parser"), "response_template")
    source = file.read_text(encoding="utf-8") if file.is_file() else str(config.get("chat_template") or "")
    return {"tool_call_parser": tool_format_of(source), "reasoning_parser": reasoning_format_of(source)}


def _shape(model: Decoder) -> dict[str, Any]:
    from stridelm.cache.layout import Shared

    spec = model.spec
    mixers, mlps = ([getattr(layer, part) for layer in spec.layers] for part in ("mixer", "mlp"))
    routings = [mlp.routing for mlp in mlps if hasattr(mlp, "routing")]
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "intermediate_size": _of(mlps, "intermediate_size"),
        "num_experts": _of(routings, "num_experts"),
        "num_experts_per_tok": _of(routings, "num_experts_per_tok"),
        "moe_intermediate_size": _of(mlps, "moe_intermediate_size"),
        "heads": _of(mixers, "num_heads"),
        "kv_heads": _of(mixers, "num_kv_heads"),
        "head_dim": _of(mixers, "head_dim"),
        "latent_dim": _of(mixers, "rank"),
        "rope_dim": _of([rope.spec for rope in model.ropes], "dim"),
        "vocab_size": spec.vocab_size,
        "tied_embeddings": spec.tied,
        "rope": _of([rope.spec for rope in model.ropes], "kind"),
        "shared_layers": sum(isinstance(state, Shared) for state in model.layer_states),
        "windows": sorted({mixer.window for mixer in mixers if mixer.window is not None}),
    }


def _of(parts: Sequence[Any], name: str) -> Any:
    """The value of the attribute `name` in the parts that have it, None if none has; a list of all values if they
    differ."""
    values = list(dict.fromkeys(getattr(part, name) for part in parts if hasattr(part, name)))
    return values if len(values) > 1 else next(iter(values), None)


def _kv_bytes(model: Decoder) -> dict[str, int]:
    """Dtype -> bytes that one token's KV takes over all layers; fp8: with that kv_cache_dtype, in every dtype."""
    import torch

    from stridelm.cache.layout import bytes_per_token, in_eight_bits
    from stridelm.models.files import DTYPES

    states = model.layer_states
    found = {name: bytes_per_token(states, dtype) for name, dtype in DTYPES.items()}
    return {**found, "fp8": bytes_per_token(in_eight_bits(states), torch.float32)}


def _memory(
    config: EngineConfig, target: TargetInfo, here: TargetInfo, model: Decoder, memory: float | None, drafter: str
) -> dict[str, Any]:
    """How an engine with this default drafter would fill a device, and why it would not start there. here: the target
    on a device that can be asked what it computes."""
    from stridelm.cache.pool import free_memory
    from stridelm.engine.load import check_drafters
    from stridelm.engine.memory import profile_memory
    from stridelm.models.loader import formats_of, resolve_dtype

    dtype = resolve_dtype(config.dtype, target.config, target.device)
    free = free_memory(target.device) if memory is None else int(memory * 2**30)
    profile = profile_memory(config, target, model, dtype, free, drafter, captures=target.device.type == "cuda")
    why_not = None
    try:
        for form in formats_of(model):
            form.check(here.device)
        check_drafters(config, here, model, drafter)
        profile.check()
    except ValueError as error:
        why_not = str(error)
    return {
        "device": str(profile.device),
        "dtype": str(dtype).removeprefix("torch."),
        "free_bytes": profile.free,
        "part_bytes": dict(profile.parts),
        "left_bytes": profile.left,
        "kv_bytes": profile.kv,
        "contexts": profile.contexts,
        "why_not": why_not,
        "shown": profile.rows(),
    }


def _automatic(target: TargetInfo) -> str:
    """The drafter that "auto" resolves to."""
    from stridelm.draft.settle import settle
    from stridelm.params import Speculation

    return settle(Speculation(), target).drafter or ""


def _drafters(target: TargetInfo, model: Decoder) -> list[dict[str, Any]]:
    """Every registered drafter: whether it can serve this model, or why not, and its options."""
    from stridelm.draft import DRAFTERS
    from stridelm.verify import RULES

    rules = {name: RULES.get(name) for name in RULES}
    found = []
    for name in DRAFTERS:
        drafter = DRAFTERS.get(name)
        reason = drafter.why_not(target) or _misfit(drafter, target, model)
        able = {rule for rule in rules.values() if rule.works_with(drafter.rules, drafter.branches)}
        usable = sorted(rule.name for rule in able if not rule.simulated)
        read = (DRAFTERS.options(name), *map(RULES.options, usable))
        found.append(
            {
                "name": name,
                "usable": reason is None,
                "why_not": reason,
                "weights": str(target.heads[name]) if name in target.heads else None,
                "default_depth": drafter.usual_depth(target) if reason is None else drafter.default_depth,
                "acceptance": usable,
                "lossy": [rule for rule in usable if not rules[rule].lossless],
                "options": sorted({option for options in read for option in options.names()}),
            }
        )
    return found


def _misfit(drafter: type[Drafter], target: TargetInfo, model: Decoder) -> str | None:
    """Why the weights of a drafter that can serve the target cannot be loaded; None if they can."""
    try:
        drafter.check_weights(target, model)
    except ValueError as error:
        return str(error)
    return None


def _model_table(facts: dict[str, Any]) -> Table:
    from rich.table import Table
    from rich.text import Text

    from stridelm.progress import size

    stored = ", ".join(f"{count} tensors in {dtype}" for dtype, count in facts["stored"].items())
    kv = ", ".join(f"{size(count)} in {dtype}" for dtype, count in facts["kv_bytes_per_token"].items())
    windows = ", ".join(str(window) for window in facts["windows"])
    mlp, rope, turned = (_either(facts[name]) for name in ("intermediate_size", "rope", "rope_dim"))
    masks = ", ".join(str(token) for token in facts["mask_token_ids"])
    lines = {
        "architecture": f"{facts['architecture']} ({facts['model_type']})",
        "parameters": f"{facts['parameters']:,}" + (", embeddings tied" if facts["tied_embeddings"] else ""),
        "layers": f"{facts['layers']} of width {facts['hidden_size']}" + (f", MLP {mlp}" if mlp else ""),
        "experts": f"{facts['num_experts_per_tok']} of {facts['num_experts']}, each of width "
        f"{facts['moe_intermediate_size']}"
        if facts["num_experts"]
        else "none",
        "attention": f"{facts['heads']} heads on {_stored(facts)}"
        + (f", sliding window {windows}" if windows else "")
        + (f"; {facts['shared_layers']} layers read others' KV" if facts["shared_layers"] else ""),
        "context": f"{facts['context']:,} tokens, {rope} RoPE"
        + (f" of {turned} dimensions a head" if facts["rope_dim"] != facts["head_dim"] else ""),
        "vocabulary": f"{facts['vocab_size']:,} tokens" + ("" if facts["tokenizer"] else ", no tokenizer here"),
        "tool calls": facts["tool_call_parser"] or "none",
        "reasoning": facts["reasoning_parser"] or "none",
        "mask tokens": masks or "none",
        "weights": f"{size(facts['weight_bytes'])}: {stored}; {', '.join(facts['weight_formats'])}",
        "KV per token": kv,
    }
    table = Table(title=Text(facts["model"]), title_justify="left", show_header=False)
    for name, value in lines.items():
        table.add_row(name, Text(value))
    return table


def _memory_table(facts: dict[str, Any]) -> Table:
    from rich.table import Table
    from rich.text import Text

    memory = facts["memory"]
    table = Table(title=f"Memory in {memory['dtype']}", title_justify="left", show_header=False)
    for name, value in memory["shown"].items():
        table.add_row(name, Text(value))
    if memory["why_not"] is not None:
        table.add_row("does not start", Text(memory["why_not"]))
    return table


def _stored(facts: dict[str, Any]) -> str:
    """What attention keeps per token."""
    if facts["latent_dim"] is not None:
        return f"latent rows of {facts['latent_dim']} + {facts['rope_dim']}"
    return f"{_either(facts['kv_heads'])} KV heads of {_either(facts['head_dim'])}"


def _either(value: Any) -> str:
    """A value of all layers, or those of some each; empty if there is none."""
    return " or ".join(map(str, value)) if isinstance(value, list) else "" if value is None else str(value)


def _drafter_table(facts: dict[str, Any]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table("drafter", "available", "acceptance", "depth", title="Drafters", title_justify="left")
    for drafter in facts["drafters"]:
        name = drafter["name"]
        rules = [f"{rule} (lossy)" if rule in drafter["lossy"] else rule for rule in drafter["acceptance"]]
        table.add_row(
            f"{name}, the default" if name == facts["auto"] else name,
            Text("yes" if drafter["usable"] else f"no: {drafter['why_not']}"),
            ", ".join(rules),
            str(drafter["default_depth"]),
        )
    return table
