"""Training of a head for a frozen target, on the target's own continuations, with a loss at every depth of its chains.

Legend: B sequences of L tokens, P of them prompt; S chain starts at a depth, S1 at the first; K depths, M rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from stridelm.draft.heads import DraftHead
from stridelm.kernels.plain import PlainOps
from stridelm.models.layers.decoder import Decoder
from stridelm.train.continuations import Continuations, Plan, live_tokens
from stridelm.train.head_kinds import HeadKind
from stridelm.train.objective import EVAL_TOKENS, Validation, compiled, precision


class WideOps(PlainOps):
    """Keeps residual streams in the weights' precision although autocast's products are narrower."""

    def norm(self, x_NC: torch.Tensor, weight_C: torch.Tensor, eps: float) -> torch.Tensor:
        return super().norm(x_NC.to(weight_C.dtype), weight_C, eps)

    def add_norm(
        self, x_NC: torch.Tensor, delta_NC: torch.Tensor, weight_C: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return super().add_norm(x_NC.to(weight_C.dtype), delta_NC, weight_C, eps)

    def add_normed(
        self,
        x_NC: torch.Tensor,
        delta_NC: torch.Tensor,
        after_C: torch.Tensor,
        eps: float,
        factor_1: torch.Tensor | None = None,
        weight_C: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return super().add_normed(x_NC.to(after_C.dtype), delta_NC, after_C, eps, factor_1, weight_C)


class HeadObjective:
    """Trains `head` in place; its target is never changed."""

    def __init__(
        self,
        head: DraftHead,
        target: Decoder,
        kind: HeadKind,
        held_out: Continuations,
        *,
        compile: bool,
    ) -> None:
        self.model, self.target, self.kind = head, target.requires_grad_(False), kind
        head.ops = WideOps()
        device = target.norm.device
        self.plan, self.valid_VL = held_out.plan, held_out.on(device)
        greedy = torch.from_numpy(self.plan.is_greedy(0, self.plan.sequences)).to(device)
        self.judged_V = greedy if greedy.any() else ~greedy
        weights = kind.settings.discount ** torch.arange(kind.settings.unroll, device=device)
        self.weights_K = weights / weights.sum()
        self._forward = compiled(_losses, compile)

    def loss(self, ids_BT1: torch.Tensor, step: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """ids_BT1: whole sequences."""
        loss_K = self._forward(self.model, self.target, self.kind, ids_BT1, self.plan, len(self.weights_K))
        loss = (loss_K * self.weights_K).sum()
        return loss, {"loss": loss.detach(), "first": loss_K[0].detach(), "last": loss_K[-1].detach()}

    @torch.no_grad()
    def validate(self) -> Validation:
        """loss: as in training. tokens_a_step: tokens per step with such chains, the target's own token included.
        accept_j: of the chains that are right so far, the share whose guess at depth j is the target's next token.
        loss_j: nats at depth j. tokens_a_step and accept_j are over greedy continuations, if there are any."""
        depth, device = len(self.weights_K), self.valid_VL.device
        sums_K4 = torch.zeros(depth, 4, dtype=torch.float64, device=device)
        batch = max(1, EVAL_TOKENS // self.plan.length)
        with precision(device):
            for rows, judged in zip(self.valid_VL.split(batch), self.judged_V.split(batch), strict=True):
                sums_K4 += _judge(self.model, self.target, self.kind, rows.long(), self.plan, depth, judged)
        nats_K, right_K, live_K, reached_K = sums_K4.unbind(1)
        loss_K, accept_K = nats_K / live_K.clamp(min=1), right_K / reached_K.clamp(min=1)
        metrics = {"loss": (loss_K * self.weights_K).sum().item()}
        metrics["tokens_a_step"] = 1 + (right_K.sum() / reached_K[0].clamp(min=1)).item()
        metrics |= {f"accept_{j}": share for j, share in enumerate(accept_K.tolist(), 1)}
        metrics |= {f"loss_{j}": loss for j, loss in enumerate(loss_K.tolist(), 1)}
        shown = "accepts " + " ".join(f"{share:.3f}" for share in accept_K.tolist())
        return Validation(metrics["loss"], metrics, shown)

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        assert not state


@dataclass(frozen=True)
class Depth:
    """One depth of all chains, M = B * S of them."""

    hidden_MH: torch.Tensor
    """The head's output."""
    tokens_M: torch.Tensor
    """The target's token."""
    live_M: torch.Tensor
    """Whether there is one: nothing follows the end of a text."""
    nats_M: torch.Tensor
    """The head's loss."""


def depths(
    head: DraftHead, target: Decoder, kind: HeadKind, rows_BL: torch.Tensor, plan: Plan, depth: int
) -> Iterator[Depth]:
    """The chains after every entry from the prompt's last but one on: those that serving could start."""
    prompt = plan.prompt_tokens
    tokens_BS, live_BS = rows_BL[:, prompt:], live_tokens(rows_BL, prompt, plan.stops)
    with torch.no_grad():
        states = kind.states(head, target, rows_BL)
        before = states.final.unflatten(0, rows_BL.shape)[:, prompt - 1 : -1]
        sought = kind.sought(head, target, tokens_BS, before)
    for shift, hidden_BSH in enumerate(kind.unrolled(head, states, rows_BL, prompt - 2, depth)):
        hidden_MH = hidden_BSH.flatten(0, 1)
        nats_M = kind.nats(head, hidden_MH, sought[:, shift:].flatten(0, 1))
        yield Depth(hidden_MH, tokens_BS[:, shift:].flatten(), live_BS[:, shift:].flatten(), nats_M)


def _losses(
    head: DraftHead, target: Decoder, kind: HeadKind, rows_BL: torch.Tensor, plan: Plan, depth: int
) -> torch.Tensor:
    """[K] nats per token."""
    with precision(rows_BL.device):
        of_depth = list(depths(head, target, kind, rows_BL, plan, depth))
    return torch.stack([(d.nats_M * d.live_M).sum() / d.live_M.sum().clamp(min=1) for d in of_depth])


def _judge(
    head: DraftHead,
    target: Decoder,
    kind: HeadKind,
    rows_BL: torch.Tensor,
    plan: Plan,
    depth: int,
    judged_B: torch.Tensor,
) -> torch.Tensor:
    """[K, 4] float64 sums at each depth: nats, chains still right, live tokens, chains that reached this depth."""
    sums, right_BS = [], judged_B[:, None].expand(-1, rows_BL.shape[1] - plan.prompt_tokens)
    for d in depths(head, target, kind, rows_BL, plan, depth):
        starts = len(d.live_M) // len(rows_BL)
        reached_BS = right_BS[:, :starts] & d.live_M.view(-1, starts)
        right_BS = reached_BS & (head.logits(d.hidden_MH).argmax(-1) == d.tokens_M).view(-1, starts)
        of_depth = (d.nats_M * d.live_M, right_BS, d.live_M, reached_BS)
        sums.append(torch.stack([x.sum(dtype=torch.float64) for x in of_depth]))
    return torch.stack(sums)
