"""The seam between nodes: `Network` dials and listens; what comes out are byte streams.

`TcpNetwork` (tcp.py) is the real one, with or without mutual TLS; the simulator has the other one
(tests/simulation/network.py). Time is trio's on both.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

import trio


class Stream(Protocol):
    """A connection. After a cancelled `send_all` nobody knows what was sent: close it."""

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Raises trio.BrokenResourceError when the peer is gone."""

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        """b"" at the end of the stream."""

    async def aclose(self) -> None: ...


class Network(Protocol):
    async def dial(self, address: str) -> Stream:
        """To "host:port". Raises OSError; the caller sets the deadline."""

    async def listen(
        self,
        address: str,
        handler: Callable[[Stream], Awaitable[object]],
        *,
        task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Serve until cancelled, a task a connection; started with the bound "host:port". What a handler raises ends
        the process, but for what its peer's death explains."""
