"""Variables that Kubernetes puts into a pod's environment for every service of its namespace.

A service named `stride`, or `stride-` and something, brings STRIDE_SERVICE_HOST, STRIDE_PORT=tcp://10.0.0.1:80 and more
of their kind, which begin as options do and are none.
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
"""What stands behind the service's name, and what such a variable holds."""


def service_links(environment: Mapping[str, str], prefix: str) -> list[str]:
    """The names of those that begin with `prefix`, sorted. An option's own value, such as a port's number, is none."""
    ours = ((name, value) for name, value in environment.items() if name.startswith(prefix))
    return sorted(name for name, value in ours if _is_link(name.removeprefix(prefix), value))


def _is_link(name: str, value: str) -> bool:
    return any(re.fullmatch(rf"([A-Z0-9_]+_)?{shape}", name) and re.fullmatch(holds, value) for shape, holds in _SHAPES)
