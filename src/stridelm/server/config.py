"""How the HTTP side is set up: the fields become options of `stride serve`, beside the engine's own."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from stridelm.chat.formats import check_formats
from stridelm.config import EngineConfig
from stridelm.server.draft_limits import DraftLimits
from stridelm.server.kv_events import KVEventsConfig, read_kv_events_config
from stridelm.values import check_flag, option, settle_number

logger = logging.getLogger(__name__)

SEQS_PER_PROCESS, CORES_PER_PROCESS, MAX_CHOSEN = 64, 4, 8
"""How many front-end processes are chosen: no more than the requests that may run, and the cores, have work and room
for (docs/decisions/0011-server.md)."""

FLAGS = (
    *("protect_metrics", "enable_return_hidden_states", "enable_synthetic_acceptance"),
    *("incremental_streaming_output", "access_log", "log_json"),
)


@dataclass(frozen=True)
class ServerConfig:
    """Raises ValueError, on construction, for a value that could never work."""

    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 for all interfaces, to accept remote clients")
    port: int = option(8000, "port to listen on; 0 for any free port")
    api_key: Sequence[str] | None = option(None, "key that requests must send; repeated: any of them")
    api_server_count: int | None = option(
        None,
        "front-end processes, which speak HTTP for the engine's one process (vLLM's name); none for 1, or on a GPU one "
        "per 64 of max_num_seqs, at most 8 and one per 4 cores",
    )
    operator_key: Sequence[str] | None = option(
        None,
        "key that may do everything: flush the cache, abort others' requests, choose any priority; repeated: any of "
        "them",
    )
    allowed_hosts: Sequence[str] | None = option(
        None,
        "host name that requests may use for this server (Host), *.NAME for all names below it, * for any; repeated: "
        "any of them; default: any name, but at a loopback address only its own names",
    )
    protect_metrics: bool = option(False, "require the key at /metrics and /health too")
    served_model_name: Sequence[str] | None = option(
        None, "name of the model in requests and answers; repeated: any of them, the first in answers"
    )
    chat_template: str | None = option(None, "file with the chat template, if the model has none of its own")
    tool_call_parser: str = option(
        "auto",
        "format of the model's tool calls, by vLLM's names; auto: what its chat template shows; none: leave them",
    )
    reasoning_parser: str = option(
        "auto", "format of the model's reasoning, by vLLM's names; auto: as the chat template shows; none: leave it"
    )
    max_queue: int = option(1024, "maximum samples open at once, waiting or running; beyond it requests get 429")
    max_queue_per_key: int | None = option(
        None,
        "maximum samples that a client's key may have open; none for half of max_queue if there are several keys",
    )
    min_priority: int = option(0, "most urgent priority that a client's key may request: smaller numbers go first")
    max_depth: int = option(
        8, "deepest draft that a request may ask for, if the server's own is not deeper; a deeper one gets 400"
    )
    max_draft_rows: int = option(
        16, "most rows of a draft (a tree's nodes, and probes) that a request may ask for, likewise"
    )
    max_body_mib: float = option(16.0, "largest body of a request; a larger one gets 413")
    max_connections: int = option(
        4096,
        "maximum connections open at once; beyond it one that is waiting for a request is closed, or else new ones get "
        "503",
    )
    max_buffered_mib: float = option(
        1024.0, "memory for requests and unread answers of all connections; beyond it the one that holds most is closed"
    )
    max_unread_mib: float = option(
        256.0, "memory for one answer that is not streamed, or not read as it arrives; a larger one ends with an error"
    )
    h11_max_incomplete_event_size: int = option(
        65536, "maximum bytes of a request's line and headers (vLLM's name); more get 431"
    )
    timeout_head: float = option(10.0, "seconds in which a request's line and headers must arrive; then 408")
    timeout_body: float = option(300.0, "seconds in which a request's body must arrive; then 408")
    timeout_body_idle: float = option(10.0, "seconds without a byte before an incomplete body gets 408")
    timeout_keep_alive: int = option(5, "seconds that an idle connection is kept open for its next request")
    timeout_write: float = option(
        30.0,
        "seconds in which a client must read 16 KiB of a waiting answer; otherwise it is aborted",
    )
    request_timeout: float | None = option(None, "seconds that a request may take; none for no limit")
    drain_timeout: float = option(30.0, "seconds that running requests have to finish when the server is told to stop")
    engine_timeout: float = option(
        300.0, "seconds without a step after which the engine counts as hung and is restarted; a step may compile"
    )
    max_restarts: int = option(5, "maximum restarts in ten minutes of an engine that died")
    enable_return_hidden_states: bool = option(False, "let requests to /generate return hidden states, which are large")
    enable_synthetic_acceptance: bool = option(
        False, "let requests use simulated acceptance, whose output is not the model's; for benchmarks only"
    )
    incremental_streaming_output: bool = option(
        False, "events of /generate hold only the new text, not all of the text so far"
    )
    max_repeating_mib: float = option(
        64.0, "how much a stream of /generate may send before events with all of its text so far become less frequent"
    )
    max_prompt_scores: int = option(
        1 << 21, "maximum prompt log-probabilities per request: prompt tokens x most likely tokens x samples"
    )
    kv_events_config: str | None = option(
        None,
        "JSON that has the prefix cache's changes published over ZeroMQ, for routers (vLLM's name and keys): "
        '{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}, also replay_endpoint, topic, ...',
    )
    access_log: bool = option(True, "log a line for each request, with its acceptance")
    log_json: bool = option(False, "write log lines as JSON objects")

    def __post_init__(self) -> None:
        settle_number(self, "port", 0, 65535, whole=True)
        settle_number(self, "api_server_count", 1, 64, whole=True, optional=True)
        settle_number(self, "max_queue", 1, 2**31 - 1, whole=True)
        settle_number(self, "max_queue_per_key", 1, 2**31 - 1, whole=True, optional=True)
        settle_number(self, "min_priority", -(2**31), 2**31 - 1, whole=True)
        settle_number(self, "max_depth", 0, 64, whole=True)
        settle_number(self, "max_draft_rows", 0, 64, whole=True)
        settle_number(self, "max_body_mib", 0.0, 1024.0, open_low=True)
        settle_number(self, "request_timeout", 0.0, 1e6, open_low=True, optional=True)
        settle_number(self, "max_prompt_scores", 1, 2**31 - 1, whole=True)
        settle_number(self, "max_repeating_mib", 0.0, 1e6)
        settle_number(self, "drain_timeout", 0.0, 1e6)
        settle_number(self, "engine_timeout", 1.0, 1e6)
        settle_number(self, "max_connections", 1, 10**6, whole=True)
        settle_number(self, "max_buffered_mib", 0.0, 2.0**30, open_low=True)
        settle_number(self, "max_unread_mib", 0.0, 2.0**30, open_low=True)
        settle_number(self, "h11_max_incomplete_event_size", 1024, 2**26, whole=True)
        settle_number(self, "timeout_keep_alive", 0, 10**6, whole=True)
        for name in ("timeout_head", "timeout_body", "timeout_body_idle", "timeout_write"):
            settle_number(self, name, 0.0, 1e6, open_low=True)
        settle_number(self, "max_restarts", 0, 1000, whole=True)
        for name in FLAGS:
            check_flag(name, getattr(self, name))
        for name in ("api_key", "operator_key", "allowed_hosts", "served_model_name"):
            object.__setattr__(self, name, _names(name, getattr(self, name)))
        for name in ("api_key", "operator_key"):
            _check_keys(name, getattr(self, name) or ())
        if not self.api_key and not self.operator_key:
            if self.protect_metrics:
                raise ValueError("protect_metrics would have no effect without api_key; give one")
            if self.max_queue_per_key is not None or self.min_priority:
                raise ValueError("max_queue_per_key and min_priority would have no effect without api_key; give one")
        if self.api_server_count is not None and self.api_server_count > self.max_connections:
            raise ValueError(
                f"api_server_count {self.api_server_count}: each process needs one of max_connections "
                f"{self.max_connections}; raise that, or lower the count"
            )
        _ = self.kv_events  # raises if it is not valid
        if self.chat_template is not None and not Path(self.chat_template).is_file():
            raise ValueError(f"chat_template {self.chat_template} is not a file; name one that holds a Jinja template")

        check_formats(self.tool_call_parser, self.reasoning_parser)

    def resolve(self, engine: EngineConfig, cores: int | None = None) -> ServerConfig:
        """With the number of front-end processes chosen. cores: that this process may use; by default what the system
        says."""
        if self.kv_events is not None and not engine.enable_prefix_caching:
            raise ValueError("kv_events_config would have no effect without enable_prefix_caching; leave it out")
        if self.api_server_count is not None:
            return self
        cores = len(os.sched_getaffinity(0)) if cores is None else cores
        load = -(-engine.max_num_seqs // SEQS_PER_PROCESS)
        count = max(min(cores // CORES_PER_PROCESS, load, MAX_CHOSEN, self.max_connections), 1)
        if count > 1 and not _on_gpu(engine.device):
            count = 1  # the engine needs the cores itself
        if count > 1:
            logger.info("api_server_count %d: for max_num_seqs %d on %d cores", count, engine.max_num_seqs, cores)
        return replace(self, api_server_count=count)

    def names_of(self, model: str | None) -> tuple[str, ...]:
        """The model's names in requests; answers have the first."""
        own = "built-in" if model is None else Path(model).resolve().name
        return tuple(self.served_model_name or (own,))

    @property
    def kv_events(self) -> KVEventsConfig | None:
        """How the prefix cache's events are published; None if they are not."""
        return None if self.kv_events_config is None else read_kv_events_config(self.kv_events_config)

    @property
    def draft_limits(self) -> DraftLimits:
        return DraftLimits(self.max_depth, self.max_draft_rows)

    @property
    def places_per_key(self) -> int:
        """Samples that one client may have open."""
        keys = len({*(self.api_key or ()), *(self.operator_key or ())})
        shared = max(self.max_queue // 2, 1) if keys > 1 else self.max_queue
        return shared if self.max_queue_per_key is None else self.max_queue_per_key


def _check_keys(name: str, keys: Sequence[str]) -> None:
    """Raise ValueError for a key that no request could send. The error does not show it: it may be logged."""
    for number, key in enumerate(keys, 1):
        if not re.fullmatch("[!-~]+", key):
            raise ValueError(
                f"{name}: key {number} of {len(keys)} has white space, a control character or one outside ASCII, which "
                "the header that sends it cannot have; choose letters, digits and punctuation of ASCII"
            )


def _on_gpu(device: str) -> bool:
    if device != "auto":
        return device != "cpu"
    import torch  # takes seconds and memory: only where the answer matters

    return torch.cuda.is_available()


def _names(name: str, value: Sequence[str] | None) -> tuple[str, ...] | None:
    """A single name is a list of one."""
    if value is None:
        return None
    names = (value,) if isinstance(value, str) else tuple(value)
    if not names or not all(isinstance(one, str) and one for one in names):
        raise ValueError(f"{name} must be one or several non-empty strings")
    return names
