"""A step's operations on a CPU: the plain ones, some of them compiled."""

from __future__ import annotations

from stridelm.kernels.host.tables import HostTables, compile_tables


class HostStepOps(HostTables):
    def __init__(self) -> None:
        compile_tables()
