"""The port that the server listens on."""

from __future__ import annotations

import socket


def listen(host: str, port: int) -> socket.socket:
    """A socket bound to the address. Raises ValueError if it cannot be bound."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # asyncio sends small pieces at once (TCP_NODELAY) only if the protocol is given. Otherwise a body waits up to
        # 40 ms until its headers are acknowledged, and each token until the one before it is.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        raise ValueError(f"cannot listen on {host}:{port}: {error.strerror}; choose another host or port") from error
    return listener


def address_of(listener: socket.socket) -> str:
    """Its URL."""
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
