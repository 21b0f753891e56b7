"""The engine's process: a loop that handles messages, runs a step, and sends the step's output.

Nothing here blocks while a request runs: messages are read between steps, and sent whether or not the previous ones
have been read.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence

import msgspec
import zmq

from stridelm.cache.events import CacheEvents
from stridelm.config import EngineConfig
from stridelm.draft import DRAFTERS
from stridelm.draft.settle import best_drafter
from stridelm.engine.engine import Engine
from stridelm.engine.request_metrics import RequestMetrics
from stridelm.engine.start import start
from stridelm.heap import freeze_heap
from stridelm.params import SamplingParams, StructuredOutputs
from stridelm.run.malloc import TIDY_S, give_back_memory, share_arenas
from stridelm.server.compile_line import CompileLine
from stridelm.server.draft_limits import DraftLimits
from stridelm.server.kv_events import KVEventPublisher
from stridelm.server.lifeline import end_with
from stridelm.server.logs import set_up_logging
from stridelm.server.messages import (
    SCORED,
    Abort,
    Accepted,
    Attach,
    Beat,
    Cut,
    Delta,
    Detach,
    Failed,
    Finish,
    Flush,
    Flushed,
    Job,
    Orders,
    Ready,
    Refused,
    Report,
    Scores,
    Stop,
    Submit,
    encode,
    frontend_of,
    group_of,
    scores,
    to_engine,
    unpacked,
)
from stridelm.server.outlets import Outlets
from stridelm.types import Logprob, Request, StepOutput

logger = logging.getLogger(__name__)

IDLE_MS = 500
"""How long an idle engine waits for messages before it checks whether its parent still exists."""
COMPILING_MS = 5
SLACK_MS = 1
REPORT_S = 0.25
BEAT_S = 0.5


def main() -> None:
    """Serve until a Stop message. `python -m stridelm.server.engine_process`, started by supervisor.py."""
    share_arenas()
    orders = msgspec.json.decode(sys.stdin.buffer.read(), type=Orders)
    end_with(orders.parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the HTTP process ends this one, once its clients have been served
    set_up_logging(orders.log_level, orders.log_json)
    context = zmq.Context()
    receiver = context.socket(zmq.PULL)
    receiver.set_hwm(0)
    receiver.bind(orders.inbox)
    outlets = Outlets(context, orders.outbox)
    try:
        loop = _load(orders, receiver, outlets)
        if loop is not None:
            loop.run()
    finally:
        context.destroy(linger=1000)


def _load(orders: Orders, receiver: zmq.Socket[bytes], outlets: Outlets) -> Loop | None:
    publisher = None
    try:
        config = EngineConfig(**orders.config)
        events = CacheEvents(config.page_size)
        if orders.kv_events is not None:  # before anything is loaded: an endpoint that is taken is reported at once
            publisher = KVEventPublisher(orders.kv_events, events)
        engine = start(config)
        if publisher is not None:
            engine.ledger.tell(events)
    except Exception as error:
        if not isinstance(error, ValueError):
            logger.exception("the engine could not be loaded")
        outlets.send("", Failed(str(error), isinstance(error, ValueError)))
        return None
    freeze_heap()
    outlets.send("", _facts(engine))
    return Loop(engine, receiver, outlets, orders.parent, orders.limits, publisher)


def _facts(engine: Engine) -> Ready:
    target, parts = engine.loaded.target, engine.loaded
    speculation, _ = engine.intake.settled(SamplingParams())
    assert speculation.drafter is not None
    why = "as configured"
    if engine.config.drafter == "auto":
        why = f"auto: {best_drafter(engine.config.speculation, target)[1]}"
    return Ready(
        model=str(parts.path),
        drafter=speculation.drafter,
        depth=speculation.depth or 0,
        acceptance=speculation.rule,
        why=why,
        drafters=[name for name in DRAFTERS if DRAFTERS.get(name).why_not(target) is None],
        context=target.max_length,
        vocab_size=target.vocab_size,
        hidden_size=parts.model.spec.hidden_size,
        device=str(parts.device),
        dtype=str(parts.pool.dtype).removeprefix("torch."),
        pages=max(engine.ledger.total()),
        page_size=engine.ledger.page_size,
        mask_ids=list(target.mask_token_ids),
    )


class Loop:
    def __init__(
        self,
        engine: Engine,
        receiver: zmq.Socket[bytes],
        outlets: Outlets,
        parent: int,
        limits: DraftLimits | None = None,
        kv_events: KVEventPublisher | None = None,
    ) -> None:
        self.engine = engine
        self._kv_events = kv_events
        self._limits = limits
        self._receiver = receiver
        self._outlets = outlets
        self._parent = parent
        self._stopped = False
        self._grammars = CompileLine(lambda: engine.grammars, engine.compiled_grammars, engine.queue.__contains__)
        """Submissions that wait for their grammars to be compiled."""
        self._rids: dict[str, set[tuple[str, str]]] = {}
        """Group -> tenants and names of its samples. A group that is no longer open is dropped when the next comes."""
        self._reported = self._beaten = 0.0
        self._emitted = 0  # tokens, by the last report
        self._tidied = time.monotonic()
        self._settled = False
        """Whether the last report was of an idle engine: nothing changes until a message arrives."""

    def run(self) -> None:
        """Run until a Stop message, or until the parent is gone."""
        while not self._stopped and os.getppid() == self._parent:
            self._beat()
            self._take()
            self._release()
            deltas = self._step() if self.engine.busy else []
            self._outlets.emit(deltas, self._report())
            if self._kv_events is not None:
                self._kv_events.publish()
            self._tidy()
        if self._kv_events is not None:
            self._kv_events.close()

    def _beat(self) -> None:
        now = time.monotonic()
        if now - self._beaten >= BEAT_S:
            self._beaten = now
            self._outlets.send("", Beat())

    def _take(self) -> None:
        """Handle all messages that have arrived. Wait for more only if there is nothing to run, or if what runs would
        keep the device busy anyway: what arrives meanwhile is in the next step."""
        while not self._stopped and self.engine.slack:
            self._take_those(SLACK_MS)
        self._take_those(0 if self.engine.busy else COMPILING_MS if self._grammars.waiting else IDLE_MS)

    def _take_those(self, timeout: int) -> None:
        """Handle all messages that have arrived, once there is one. timeout: milliseconds to wait for it."""
        while self._receiver.poll(timeout):
            message = to_engine(self._receiver.recv())
            self._settled = False
            timeout = 0
            if isinstance(message, Submit):
                self._submit(message)
            elif isinstance(message, Abort):
                self._abort(message.ids)
            elif isinstance(message, Cut):
                self._cut(message)
            elif isinstance(message, Flush):
                self._flush(message)
            elif isinstance(message, Attach):
                self._outlets.attach(message.frontend, message.outbox)
            elif isinstance(message, Detach):
                self._detach(message.frontend)
            else:
                assert isinstance(message, Stop)
                self._stopped = True

    def _submit(self, message: Submit) -> None:
        """Queue all jobs; those with a grammar once a thread has compiled it."""
        if frontend_of(message.group) not in self._outlets:
            return  # from a front-end that has ended
        refusal = self._limit(message)
        if refusal is not None:
            self._answer(refusal)
            return
        grammars = {StructuredOutputs.of(g) for job in message.jobs if (g := job.params.get("structured_outputs"))}
        if not grammars:
            self._queue(message)
            return
        self._grammars.add(message, list(grammars))

    def _limit(self, message: Submit) -> Refused | None:
        """Why these samples cannot be open beside the others, if so. Only this process sees those of all front-ends."""
        more, most = sum(len(job.ids) for job in message.jobs), message.max_open
        own = self._own(message.tenant)
        if most is not None and self._open() + more > most and (own or more > most):
            return Refused(message.group, "too many samples are open", "max_open", self._open())
        if message.max_own is not None and own + more > message.max_own:
            return Refused(message.group, "too many samples of this key are open", "max_own", message.max_own)
        if message.rids and self._taken(message):
            return Refused(message.group, "a rid is in use", "rid")
        return None

    def _taken(self, message: Submit) -> bool:
        """Whether an open request of the same tenant has one of its names; otherwise they are its own from now on."""
        names = {(job.tenant, rid) for job in message.jobs for rid in message.rids}
        open_groups = {group_of(request.id) for request in self.engine.queue} | {
            held.group for held in self._grammars.waiting
        }
        self._rids = {group: names for group, names in self._rids.items() if group in open_groups}
        if any(not names.isdisjoint(others) for others in self._rids.values()):
            return True
        self._rids[message.group] = names
        return False

    def _open(self) -> int:
        """Number of samples that run or wait, also those that wait for a grammar."""
        return len(self.engine.queue) + sum(len(job.ids) for held in self._grammars.waiting for job in held.jobs)

    def _own(self, tenant: str) -> int:
        """The tenant's part of `_open`."""
        held = (len(job.ids) for held in self._grammars.waiting for job in held.jobs if job.tenant == tenant)
        return sum(request.tenant == tenant for request in self.engine.queue) + sum(held)

    def _flush(self, message: Flush) -> None:
        done = not self._open()
        if done:
            self.engine.forget()
        self._outlets.send(frontend_of(message.id), Flushed(message.id, done))

    def _detach(self, frontend: str) -> None:
        """Abort everything of a front-end that has ended."""
        self._outlets.detach(frontend)
        ids = [request.id for request in self.engine.queue if frontend_of(request.id) == frontend]
        held = [id for message in self._grammars.waiting for job in message.jobs for id in job.ids]
        self._abort(ids + [id for id in held if frontend_of(id) == frontend])

    def _release(self) -> None:
        """Queue the submissions with all grammars compiled."""
        for message, error in self._grammars.ready():
            if isinstance(error, ValueError):
                self._refuse(message.group, [], str(error))
            else:
                self._queue(message)  # any other error is raised again there

    def _queue(self, message: Submit) -> None:
        """Queue all jobs; if one of them cannot be served, queue none and send the reason."""
        added: list[str] = []
        try:
            for job in message.jobs:
                for request in self._add(job):
                    added.append(request.id)
        except ValueError as error:
            self._refuse(message.group, added, str(error))
        except Exception as error:
            logger.exception("requests of %s could not be queued", message.group)
            self._refuse(message.group, added, f"{type(error).__name__} inside the engine", internal=True)
        else:
            self._answer(Accepted(message.group))

    def _refuse(self, group: str, added: Sequence[str], why: str, *, internal: bool = False) -> None:
        for id in added:
            self.engine.abort(id)
        self._answer(Refused(group, why, "engine" if internal else "request"))

    def _answer(self, message: Accepted | Refused) -> None:
        self._outlets.send(frontend_of(message.group), message)

    def _add(self, job: Job) -> Iterator[Request]:
        """Each sample of a prompt, once it is queued."""
        prompt_ids, params = unpacked(job.prompt_ids).tolist(), SamplingParams(**job.params)
        if self._limits is not None:
            self._limits.check(self.engine.intake, params)
        for index, id in enumerate(job.ids):
            yield self.engine.add(
                id,
                prompt_ids,
                params,
                sample_index=index,
                tenant=job.tenant,
                bad_words=job.bad_words,
                seed=job.seed,
            )

    def _abort(self, ids: list[str]) -> None:
        """Drop requests and send their metrics; ids of requests that have already ended are ignored."""
        ended, gone = [], set(ids)
        for held in self._grammars.waiting:
            if any(gone.intersection(job.ids) for job in held.jobs):
                self._grammars.drop(held)
                self._answer(Refused(held.group, "the request was aborted"))
        for id in ids:
            request = self.engine.queue.get(id)
            if request is not None and self.engine.abort(id):
                ended.append(Delta(id, [], finish=_finish(request)))
        self._outlets.emit(ended)

    def _cut(self, message: Cut) -> None:
        """End a request whose text has met a stop string, and send its metrics. If it has ended, they were sent."""
        request = self.engine.queue.get(message.id)
        if request is None:
            return
        late = len(request.output_ids) - message.length
        self.engine.cut(request, message.length, message.stop_reason)
        self.engine.stats.emitted += late  # an earlier report may have counted them, and a counter never falls
        self._outlets.emit([Delta(message.id, [], finish=_finish(request))])

    def _step(self) -> list[Delta]:
        """One step. Raises EngineFault if the engine cannot go on: the process is then restarted."""
        return [self._delta(output) for output in self.engine.step()]

    def _delta(self, output: StepOutput) -> Delta:
        try:
            return _delta(output)
        except Exception as error:
            return _delta(self.engine.fail(output.request, error))

    def _report(self) -> Report | None:
        """A report every REPORT_S while there is work, and one when the engine becomes idle."""
        now, idle = time.monotonic(), not self.engine.busy and not self._grammars.waiting
        if (idle and self._settled) or (not idle and now - self._reported < REPORT_S):
            return None
        engine = self.engine
        emitted, since = engine.stats.emitted - self._emitted, now - self._reported
        self._emitted, self._reported, self._settled = engine.stats.emitted, now, idle
        return Report(
            stats=engine.stats,
            running=len(engine.queue.running),
            waiting=len(engine.queue.waiting),
            open=self._open(),
            pages=engine.ledger.counts(),
            row_budget=engine.steps.planner.rows.now,
            page_size=engine.ledger.page_size,
            pending_tokens=sum(max(one.known - one.computed - one.rows_in_flight - 1, 0) for one in engine.queue),
            tokens_per_s=0.0 if idle else max(emitted, 0) / since,
        )

    def _tidy(self) -> None:
        now = time.monotonic()
        if now - self._tidied > TIDY_S:
            self._tidied = now
            self._grammars.free_ended()
            give_back_memory()


def _delta(output: StepOutput) -> Delta:
    request = output.request
    logprobs: list[Scores] | None = None
    if output.logprobs is not None:
        logprobs = [scores(entry, token) for entry, token in zip(output.logprobs, output.new_token_ids, strict=True)]
    return Delta(
        request.id,
        output.new_token_ids,
        output.accepted,
        output.silent,
        request.all_or_nothing,
        logprobs,
        _prompt_scores(request, output.prompt_logprobs),
        None if output.hidden_states is None else output.hidden_states.numpy().tobytes(),
        _finish(request) if output.finished else None,
        request.stats.cached_tokens,
    )


def _prompt_scores(request: Request, entries: Sequence[dict[int, Logprob] | None] | None) -> list[bytes] | None:
    """Encoded SCORED positions at a time: decoded at once, they would be millions of objects."""
    if entries is None:
        return None
    return [
        encode(
            [
                None if entry is None else scores(entry, token)
                for entry, token in zip(
                    entries[begin : begin + SCORED], request.prompt_ids[begin : begin + SCORED], strict=True
                )
            ]
        )
        for begin in range(0, len(entries), SCORED)
    ]


def _finish(request: Request) -> Finish:
    return Finish(request.finish_reason or "abort", request.stop_reason, RequestMetrics.of(request), request.error)


if __name__ == "__main__":
    main()
