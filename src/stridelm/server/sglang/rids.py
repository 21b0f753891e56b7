"""Open requests by the names that clients gave them (rid), so that they can be aborted from another connection."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from fastapi import FastAPI

from stridelm.server.callers import EVERYBODY, Caller
from stridelm.server.engine_client import EngineClient
from stridelm.server.errors import bad_request, rid_taken
from stridelm.server.generation import Generation
from stridelm.server.messages import Abort


class Call:
    """One request to /generate, with the names of its samples."""

    def __init__(self, rids: list[str], groups: Sequence[tuple[str, list[int]]] = ()) -> None:
        """rids: a name for each sample. groups: further names, and the samples that each refers to."""
        self.rids = rids
        self.given: list[str] = [*rids, *(name for name, _ in groups)]
        """Those that the client gave."""
        self.names: list[tuple[str, list[int]]] = [*((rid, [i]) for i, rid in enumerate(rids)), *groups]
        self.end = lambda: None
        """Frees the names."""
        self._running: tuple[EngineClient, Generation] | None = None
        self._unwanted: list[int] = []

    @classmethod
    def of(cls, rid: str | list[str] | None, prompts: int, n: int, many: bool) -> Call:
        """rid: from the request; samples that share a name get their index as a suffix."""
        count = prompts * n
        if rid is None:
            call = cls([uuid.uuid4().hex for _ in range(count)])
            call.given = []
            return call
        if isinstance(rid, str):
            return cls([f"{rid}_{i}" for i in range(count)], [(rid, list(range(count)))]) if many else cls([rid])
        if len(rid) != prompts:
            raise bad_request(f"rid has {len(rid)} entries for {prompts} prompts; give one for each", "rid")
        if n == 1:
            return cls(rid)
        groups = [(name, list(range(p * n, p * n + n))) for p, name in enumerate(rid)]
        return cls([f"{name}_{i}" for name in rid for i in range(n)], groups)

    def start(self, engine_client: EngineClient, generation: Generation) -> None:
        """Called once the samples are in the engine. Those that were aborted meanwhile are ended."""
        self._running = engine_client, generation
        before = generation.on_end

        def ended() -> None:
            before()
            self.end()

        generation.on_end = ended
        if not generation.open_ids:
            self.end()
        self.cut(self._unwanted)

    def cut(self, samples: Sequence[int]) -> None:
        """End these samples, with the finish reason abort."""
        if self._running is None:
            self._unwanted = [*self._unwanted, *samples]
            return
        engine_client, generation = self._running
        running = [id for id in (generation.ids[i] for i in samples) if id in engine_client.open]
        if running:
            engine_client.send(Abort(running))


class Rids:
    """The names of open requests. Each tenant has its own names."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, str], tuple[Call, list[int]]] = {}
        """(tenant, name) -> the request and samples that it refers to."""

    def take(self, call: Call, tenant: str = "") -> None:
        """Register the call's names. Raises ApiError if a name is in use, or occurs twice."""
        names = [(tenant, name) for name, _ in call.names]
        if len(set(names)) < len(names) or not self._open.keys().isdisjoint(names):
            raise rid_taken()
        self._open.update({(tenant, name): (call, samples) for name, samples in call.names})
        call.end = lambda: self._free(names, call)

    def abort(self, rid: str, caller: Caller = EVERYBODY) -> bool:
        """End the caller's samples of this name; for an operator, every tenant's. Returns whether there were any."""
        tenants = {tenant for tenant, _ in self._open} if caller.operator else {caller.tenant}
        matches = [self._open[tenant, rid] for tenant in tenants if (tenant, rid) in self._open]
        for call, samples in matches:
            call.cut(samples)
        return bool(matches)

    def _free(self, names: Sequence[tuple[str, str]], call: Call) -> None:
        for name in names:
            if self._open.get(name, (None,))[0] is call:
                del self._open[name]


def rids_of(app: FastAPI) -> Rids:
    """The application's names, created on first use."""
    if not hasattr(app.state, "rids"):
        app.state.rids = Rids()
    rids: Rids = app.state.rids
    return rids
