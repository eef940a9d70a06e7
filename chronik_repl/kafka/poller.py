"""Many quiet sockets, one task: requests that can be answered without waiting are taken where they arrive.

A task a connection is right for requests that wait; for a produce of one record its reschedulings cost more than the
request. So while a connection's task waits for bytes, it leaves its socket with the poller: one epoll set for all
connections, filled once a connection and edge-triggered, so that a request costs no system call but its own `recv`.
When bytes come the poller lets the connection take them (`take_bytes`); only when that says so is the task woken.

The same task watches the clock: a connection that is overdue is told.
"""

from __future__ import annotations

import select
from collections import deque
from typing import Protocol

import trio

EVENTS_MAX = 256
MORE = 0  # no event: what was left of the last one
CHECK_S_MIN = 0.05  # overdue connections are looked for no more often than this


class Polled(Protocol):
    """What the poller knows of a connection."""

    due: float  # when it will have been silent or slow for too long

    def take_bytes(self, now: float, *, to_the_end: bool) -> bool:
        """Receive and handle what is there, without waiting. True: there may be more, others have their turn first."""

    def overdue(self, now: float) -> None:
        """Its time is up, or it sets a later one."""


class Poller:
    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._connections: dict[int, Polled] = {}
        self._again: deque[int] = deque()  # had more than their turn's worth
        self._next_check = float("inf")
        self._scope = trio.CancelScope()

    def add(self, fileno: int, connection: Polled) -> None:
        self._connections[fileno] = connection
        self._epoll.register(fileno, select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLET)
        self.hurry(connection.due)

    def remove(self, fileno: int) -> None:
        """Before the socket is closed."""
        del self._connections[fileno]
        self._epoll.unregister(fileno)

    def hurry(self, due: float) -> None:
        """A connection is due at this time; look at the clock by then."""
        if due < self._next_check:
            self._next_check = self._scope.deadline = due

    async def run(self) -> None:
        """Until cancelled."""
        epoll, connections, again = self._epoll, self._connections, self._again
        while True:
            with trio.CancelScope(deadline=self._next_check) as self._scope:
                if again:
                    await trio.lowlevel.checkpoint()
                else:
                    await trio.lowlevel.wait_readable(epoll.fileno())
            ready = epoll.poll(0, EVENTS_MAX)
            for _ in range(len(again)):
                ready.append((again.popleft(), MORE))
            now = trio.current_time()
            for fileno, events in ready:
                connection = connections.get(fileno)
                if connection is not None and connection.take_bytes(now, to_the_end=events != select.EPOLLIN):
                    again.append(fileno)
            if now >= self._next_check:
                self._check(now)

    def close(self) -> None:
        self._epoll.close()

    def _check(self, now: float) -> None:
        for connection in list(self._connections.values()):
            if connection.due <= now:
                connection.overdue(now)
        waiting = (connection.due for connection in self._connections.values() if connection.due > now)
        self._next_check = max(min(waiting, default=float("inf")), now + CHECK_S_MIN)
