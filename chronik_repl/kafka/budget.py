"""A bound on bytes that several connections share: taken before they are held, given back when they are gone.

First come, first served: a large claim waits for room and is not overtaken by small ones for ever. Whether somebody
waits can itself be waited for: then it is time to look at those who hold room and do nothing with it.
"""

from __future__ import annotations

from collections import deque

import trio


class Budget:
    def __init__(self, bytes_max: int, gauge: dict[tuple[str, ...], float] | None = None) -> None:
        """`gauge` shows what is held, together with what else is counted in it."""
        self.bytes_max = bytes_max
        self.held = 0
        self._gauge: dict[tuple[str, ...], float] = {} if gauge is None else gauge
        self._gauge.setdefault((), 0)
        self._queue: deque[tuple[int, trio.Event]] = deque()
        self._crowded = trio.Event()

    @property
    def crowded(self) -> bool:
        """Does somebody wait for room?"""
        return bool(self._queue)

    async def wait_crowded(self) -> None:
        """Until somebody waits for room."""
        if not self._queue:
            self._crowded = trio.Event()
            await self._crowded.wait()

    def take_now(self, size: int) -> bool:
        """True if there was room. A claim larger than the whole budget gets it when nobody else holds anything."""
        if self._queue or (self.held and self.held + size > self.bytes_max):
            return False
        self._hold(size)
        return True

    def take_anyway(self, size: int) -> None:
        """For what turned out larger than was asked for."""
        self._hold(size)

    async def take(self, size: int) -> None:
        if self.take_now(size):
            return
        entry = (size, trio.Event())
        self._queue.append(entry)
        self._crowded.set()
        try:
            await entry[1].wait()
        except trio.Cancelled:
            if entry[1].is_set():
                self.give_back(size)
            else:
                self._queue.remove(entry)
                self._serve()
            raise

    def give_back(self, size: int) -> None:
        self._hold(-size)
        assert self.held >= 0
        if self._queue:
            self._serve()

    def _serve(self) -> None:
        while self._queue:
            size, event = self._queue[0]
            if self.held and self.held + size > self.bytes_max:
                return
            self._queue.popleft()
            self._hold(size)
            event.set()

    def _hold(self, size: int) -> None:
        self.held += size
        self._gauge[()] += size
