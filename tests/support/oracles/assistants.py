"""What an assistant drafts, by transformers' own classes: its model, and assisted generation around it.

Two things in transformers 5.23 are put right here, and nothing else:

- `Gemma4TextConfig.kv_sharing_modes` refuses a config whose layers all share, so that no assistant can be built, and
  names no layer to read in a target whose layers do not share. Its own comment says what it should return.
- After a step the assistant is passed the target's entries up to its last *token*, though that token has none yet: the
  last entry is that of the draft that was rejected for it, and layers with a window get all rejected entries. Here they
  are cut to the entries of known tokens; and of a window, to those that the row at the last token's position sees.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma4AssistantForCausalLM, Gemma4TextConfig
from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator

from support.oracles.heads import Drafted

FULL, SLIDING = "full_attention", "sliding_attention"


@contextmanager
def buildable() -> Iterator[None]:
    """Assistants can be built, and all targets say which layers they read."""

    def modes(config: Any) -> list[str | None]:
        count, shared = config.num_hidden_layers, config.num_kv_shared_layers
        own = config.layer_types[: count - shared]
        last = {kind: number for number, kind in enumerate(own)}
        kept = ["store" if last[kind] == number else None for number, kind in enumerate(own)]
        return [*kept, *["reuse"] * shared]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Gemma4TextConfig, "kv_sharing_modes", property(modes))
        yield


@dataclass
class Generated:
    tokens: list[int]
    drafts: list[tuple[int, list[int]]] = field(default_factory=list)
    """Of each step that drafts: how many tokens were known, and the draft."""
    forwards: int = 0
    """Of the target."""
    margin: float = float("inf")
    """The least lead of a drafted token over the runner-up."""


class Pair:
    """A Gemma 4 and an assistant, or an assistant alone for any target."""

    def __init__(self, target: Path, assistant: Path) -> None:
        load: dict[str, Any] = {"attn_implementation": "eager", "dtype": torch.float32}
        with buildable():
            self.target = AutoModelForCausalLM.from_pretrained(target, **load).eval()
            self.assistant = Gemma4AssistantForCausalLM.from_pretrained(assistant, **load).eval()

    def generate(self, prompt: Sequence[int], tokens: int, depth: int, *, cut: bool = True) -> Generated:
        """Greedy assisted generation with `depth` assistant tokens per step. cut: pass the assistant no entries but
        those of known tokens; without, all that transformers passes."""
        made = Generated([])
        get = SinglePositionMultiTokenCandidateGenerator.get_candidates
        window = getattr(self.target.config.get_text_config(), "sliding_window", None)

        def watched(generator: Any, input_ids: torch.Tensor, **given: Any) -> Any:
            made.forwards += 1
            if cut and given["model_outputs"] is not None:
                states = given["model_outputs"].shared_kv_states
                given["model_outputs"].shared_kv_states = known_entries(states, input_ids.shape[1], window)
            ids, logits = get(generator, input_ids=input_ids, **given)
            if logits is not None:
                known = input_ids.shape[1]
                made.drafts.append((known, ids[0, known:].tolist()))
                best = logits[0].topk(2).values
                made.margin = min(made.margin, float((best[:, 0] - best[:, 1]).min()))
            return ids, logits

        settings = self.assistant.generation_config
        settings.num_assistant_tokens, settings.num_assistant_tokens_schedule = depth, "constant"
        with buildable(), torch.inference_mode(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(SinglePositionMultiTokenCandidateGenerator, "get_candidates", watched)
            ids = self.target.generate(
                torch.tensor([list(prompt)]),
                assistant_model=self.assistant,
                max_new_tokens=tokens,
                do_sample=False,
                eos_token_id=None,
            )
        made.tokens = ids[0, len(prompt) :].tolist()
        return made


def known_entries(states: dict[str, Any], known: int, window: int | None) -> dict[str, Any]:
    """Entries before the last of `known` tokens; of the sliding layers, the last `window` - 1 of them."""
    extra = states[FULL][0].shape[2] - (known - 1)
    cut = {kind: tuple(part[:, :, : part.shape[2] - extra] for part in parts) for kind, parts in states.items()}
    if window is not None and SLIDING in cut:
        cut[SLIDING] = tuple(part[:, :, -(window - 1) :] for part in cut[SLIDING])
    return cut


class Assistant:
    """An assistant over any target's keys and values, which are computed anew for every draft."""

    def __init__(self, assistant: Path, target: Path) -> None:
        load: dict[str, Any] = {"attn_implementation": "eager", "dtype": torch.float32}
        with buildable():
            self.model = Gemma4AssistantForCausalLM.from_pretrained(assistant, **load).eval()
            self.target = AutoModelForCausalLM.from_pretrained(target, **load).eval()
        config = self.target.config.get_text_config()
        self.window = getattr(config, "sliding_window", None)
        own = config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", None) or 0)
        kinds = (getattr(config, "layer_types", None) or [FULL] * own)[:own]
        self.sources = {kind: number for number, kind in enumerate(kinds)}

    @torch.inference_mode()
    def __call__(self, ids: Sequence[int], guesses: Sequence[int]) -> Drafted:
        """The draft after the known tokens `ids`, as long as `guesses`, each guess made after those of `guesses` before
        it."""
        with buildable():
            run = torch.tensor([list(ids[:-1])])
            out = self.target.model(run, use_cache=True)
            states = {
                kind: (out.past_key_values.layers[layer].keys, out.past_key_values.layers[layer].values)
                for kind, layer in self.sources.items()
            }
            if self.window is not None and SLIDING in states:
                states[SLIDING] = tuple(part[:, :, -(self.window - 1) :] for part in states[SLIDING])
            # transformers makes a mask for either type of layer, whether there are such or not
            states |= {kind: states[FULL] for kind in (FULL, SLIDING) if kind not in states}
            hidden, rows = out.last_hidden_state[:, -1:], []
            for token in [ids[-1], *guesses][: len(guesses)]:
                embedded = self.target.get_input_embeddings()(torch.tensor([[token]]))
                said = self.model(
                    inputs_embeds=torch.cat([embedded, hidden], dim=-1),
                    position_ids=torch.tensor([[len(ids) - 1]]),
                    shared_kv_states=states,
                )
                rows.append(said.logits[0, 0])
                hidden = said.last_hidden_state
        logits = torch.stack(rows)
        return Drafted(logits.argmax(-1).tolist(), logits, torch.arange(logits.shape[1]))
