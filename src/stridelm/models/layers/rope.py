"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864) and the ways of stretching it that checkpoints use.

Frequencies follow transformers' `modeling_rope_utils`, which is the oracle. Rotation is in halves: dimension i is
paired with i + D/2, where D is how many dimensions are rotated. They are the first ones of a head.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from stridelm.values import number

NEEDED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "proportional": ("factor",),
}
"""The rope types that are supported, and the numbers without which they say nothing."""
STRETCHED = ("linear", "yarn", "proportional")
"""Those whose `factor` lengthens the context."""
OPTIONAL = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")
"""Numbers that rope types have values of their own for."""
LARGEST = 10**12
"""Of any of these numbers, to refuse what cannot be meant."""


@dataclass(frozen=True)
class RopeSpec:
    """A config's rotary embedding. `limit` is the longest context in which it is a pure function of position: dynamic
    scaling beyond the original length depends on the length of the call that came first (`lengthen` fixes it)."""

    dim: int
    """How many dimensions are rotated, some of them by no angle if the kind is "proportional"."""
    theta: float
    kind: str = "default"
    parameters: Mapping[str, Any] | None = None
    limit: int | None = None

    @classmethod
    def of(cls, config: Any, head_dim: int, layer_type: str | None = None) -> RopeSpec:
        """Read a transformers config (`rope_parameters`, or `rope_theta` with `rope_scaling`). Of a head, the part
        that `partial_rotary_factor` says is rotated. layer_type: whose rotation it is, if each has its own.

        Raises ValueError for a rope type that is not supported, and for numbers that it cannot have.
        """
        stated = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
        if layer_type is not None:
            stated = stated.get(layer_type)
            if not isinstance(stated, Mapping):
                raise ValueError(f"rope_parameters of {layer_type} must be a mapping; got {stated!r}")
        parameters = dict(stated)
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        if kind not in NEEDED:
            raise ValueError(f"rope type {kind!r} is not supported; supported: {', '.join(NEEDED)}")
        part = parameters.get("partial_rotary_factor")
        if part is None:  # older configs have it beside the other fields
            part = getattr(config, "partial_rotary_factor", None) or 1.0
        theta = parameters.get("rope_theta", getattr(config, "rope_theta", 10000.0))
        longest = number("max_position_embeddings", config.max_position_embeddings, 1, LARGEST, whole=True)
        original = parameters.get("original_max_position_embeddings") or longest
        parameters["original_max_position_embeddings"] = original
        if kind == "yarn" and parameters.get("factor") is None:
            parameters["factor"] = longest / original
        if kind == "proportional":
            parameters = {"factor": 1.0, **parameters, "partial_rotary_factor": part}
        _check(kind, {**parameters, "rope_theta": theta, "partial_rotary_factor": part})
        dim = head_dim if kind == "proportional" else int(head_dim * part)
        return cls(dim, float(theta), kind, parameters, int(longest) if kind == "dynamic" else None)

    def context(self, longest: int) -> int:
        """The longest context of a model whose config has this `max_position_embeddings`. What is stretched reaches
        `factor` times as far as without (vLLM's rule), unless the config says so already: YaRN's states where it
        began."""
        if self.limit is not None:
            return self.limit
        if self.kind not in STRETCHED or self.parameters is None:
            return longest
        unstretched = self.parameters["original_max_position_embeddings"] if self.kind == "yarn" else longest
        return max(longest, int(unstretched * self.parameters["factor"]))

    def frequencies(self) -> tuple[torch.Tensor, float]:
        """(inverse frequencies [D/2] float32, factor on cos and sin)."""
        exponent = torch.arange(0, self.dim, 2, dtype=torch.int64).float() / self.dim
        base = 1.0 / self.theta**exponent
        p = self.parameters or {}
        if self.kind == "linear":
            return base / p["factor"], 1.0
        if self.kind == "llama3":
            return _llama3(base, p), 1.0
        if self.kind == "yarn":
            return self._yarn(base, p)
        if self.kind == "proportional":
            return self._proportional(base, p), 1.0
        return base, 1.0

    def _proportional(self, base: torch.Tensor, p: Mapping[str, Any]) -> torch.Tensor:
        """Frequencies of whole heads, of which only the first are used: the other pairs do not turn, so that a pair is
        as far apart as in a head that is rotated as a whole."""
        turning = int(p["partial_rotary_factor"] * self.dim // 2)
        return torch.where(torch.arange(len(base)) < turning, base, 0.0) / p["factor"]

    def _yarn(self, base: torch.Tensor, p: Mapping[str, Any]) -> tuple[torch.Tensor, float]:
        """YaRN (Peng et al. 2023, arXiv 2309.00071, section 3.2 and equation 22)."""
        original, factor = p["original_max_position_embeddings"], p["factor"]

        def dimension(rotations: float) -> float:
            """The (fractional) dimension that rotates `rotations` times over the original context."""
            return self.dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(self.theta))

        low, high = dimension(p.get("beta_fast") or 32), dimension(p.get("beta_slow") or 1)
        if p.get("truncate", True):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.dim - 1)
        # The ramp of a config with few rotations runs backwards, as in transformers.
        ramp = (torch.arange(self.dim // 2).float() - low) / ((high - low) or 1e-3)
        keep = 1 - ramp.clamp(0, 1)
        scaled = base / factor * (1 - keep) + base * keep
        return scaled, _yarn_attention_factor(factor, p)


def lengthen(config: Any, length: int) -> None:
    """Fix dynamic scaling for contexts of a length beyond the original one, up to `factor` times that, as transformers
    has it for a prompt of that length, and vLLM for all. In place; other kinds, and lengths within, stay as they are.
    """
    stated = getattr(config, "rope_parameters", None) or {}
    if not isinstance(stated, Mapping) or stated.get("rope_type", stated.get("type")) != "dynamic":
        return
    spec = RopeSpec.of(config, 2)
    assert spec.parameters is not None and spec.limit is not None
    factor, original = spec.parameters["factor"], spec.parameters["original_max_position_embeddings"]
    if spec.limit < length <= int(spec.limit * factor):
        heads = getattr(config, "qk_rope_head_dim", None) or getattr(config, "head_dim", None)
        dim = int(
            (heads or config.hidden_size // config.num_attention_heads) * (stated.get("partial_rotary_factor") or 1)
        )
        stretch = factor * length / original - (factor - 1)
        theta = spec.theta * stretch ** (dim / (dim - 2))
        config.rope_parameters = {**stated, "rope_type": "default", "rope_theta": theta}
        config.max_position_embeddings = length


def _check(kind: str, numbers: Mapping[str, Any]) -> None:
    """Raise ValueError for a number that a rope type needs and does not have, or that cannot be computed with."""
    for name in ("rope_theta", "original_max_position_embeddings", *NEEDED[kind]):
        number(name, numbers.get(name), 0, LARGEST, open_low=True)
    number("partial_rotary_factor", numbers["partial_rotary_factor"], 0, 1, open_low=True)
    for name in OPTIONAL:
        if numbers.get(name) is not None:
            number(name, numbers[name], 0, LARGEST)


def yarn_scale(factor: float, m: float = 1.0) -> float:
    """YaRN's temperature for contexts stretched by `factor` (equation 22), with its slope multiplied by m."""
    return 0.1 * m * math.log(factor) + 1.0 if factor > 1 else 1.0


def _yarn_attention_factor(factor: float, p: Mapping[str, Any]) -> float:
    if p.get("attention_factor") is not None:
        return float(p["attention_factor"])
    if p.get("mscale") and p.get("mscale_all_dim"):
        return yarn_scale(factor, p["mscale"]) / yarn_scale(factor, p["mscale_all_dim"])
    return yarn_scale(factor)


def _llama3(base: torch.Tensor, p: Mapping[str, Any]) -> torch.Tensor:
    """Llama 3.1's scaling: frequencies of long wavelengths are divided by `factor`, those of short ones kept, with a
    smooth band between."""
    original, factor = p["original_max_position_embeddings"], p["factor"]
    low, high = p["low_freq_factor"], p["high_freq_factor"]
    wavelength = 2 * math.pi / base
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * base / factor + smooth * base
    out = torch.where(wavelength > original / low, base / factor, base)
    medium = (wavelength <= original / low) & (wavelength >= original / high)
    return torch.where(medium, blended, out)


class Rope(nn.Module):
    """Cosines and sines of every position up to `length`, computed once and shared by all steps."""

    cos: torch.Tensor
    """[length, D / 2] float32."""
    sin: torch.Tensor

    def __init__(self, spec: RopeSpec, length: int) -> None:
        super().__init__()
        self.spec = spec
        self.length = length

    @property
    def nbytes(self) -> int:
        """Of the tables, computed or not."""
        return 2 * self.length * -(-self.spec.dim // 2) * torch.float32.itemsize

    def prepare(self, device: torch.device | str) -> None:
        """Compute the tables. Not done when the model is built: that may be on the meta device, whose arithmetic
        imports torch's compiler, which takes a second or more."""
        inverse, factor = self.spec.frequencies()
        angles = torch.arange(self.length, device=device, dtype=torch.float32)[:, None] * inverse.to(device)
        self.register_buffer("cos", angles.cos() * factor, persistent=False)
        self.register_buffer("sin", angles.sin() * factor, persistent=False)


class Ropes(nn.ModuleList):
    """The tables of a model, one for all layers with the same rotation."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length

    def of(self, spec: RopeSpec) -> Rope:
        """The table for layers of this spec."""
        for rope in self:
            assert isinstance(rope, Rope)
            if rope.spec == spec:
                return rope
        self.append(Rope(spec, self.length))
        return self.of(spec)

    @property
    def nbytes(self) -> int:
        """Of all tables, computed or not."""
        return sum(rope.nbytes for rope in self if isinstance(rope, Rope))

    def prepare(self, device: torch.device | str) -> None:
        """Compute all tables."""
        for rope in self:
            assert isinstance(rope, Rope)
            rope.prepare(device)
