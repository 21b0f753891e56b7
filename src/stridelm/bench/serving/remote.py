"""The target behind an address: any server with OpenAI's completions or chats, or with SGLang's /generate."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from stridelm.bench.http.answer import Answer
from stridelm.bench.http.formats import FORMATS, Wanted
from stridelm.bench.http.load import send
from stridelm.bench.http.server import Server
from stridelm.bench.serving.loads import Load
from stridelm.bench.serving.record import Completion, Run
from stridelm.bench.serving.target import Ask, Way
from stridelm.bench.variants import read_entry

STRIDE, VLLM = "stride", "vllm"
FLUSHES = ("/flush_cache?timeout=10", "/reset_prefix_cache")
"""Stride's and SGLang's route, and that of vLLM in its development mode."""
SCORE_S = 600.0


class Remote:
    def __init__(self, server: Server, backend: str, temperature: float) -> None:
        """backend: of FORMATS. temperature: of all requests."""
        self.server = server
        self._backend = backend
        self._format = FORMATS[backend]
        self._temperature = temperature

    @property
    def name(self) -> str:
        return self.server.name

    @property
    def about(self) -> dict[str, str]:
        owner = {"server": self.server.owner} if self.server.owner else {}
        return {"model": self.server.model, **owner, "backend": self._backend}

    def plain(self) -> Way | None:
        if self.server.owner != STRIDE:
            return None
        return Way("plain", "off", lossless=True, repeats=False)

    def way(self, entry: str | None) -> Way:
        if entry is None and self.server.owner != STRIDE:
            return Way("default", None, lossless=None, repeats=False)
        if self.server.owner != STRIDE:
            raise ValueError(
                f"drafter {entry!r}: requests choose a drafter only at a Stride server, and {self.name} does not say "
                "that it is one; leave the drafter out to measure it as it is configured"
            )
        speculation = None if entry is None else read_entry(entry).given
        if speculation is not None and "acceptance_length" in speculation:
            speculation["acceptance"] = f"{speculation['acceptance']}:{speculation.pop('acceptance_length'):g}"
        settled = self._settled(speculation)
        if settled["drafter"] == "none" or settled["depth"] == 0:
            return Way("plain", "off", lossless=True, repeats=False)
        depth = f"{settled['drafter']}@{settled['depth']}"
        rule = "" if settled["acceptance"] == "exact" else f":{settled['acceptance']}"
        label = (depth + rule if entry is None else entry) + "*" * (not settled["lossless"])
        # Whether outputs repeat bit by bit also depends on the server's device and options.
        return Way(
            label,
            speculation,
            settled["lossless"],
            repeats=False,
            simulated=settled["simulated"],
            drafter=settled["drafter"],
            adaptive=settled["depth"] == "auto",
        )

    def check(self, asks: Sequence[Ask]) -> None:
        """Nothing: the APIs do not say how long a context is."""

    def run(self, asks: Sequence[Ask], load: Load, arrivals: Sequence[float] | None, way: Way) -> Run:
        bodies = [json.dumps(self._format.body(self._wanted(ask, way))).encode() for ask in asks]
        try:
            sent = send(self.server, self._format.route, bodies, load.max_concurrency, arrivals)
        except OSError as error:
            raise ValueError(f"{self.name} takes no connections: {error}; is it still running?") from error
        completions: list[Completion | None] = []
        errors = []
        for number, answer in enumerate(sent.answers):
            try:
                completions.append(self._completion(answer))
            except ValueError as error:
                completions.append(None)
                errors.append(f"request {number}: {error}")
        return Run(sent.seconds, tuple(completions), tuple(errors), sent.busy)

    def flush(self) -> None:
        reasons = []
        for route in FLUSHES:
            try:
                self.server.ask(route, {})
            except ConnectionError as error:
                reasons.append(str(error))
            else:
                return
        raise ValueError(
            f"{self.name} did not flush its prefix cache ({'; '.join(reasons)}); allow it, or measure with "
            "--prefix-cache warm"
        )

    def losses(self, asks: Sequence[Ask], completions: Sequence[Completion]) -> list[float | None]:
        if self.server.owner != STRIDE:
            raise ValueError(f"{self.name} cannot score outputs: only a Stride server is asked to; leave --loss out")
        return [self._loss(ask, each) for ask, each in zip(asks, completions, strict=True)]

    def _loss(self, ask: Ask, completion: Completion) -> float | None:
        if not completion.token_ids:
            return None
        prompt = self.server.ask("/tokenize", {"prompt": ask.prompt.text}, SCORE_S)["tokens"]
        body = {
            "model": self.server.model,
            "prompt": [*prompt, *completion.token_ids],
            "max_tokens": 0,
            "echo": True,
            "logprobs": 0,
            "temperature": 0,
            "speculation": "off",
        }
        answer = self.server.ask("/v1/completions", body, SCORE_S)
        entries = answer["choices"][0]["logprobs"]["token_logprobs"][-len(completion.token_ids) :]
        return -math.fsum(entries) / len(entries)

    def _settled(self, speculation: dict[str, Any] | None) -> dict[str, Any]:
        """What the server makes of a speculation: drafter, depth, acceptance, lossless, simulated."""
        more = {} if speculation is None else {"speculation": speculation}
        body = {"model": self.server.model, "prompt": "a", "max_tokens": 1, "temperature": self._temperature, **more}
        try:
            answer = self.server.ask("/v1/completions", body, SCORE_S)
        except ConnectionError as error:
            raise ValueError(f"{self.name} refuses the speculation {speculation}: {error}") from error
        settled: dict[str, Any] = answer["choices"][0]["speculation"]
        return settled

    def _wanted(self, ask: Ask, way: Way) -> Wanted:
        return Wanted(
            model=self.server.model,
            messages=[(message.role, message.content) for message in ask.prompt.messages],
            text=ask.prompt.text,
            max_tokens=ask.max_tokens,
            temperature=ask.temperature,
            ignore_eos=ask.ignore_eos,
            seed=ask.seed,
            speculation=way.speculation,
            ids=self.server.owner in (STRIDE, VLLM),
        )

    def _completion(self, answer: Answer | Exception) -> Completion:
        """Raises ValueError for an answer that is an error or is incomplete."""
        if isinstance(answer, Exception):
            raise ValueError(str(answer)) from answer
        answered = self._format.read(answer.events())
        return Completion(
            at=[when - answer.sent for when in answered.at],
            tokens=answered.tokens,
            prompt_tokens=answered.prompt_tokens,
            text=answered.text,
            token_ids=None if answered.token_ids is None else tuple(answered.token_ids),
            steps=answered.steps,
            drafted=answered.drafted,
            accepted=answered.accepted,
            finish_reason=answered.finish_reason,
        )
