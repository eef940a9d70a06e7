"""The thread that commits run in, one after another, in the order in which they were asked for, and its forerunner.

It is woken by an eventfd and wakes the task that waits by another, so an answer costs no more than the two system calls
and one pass of the event loop. A commit is three steps: what may be written before the commits ahead of it are
synced, what may not, and the sync. Where a second one waits already, the first one's task is told only when the second
is written and its sync begins: so the event loop works while the device does, and not while this thread needs the
interpreter.

A second thread, the forerunner, does the first step of a large commit while this one is at the sync before it, so that
the device does not wait for the copying either. Whichever comes first to a commit's first step does it.

A task that is cancelled while it waits does not stop its write.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue

import trio

SWITCH_INTERVAL_S = 0.00005
PR_SET_TIMERSLACK = 29
# As os.eventfd_write, but it keeps the interpreter: the event loop that it wakes must not take it away before this
# thread is in its next system call, which is the sync that the device waits for.
_ring = ctypes.PyDLL(None).eventfd_write
_ring.argtypes = (ctypes.c_int, ctypes.c_uint64)

Failure = str | None


class CommitThread:
    def __init__(self) -> None:
        # The thread must get the interpreter back soon after a write or a sync, however busy the event loop is.
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_INTERVAL_S))
        self._jobs: deque[Job | Callable[[], object] | None] = deque()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._idle = False  # it sleeps, or is about to
        self._bells: list[int] = []  # eventfds that nobody waits for
        self._orphans: list[Job] = []  # of cancelled tasks; their bells are free again once they rang
        self._ahead: SimpleQueue[Job | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name="committer", daemon=True),
            threading.Thread(target=self._run_ahead, name="forerunner", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def begin(
        self, early: Callable[[], object], write: Callable[[], object], sync: Callable[[], Failure], *, large: bool
    ) -> Job:
        """All three, in the thread, when their turn comes; if it is `large`, `early` perhaps before that. None may
        raise."""
        job = Job(early, write, sync, self._bell())
        if large and not self._idle:
            self._ahead.put(job)
        self._give(job)
        return job

    async def ended(self, job: Job) -> Failure:
        """To be awaited once for each job: what its `sync` returned."""
        try:
            await trio.lowlevel.wait_readable(job.bell)
        except BaseException:
            self._orphans.append(job)
            raise
        os.eventfd_read(job.bell)
        self._bells.append(job.bell)
        return job.failure

    def afterwards(self, action: Callable[[], object]) -> None:
        """Behind all that was asked for until now."""
        self._give(action)

    def end(self) -> None:
        """After all that was asked for."""
        self._give(None)
        self._ahead.put(None)
        for thread in self._threads:
            thread.join()
        for bell in (self._wake, *self._bells, *(job.bell for job in self._orphans)):
            os.close(bell)

    def _give(self, job: Job | Callable[[], object] | None) -> None:
        self._jobs.append(job)
        if self._idle:
            os.eventfd_write(self._wake, 1)

    def _bell(self) -> int:
        if self._orphans:
            for job in [job for job in self._orphans if job.rang]:
                os.eventfd_read(job.bell)
                self._orphans.remove(job)
                self._bells.append(job.bell)
        return self._bells.pop() if self._bells else os.eventfd(0, os.EFD_CLOEXEC)

    def _run_ahead(self) -> None:
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)
        while (job := self._ahead.get()) is not None:
            job.do_early()

    def _work(self) -> None:
        # Without this the switch interval is 50 µs longer than it says, for this thread.
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)
        jobs = self._jobs
        done: Job | None = None  # and not told yet
        while True:
            if not jobs:
                if done is not None:  # the event loop shall find the interpreter free when it wakes
                    os.eventfd_write(done.bell, 1)
                    done.rang = True
                done = None
                self._idle = True
                if not jobs:  # one that came after this is not missed: its sender sees `_idle`
                    os.eventfd_read(self._wake)
                self._idle = False
                continue
            job = jobs.popleft()
            if isinstance(job, Job):
                job.do_early()
                job.write()
                _tell(done)
                job.failure = job.sync()
                done = job
                continue
            _tell(done)
            done = None
            if job is None:
                return
            job()


class Job:
    __slots__ = ("bell", "early", "early_lock", "failure", "rang", "sync", "write")

    def __init__(
        self, early: Callable[[], object], write: Callable[[], object], sync: Callable[[], Failure], bell: int
    ) -> None:
        self.write, self.sync, self.bell = write, sync, bell
        self.early: Callable[[], object] | None = early  # None: it is done
        self.early_lock = threading.Lock()
        self.failure: Failure = None
        self.rang = False

    def do_early(self) -> None:
        """Once, whoever calls; when this returns it is done."""
        with self.early_lock:
            if self.early is not None:
                self.early()
                self.early = None


def _tell(job: Job | None) -> None:
    """Wake the task that waits for it."""
    if job is not None:
        _ring(job.bell, 1)
        job.rang = True
