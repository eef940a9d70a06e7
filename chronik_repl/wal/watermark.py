"""A position that only moves forward, and those who wait for it.

Waiters stand in a heap by position, so that an advance costs what it wakes. An advance that came first is never missed:
who asks for what is already there is not parked at all. A watcher is no task: it is told in the same step.
"""

from __future__ import annotations

import heapq
from itertools import count
from typing import Protocol

import outcome
import trio

from chronik_repl.positions import Position


class _Waiter:
    __slots__ = ("task",)

    def __init__(self, task: trio.lowlevel.Task) -> None:
        self.task: trio.lowlevel.Task | None = task


class Watcher(Protocol):
    """Hears of every move. It may not wait, and what it raises is a bug."""

    def passed(self, value: Position) -> None: ...

    def failed(self, error: BaseException) -> None:
        """As everyone who waits now."""


class Watermark:
    def __init__(self, value: Position) -> None:
        self.value = value
        self.watchers: list[Watcher] = []
        self._waiters: list[tuple[int, int, _Waiter]] = []
        self._ticket = count()
        self._gone = 0  # cancelled waiters that still stand in the heap
        self._dead: BaseException | None = None

    def advance(self, to: Position) -> None:
        """Ignores anything not higher."""
        if to <= self.value:
            return
        self.value = to
        waiters = self._waiters
        while waiters and waiters[0][0] <= to:
            task = heapq.heappop(waiters)[2].task
            if task is None:
                self._gone -= 1
            else:
                trio.lowlevel.reschedule(task)
        for watcher in self.watchers:
            watcher.passed(to)

    def reset(self, value: Position) -> None:
        """Truncation only: what stood above is gone. Nobody may be waiting for it."""
        self.value = value

    async def wait(self, position: Position) -> None:
        """Returns once value >= position; raises what is given to `fail` meanwhile."""
        if self._dead is not None:
            raise self._dead
        if self.value >= position:
            await trio.lowlevel.checkpoint_if_cancelled()
            return
        waiter = _Waiter(trio.lowlevel.current_task())
        heapq.heappush(self._waiters, (position, next(self._ticket), waiter))

        def forget(_: object) -> trio.lowlevel.Abort:
            waiter.task = None
            self._gone += 1
            if self._gone > 64 and self._gone * 2 > len(self._waiters):
                self._waiters = [entry for entry in self._waiters if entry[2].task is not None]
                heapq.heapify(self._waiters)
                self._gone = 0
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(forget)

    async def wait_beyond(self, position: Position) -> Position:
        """Returns the value once it is greater than `position`."""
        await self.wait(Position(position + 1))
        return self.value

    def fail(self, error: BaseException) -> None:
        """Everyone who waits now gets it. Who comes later waits as before."""
        waiters, self._waiters, self._gone = self._waiters, [], 0
        for _, _, waiter in waiters:
            if waiter.task is not None:
                trio.lowlevel.reschedule(waiter.task, outcome.Error(_again(error)))
        for watcher in self.watchers:
            watcher.failed(error)

    def fail_forever(self, error: BaseException) -> None:
        """The disk is dead: who comes later gets it too."""
        self._dead = error
        self.fail(error)


def _again(error: BaseException) -> BaseException:
    """Each waiter raises its own object, so that tracebacks do not grow into each other."""
    clone = error.__class__.__new__(error.__class__)
    clone.args = error.args
    clone.__dict__.update(error.__dict__)
    clone.__cause__ = error
    return clone
