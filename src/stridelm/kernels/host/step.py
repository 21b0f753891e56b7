"""A step's operations on a CPU: the plain ones, some of them compiled."""

from __future__ import annotations

from functools import partial

from stridelm.kernels import plain_logits
from stridelm.kernels.host.following import behind, compile_following, keep_newest, next_tokens, recall
from stridelm.kernels.host.sources import choose_sources, compile_sources, learn_sources
from stridelm.kernels.host.tables import HostTables, compile_tables
from stridelm.kernels.host.truncate import keep, nucleus
from stridelm.kernels.host.warm import compile_sampling


class HostStepOps(HostTables):
    truncate = staticmethod(partial(plain_logits.truncate, find_nucleus=nucleus))
    draw = staticmethod(partial(plain_logits.draw, keep=keep))

    behind = staticmethod(behind)
    next_tokens = staticmethod(next_tokens)
    keep_newest = staticmethod(keep_newest)
    recall = staticmethod(recall)

    choose_sources = staticmethod(choose_sources)
    learn_sources = staticmethod(learn_sources)

    def __init__(self) -> None:
        compile_tables()
        compile_following()
        compile_sources()
        compile_sampling()
