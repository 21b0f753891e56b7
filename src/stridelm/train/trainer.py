"""The training loop, for any objective: steps, validation, early decay and stopping, checkpoints,
resumption."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stridelm.train.objective import Objective, Validation
from stridelm.train.optimiser import Optimiser
from stridelm.train.progress import Reporter
from stridelm.train.record import JsonLines
from stridelm.train.schedule import Clock, rate
from stridelm.train.settings import OptimSettings, RunSettings
from stridelm.train.windows import Batches

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Result:
    """A run's result: its best validation, and all validations by step."""

    step: int
    tokens: int
    seconds: float
    best_step: int
    best: dict[str, float]
    curve: list[dict[str, float]]
    stopped: str


class Trainer:
    """Trains `objective.model` in place. Writes log.jsonl, state.pt (to resume from) and best.pt into `folder`."""

    def __init__(
        self,
        stage: str,
        objective: Objective,
        batches: Mapping[int, Batches],
        run: RunSettings,
        optim: OptimSettings,
        folder: Path,
    ) -> None:
        """batches: the training data, by each sequence length that the run uses."""
        self.stage, self.objective, self.run, self.optim, self.folder = stage, objective, run, optim, folder
        self.batches = batches
        self.device = next(objective.model.parameters()).device
        seconds = None if run.minutes is None else 60 * run.minutes
        self.clock = Clock(run.steps, seconds, optim.decay)
        self.optimiser = Optimiser(objective.model, optim)
        self.consumed = dict.fromkeys(batches, 0)
        self.best, self.best_step, self.waited = math.inf, 0, 0
        self.best_metrics: dict[str, float] = {}
        self.curve: list[dict[str, float]] = []
        self._judged = ""
        self._seen_lengths: set[int] = set()
        self._saved = time.monotonic()

    @property
    def tokens(self) -> int:
        """Tokens trained on so far."""
        return sum(length * count for length, count in self.consumed.items())

    def train(self) -> Result:
        """Run to the end and leave the best weights in the model. Raises FloatingPointError if the loss
        diverges."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.run.resume:
            self._restore()
        else:
            (self.folder / "log.jsonl").unlink(missing_ok=True)
        log = JsonLines(self.folder / "log.jsonl")
        stopped = "done"
        with Reporter(self.stage, self.run.log_seconds) as reporter:
            try:
                stopped = self._loop(log, reporter)
            except KeyboardInterrupt:
                self._save()
                logger.warning("interrupted at step %d; continue with --resume", self.clock.step)
                raise
            finally:
                log.close()
        self._load_best()
        return Result(
            self.clock.step,
            self.tokens,
            self.clock.elapsed,
            self.best_step,
            self.best_metrics,
            self.curve,
            stopped,
        )

    def _loop(self, log: JsonLines, reporter: Reporter) -> str:
        sums: dict[str, torch.Tensor] = {}
        mark = (time.monotonic(), self.tokens, self.clock.step)
        while not self.clock.done:
            began = time.monotonic()
            losses, first = self._step()
            self.clock.step += 1
            for name, value in losses.items():
                sums[name] = sums.get(name, 0.0) + value
            validated = self.clock.step % self.run.eval_steps == 0
            if self.clock.step % self.run.log_steps == 0 or validated:
                means = {name: (total / (self.clock.step - mark[2])).item() for name, total in sums.items()}
                now = time.monotonic()
                speed = (self.tokens - mark[1]) / max(1e-9, now - mark[0])
                self._log_step(log, reporter, means, speed)
                sums, mark = {}, (now, self.tokens, self.clock.step)
            if validated and self._validate(log):
                return "no improvement"
            if time.monotonic() - self._saved > 60 * self.run.save_minutes:
                self._save()
            if not first:  # the first step of a shape compiles, which is not training time
                self.clock.elapsed += time.monotonic() - began
        if self.clock.step % self.run.eval_steps or not self.curve:
            self._validate(log)
        self._save()
        return "done"

    def _step(self) -> tuple[dict[str, torch.Tensor], bool]:
        """One optimiser step. Returns losses to log, and whether this sequence length ran for the first
        time."""
        run = self.run
        short = run.short_length and self.clock.progress < run.short_share
        length = run.short_length if short else run.length
        count = run.batch_tokens // length
        ids = self.batches[length].batch(self.consumed[length], count)
        loss, losses = self.objective.loss(ids, self.clock.step)
        loss.backward()
        norm = self.optimiser.step(rate(self.clock.progress, self.optim.warmup, self.optim.decay))
        self.consumed[length] += count
        first = length not in self._seen_lengths
        self._seen_lengths.add(length)
        if first and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return {**losses, "norm": norm.detach()}, first

    def _log_step(self, log: JsonLines, reporter: Reporter, means: dict[str, float], speed: float) -> None:
        if not math.isfinite(means["loss"]):
            raise FloatingPointError(
                f"the loss became {means['loss']} near step {self.clock.step}; lower the learning rates"
            )
        factor = rate(self.clock.progress, self.optim.warmup, self.optim.decay)
        record = {"step": self.clock.step, "tokens": self.tokens, "seconds": round(self.clock.elapsed, 2)}
        log.write({**record, **means, "rate": factor, "tokens_per_second": round(speed)})
        reporter.update(self.clock, means, speed, self._judged)

    def _validate(self, log: JsonLines) -> bool:
        """Validate, keep the best weights, and return whether to stop."""
        result = self.objective.validate()
        record = {"step": self.clock.step, "tokens": self.tokens, "seconds": round(self.clock.elapsed, 2)}
        record |= {name: round(value, 5) for name, value in result.metrics.items()}
        self.curve.append(record)
        log.write({"valid": record})
        better = self._keep_if_best(result)
        self._judged = result.shown
        shown = " ".join(f"{name} {value:.4f}" for name, value in result.metrics.items())
        logger.info("%s step %d valid: %s%s", self.stage, self.clock.step, shown, " *" if better else "")
        self.waited = 0 if better else self.waited + 1
        if self.waited < self.run.patience:
            return False
        self.waited = 0
        if self.clock.decaying:
            return True
        logger.info("validation stopped improving by step %d: starting the decay early", self.clock.step)
        self.clock.begin_decay()
        return False

    def _keep_if_best(self, result: Validation) -> bool:
        if not result.score < self.best:
            return False
        self.best, self.best_step, self.best_metrics = result.score, self.clock.step, result.metrics
        _write(self.objective.model.state_dict(), self.folder / "best.pt")
        return True

    def _load_best(self) -> None:
        path = self.folder / "best.pt"
        if not math.isfinite(self.best):
            logger.warning("no validation was acceptable; keeping the last weights")
            return
        self.objective.model.load_state_dict(torch.load(path, map_location=self.device, weights_only=True))

    def _save(self) -> None:
        names = ("consumed", "best", "best_step", "best_metrics", "waited", "curve")
        state: dict[str, Any] = {name: getattr(self, name) for name in names}
        state |= {"stage": self.stage, "seed": self.run.seed, "clock": self.clock.state()}
        state |= {"model": self.objective.model.state_dict(), "optimiser": self.optimiser.state()}
        _write({**state, "objective": self.objective.state()}, self.folder / "state.pt")
        self._saved = time.monotonic()

    def _restore(self) -> None:
        path = resumable(self.folder)
        state = torch.load(path, map_location=self.device, weights_only=True)
        for name in ("stage", "seed"):
            mine = self.stage if name == "stage" else self.run.seed
            if state[name] != mine:
                raise ValueError(f"{path} was written with {name} {state[name]}, not {mine}; use the same one")
        self.objective.model.load_state_dict(state["model"])
        self.optimiser.restore(state["optimiser"])
        self.objective.restore(state["objective"])
        self.clock.restore(state["clock"])
        for name in ("best", "best_step", "best_metrics", "waited", "curve"):
            setattr(self, name, state[name])
        self.consumed |= state["consumed"]
        logger.info("resumed at step %d", self.clock.step)


def resumable(folder: Path) -> Path:
    """The file from which a run in `folder` is resumed. Raises ValueError if it does not exist."""
    path = folder / "state.pt"
    if not path.is_file():
        raise ValueError(f"nothing to resume: there is no {path}; start without --resume")
    return path


def _write(value: dict[str, Any], path: Path) -> None:
    """Write atomically: an interrupted write leaves the previous file."""
    partial = path.with_name(path.name + ".partial")
    torch.save(value, partial)
    partial.replace(path)
