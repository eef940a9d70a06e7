"""Simulated time: it stands still while anybody has something to do, and then jumps to what is due next.

Trio asks a clock how long to sleep only when no task is ready: that is the moment to jump. Beside trio's own deadlines
the clock keeps timers for the simulated disk and network, which wait at every call: a timer is a place in a heap, a
cancel scope for each of them would cost more than all that it waits for.
"""

from __future__ import annotations

import heapq
import itertools
import math

import trio

# What has no variable, as it is in simulated clusters (run.py), where heartbeats come twenty times as often.
HANDSHAKE_S = 1.0
DRAIN_S = 2.0


class Timer:
    """One task that waits: for a time, or for someone who knows this timer."""

    __slots__ = ("task",)

    def __init__(self, task: trio.lowlevel.Task) -> None:
        self.task: trio.lowlevel.Task | None = task

    def ring(self) -> None:
        """The task goes on now, if it has not yet."""
        task, self.task = self.task, None
        if task is not None:
            trio.lowlevel.reschedule(task)


class Stuck(Exception):
    """Every task waits, none for a time: also the one that was to end the story after so long, whose end is held up by
    a step that may not be cancelled."""


class SimClock(trio.abc.Clock):
    def __init__(self) -> None:
        self.now = 0.0
        self.over = False  # the story is told
        self._timers: list[tuple[float, int, Timer]] = []
        self._ticket = itertools.count()

    def start_clock(self) -> None:
        return

    def current_time(self) -> float:
        return self.now

    def deadline_to_sleep_time(self, deadline: float) -> float:
        timers = self._timers
        while timers and timers[0][2].task is None:
            heapq.heappop(timers)
        due = min(deadline, timers[0][0]) if timers else deadline
        if due == math.inf:
            if not self.over:
                raise Stuck("everything waits for ever")
            return due  # trio waits for its own
        self.now = max(self.now, due)
        while timers and timers[0][0] <= self.now:
            heapq.heappop(timers)[2].ring()
        return 0.0

    async def wait(self, until: float, known: dict[Timer, None] | None = None, *, cancellable: bool = True) -> None:
        """Until that time, or until someone takes the timer from `known` and rings it."""
        timer = Timer(trio.lowlevel.current_task())
        if until != math.inf:
            heapq.heappush(self._timers, (until, next(self._ticket), timer))
        if known is not None:
            known[timer] = None

        def abort(_: object) -> trio.lowlevel.Abort:
            if not cancellable:
                return trio.lowlevel.Abort.FAILED
            timer.task = None
            return trio.lowlevel.Abort.SUCCEEDED

        try:
            await trio.lowlevel.wait_task_rescheduled(abort)
        finally:
            if known is not None:
                known.pop(timer, None)


def ring_all(known: dict[Timer, None]) -> None:
    for timer in list(known):
        timer.ring()
