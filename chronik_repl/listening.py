"""Sockets that listen, for all three doors: Kafka's, HTTP's and the one for leaders."""

from __future__ import annotations

import errno
import socket

import trio

from chronik_repl.addresses import split_address
from chronik_repl.errors import ConfigError

BACKLOG = 512


async def listen(variable: str, address: str) -> list[socket.socket]:
    """A socket for each address that the host's name stands for, all on one port. Raises ConfigError."""
    host, port = split_address(address)
    listeners: list[socket.socket] = []
    try:
        found = await trio.socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, place in found:
            listener = socket.socket(family, kind, protocol)
            listeners.append(listener)
            listener.setblocking(False)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            if port == 0 and len(listeners) > 1:
                place = (place[0], listeners[0].getsockname()[1], *place[2:])
            listener.bind(place)
            listener.listen(BACKLOG)
    except OSError as error:
        for listener in listeners:
            listener.close()
        raise ConfigError(
            f"{variable}={address}: cannot listen there: {error.strerror or error}. {_what_to_do(error)}"
        ) from error
    return listeners


def for_trio(listeners: list[socket.socket]) -> list[trio.SocketListener]:
    return [trio.SocketListener(trio.socket.from_stdlib_socket(listener)) for listener in listeners]


def _what_to_do(error: OSError) -> str:
    if isinstance(error, socket.gaierror) or error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
        return "Name an address of this machine (`hostname -I` lists them), 127.0.0.1, or 0.0.0.0 for all of them."
    if error.errno in (errno.EACCES, errno.EPERM):
        return "Choose a port from 1024 on: those below are the system's."
    return "Choose another port, or end the program that has it (`ss -ltnp` shows it)."
