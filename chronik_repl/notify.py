"""Tell systemd how we are (sd_notify): READY=1, STOPPING=1, STATUS=…. Nothing happens where nobody listens."""

from __future__ import annotations

import os
import socket


def notify(message: str) -> None:
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    path = "\0" + address[1:] if address.startswith("@") else address
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as out:
        try:
            out.connect(path)
            out.send(message.encode())
        except OSError:
            return  # a supervisor that does not listen is no reason to stop
