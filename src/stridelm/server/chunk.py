"""What has arrived for a sample and waits to be sent."""

from __future__ import annotations

from dataclasses import dataclass, field

from stridelm.server.messages import Delta, Finish, Scores

MAX_CHUNK = 64 << 10
"""Bytes (of `held`) beyond which nothing is added to a chunk: an event is made in one go."""
CHUNK, TOKEN, SCORE, VERIFIED = 400, 100, 160, 16
"""Bytes of the objects themselves; VERIFIED is a verify step in SpecDecodeMetrics. A score's text is usually short and
not shared."""


@dataclass(slots=True)
class Chunk:
    """The output of one step, or of several that were put together."""

    token_ids: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    """For each token, the text that it made final."""
    steps: list[tuple[int, int]] = field(default_factory=list)
    """For each step with tokens: how many, and how many of them were guessed (types.StepOutput.accepted)."""
    logprobs: list[Scores] | None = None
    prompt_logprobs: list[bytes] | None = None
    """messages.Delta.prompt_logprobs."""
    hidden_states: list[bytes] = field(default_factory=list)
    """messages.Delta.hidden_states, of each step that has any."""
    finish: Finish | None = None
    held: int = 0
    """Approximate bytes of memory."""
    cached_tokens: int = 0
    """messages.Delta.cached_tokens; 0 if the chunk has no tokens."""

    @classmethod
    def of(cls, delta: Delta) -> Chunk:
        """The delta without text. It takes over the delta's lists."""
        ids, scores = delta.token_ids, delta.logprobs
        held = CHUNK + TOKEN * len(ids)
        if scores is not None:
            held += SCORE * sum(map(len, scores))
        if delta.prompt_logprobs is not None:
            held += sum(map(len, delta.prompt_logprobs))
        states = [] if delta.hidden_states is None else [delta.hidden_states]
        held += sum(map(len, states))
        drafts = None if delta.finish is None else delta.finish.metrics.speculative_decoding
        if drafts is not None and drafts.per_step_drafted is not None:
            held += VERIFIED * len(drafts.per_step_drafted)
        steps = [(len(ids), delta.accepted)] if ids else []
        return cls(ids, [], steps, scores, delta.prompt_logprobs, states, delta.finish, held, delta.cached_tokens)

    def put(self, pieces: list[str]) -> None:
        """Set the text."""
        self.pieces = pieces
        self.held += sum(map(len, pieces))

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def accepted(self) -> int:
        """How many of the tokens were guessed."""
        return sum(accepted for _, accepted in self.steps)

    def add(self, later: Chunk) -> None:
        """Append what came after it."""
        self.token_ids += later.token_ids
        self.pieces += later.pieces
        self.steps += later.steps
        if self.logprobs is None:
            self.logprobs = later.logprobs
        else:
            self.logprobs += later.logprobs or ()
        self.prompt_logprobs = self.prompt_logprobs or later.prompt_logprobs
        self.hidden_states += later.hidden_states
        self.finish = later.finish
        self.held += later.held
        self.cached_tokens = max(self.cached_tokens, later.cached_tokens)
