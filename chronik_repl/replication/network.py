"""The seam between nodes: `Network` dials and listens; what comes out are byte streams.

`TcpNetwork` (tcp.py) is the real one, with or without mutual TLS; the simulator has the other one
(tests/simulation/network.py). Time is trio's on both.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

import trio

from chronik_repl.wal.seam import Buffer


class Stream(Protocol):
    """A connection. One task sends at a time and one receives. After a cancelled send nobody knows what was sent: close
    it. Sends and receives raise trio.BrokenResourceError when the peer is gone, trio.ClosedResourceError after, or
    during, `aclose`. They need not let others run where they do not wait."""

    async def send_all(self, *pieces: Buffer) -> None:
        """One after another."""

    def send_now(self, *pieces: Buffer) -> bool:
        """The same without waiting. False: not all of it has left; the rest goes before whatever is sent next, and
        `send_all()` waits for it."""

    async def receive_into(self, buffer: memoryview, least: int = 1) -> int:
        """How many bytes came; 0 at the end of the stream. `least`: fewer are of no use, so it may wait for them, but
        need not."""

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
