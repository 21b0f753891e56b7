"""Variables that Kubernetes puts into a pod's environment for every service of its namespace.

A service named `stride` or `stride-*` adds STRIDE_SERVICE_HOST, STRIDE_PORT=tcp://10.0.0.1:80 and similar variables,
which have the prefix of options but are not options.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_URL = r"(tcp|udp|sctp)://.*"
_NUMBER = r"\d+"
_SHAPES = (
    (r"SERVICE_HOST", r".*"),
    (r"SERVICE_PORT(_[A-Z0-9_]+)?", _NUMBER),
    (r"PORT", _URL),
    (r"PORT_\d+_(TCP|UDP|SCTP)", _URL),
    (r"PORT_\d+_(TCP|UDP|SCTP)_PROTO", r"tcp|udp|sctp"),
    (r"PORT_\d+_(TCP|UDP|SCTP)_PORT", _NUMBER),
    (r"PORT_\d+_(TCP|UDP|SCTP)_ADDR", r".*"),
)
"""Suffixes after the service's name, and the values of such variables."""


def service_links(environment: Mapping[str, str], prefix: str) -> list[str]:
    """The names of those that begin with `prefix`, sorted. A variable with an option's value, such as a port number, is
    not one of them."""
    ours = ((name, value) for name, value in environment.items() if name.startswith(prefix))
    return sorted(name for name, value in ours if _is_link(name.removeprefix(prefix), value))


def _is_link(name: str, value: str) -> bool:
    return any(re.fullmatch(rf"([A-Z0-9_]+_)?{shape}", name) and re.fullmatch(holds, value) for shape, holds in _SHAPES)
