"""Ports for nodes that are started and killed by tests."""

from __future__ import annotations

import contextlib
import random
import socket

# Below those that the system gives to outgoing connections: nobody's client may get the port of a node that is down
# for a moment. And none is given out twice.
_ports = iter(random.sample(range(20_000, 32_000), 12_000))


def free_port(host: str = "127.0.0.1") -> int:
    for port in _ports:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            return port
    raise AssertionError("no port is left")
