"""The simulated disk: `Disk` over a `Medium`, with simulated time and every trouble that a disk can make.

One `SimDisk` is one run of a process. `crash()` is kill -9: the page cache survives, what was in flight does not,
and this object is dead: its calls never return and change nothing any more. `power_cut()` also loses any part of what
was not synced. `reopen()` is the next run, over what is left. Everything follows from the `random.Random` given and
trio's clock, so one seed is one story.

Troubles, each armed by hand: `fail_sync_in(n)`, `capacity_bytes`, `rot(name, at)`, `misplace_in(n)`, `slowness`, and
`stall()` / `resume()`, the device that simply does not answer for a while.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import NoReturn, TypeVar

import trio

from chronik_repl.errors import DiskFailed, DiskFull, ForeignLog
from chronik_repl.wal.disk import Buffer, File, Write
from tests.simulation.medium import SECTOR, Change, Entry, Event, Medium

T = TypeVar("T")

CALL_S = 20e-6
SYNC_S = 200e-6
BYTES_PER_S = 1e9


class SimFile:
    def __init__(self, name: str, inode: int) -> None:
        self.name = name
        self.inode = inode
        self.closed = False

    def close(self) -> None:
        self.closed = True


class SimDisk:
    def __init__(self, rng: random.Random, medium: Medium | None = None) -> None:
        self.rng = rng
        self.medium = medium or Medium()
        self.capacity_bytes = 1 << 50
        self.slowness = 1.0
        self._failure: str | None = None
        self._death = trio.Event()
        self._commits = trio.StrictFIFOLock()
        self._running = trio.Event()
        self._running.set()
        self._files: list[SimFile] = []
        self._asides = itertools.count()
        self._fail_sync_in = 0
        self._misplace_in = 0
        self._locked = False
        self.syncs = 0

    # Troubles

    @property
    def dead(self) -> bool:
        return self._death.is_set()

    def crash(self) -> None:
        """kill -9: what was written stays in the page cache, unsynced as it is."""
        self._death.set()
        self._running.set()

    def power_cut(self, rng: random.Random | None = None) -> None:
        """A crash that also loses any part of what was not synced: usually all or a torn part of it."""
        self.crash()
        rng = rng or self.rng
        lucky = [rng.choice((0.0, 0.1, 0.5, 0.9, 1.0)) for _ in self.medium.undecided()]
        torn_at = [rng.random() if rng.random() < 0.5 else None for _ in lucky]

        def keep(number: int, change: Change | Entry, sector: int) -> bool:
            torn = torn_at[number]
            if torn is None or isinstance(change, Entry) or not change.data:
                return rng.random() < lucky[number]
            return (sector - change.at) < torn * len(change.data)  # a prefix: the common case

        self.medium.cut(keep, grow=rng.random() < 0.5)

    def reopen(self) -> SimDisk:
        """The next process over the same medium. The old one must be dead, or closed."""
        assert self.dead or not self._locked
        disk = SimDisk(self.rng, self.medium)
        disk.capacity_bytes, disk.slowness = self.capacity_bytes, self.slowness
        return disk

    def fail_sync_in(self, n: int) -> None:
        """The nth sync from now (1: the next) fails, and leaves its pages clean: no later sync writes them."""
        self._fail_sync_in = n

    def misplace_in(self, n: int) -> None:
        """The nth write from now goes to another sector of its file, and the device says that all is well."""
        self._misplace_in = n

    def rot(self, name: str, at: int | None = None) -> int:
        """One bit of the file changes by itself. Returns where."""
        size = len(self.medium.bytes_of(name))
        at = self.rng.randrange(size) if at is None else at
        self.medium.rot(name, at, self.rng.randrange(8))
        return at

    def stall(self) -> None:
        """No call returns until `resume`."""
        self._running = trio.Event()

    def resume(self) -> None:
        self._running.set()

    def record(self) -> list[Event]:
        return self.medium.record()

    # Disk

    async def open(self, name: str, *, create: bool = False) -> File:
        await self._call()
        inode = self.medium.find(name)
        if inode is None:
            if not create:
                raise FileNotFoundError(name)
            self._check()
            inode = self.medium.create(name)
        file = SimFile(name, inode)
        self._files = [other for other in self._files if not other.closed]
        self._files.append(file)
        return file

    async def commit(self, file: File, writes: Sequence[Write]) -> None:
        assert isinstance(file, SimFile)
        assert not file.closed
        self._check()
        writes = [Write(at, [b"".join(buffers)]) for at, buffers in writes]
        await self._finish(lambda: self._commit(file, writes))

    def begin(self, file: File, early: Write, late: Write) -> Callable[[], Awaitable[None]]:
        """While another commit is under way the early part is written at once; what is cut then may keep it and lose
        what stands before it. Otherwise the device is slow: nothing has happened when someone comes to wait."""
        assert isinstance(file, SimFile)
        assert not file.closed
        if not self._is_committing() or self.dead or self._failure is not None:
            return lambda: self.commit(file, (early, late))
        with contextlib.suppress(DiskFailed):  # and so does whoever waits for it
            self._put(file.inode, file.name, early.at, b"".join(early.buffers))
        return lambda: self.commit(file, (late,))

    def _is_committing(self) -> bool:
        return self._commits.locked()

    async def _commit(self, file: SimFile, writes: Sequence[Write]) -> None:
        async with self._commits:
            self._check()
            for at, (data,) in writes:
                await self._write(file.inode, file.name, at, data)
            await self._sync(file.inode, file.name)

    async def read(self, file: File, at: int, size: int) -> bytes:
        assert isinstance(file, SimFile)
        assert not file.closed
        await self._call(size)
        return bytes(self.medium.inodes[file.inode].seen[at : at + size])

    async def read_into(self, file: File, at: int, buffer: memoryview) -> int:
        data = await self.read(file, at, len(buffer))
        buffer[: len(data)] = data
        return len(data)

    async def drop_cached(self, file: File) -> None:
        await self._call()

    async def map(self, name: str) -> memoryview:
        await self._call()
        inode = self.medium.find(name)
        if inode is None:
            raise FileNotFoundError(name)
        return memoryview(bytes(self.medium.inodes[inode].seen))

    async def size(self, file: File) -> int:
        assert isinstance(file, SimFile)
        await self._call()
        return len(self.medium.inodes[file.inode].seen)

    async def list(self, folder: str) -> dict[str, int]:
        await self._call()
        entries = self.medium.folders.get(folder)
        return {n: len(self.medium.inodes[inode].seen) for n, inode in entries.seen.items()} if entries else {}

    async def preallocate(self, name: str, size: int, *, enough: trio.Event | None = None) -> None:
        self._check()
        await self._call()
        if size > self.free_bytes():
            raise DiskFull(f"{name}: no space for {size} bytes. Free some; reads go on meanwhile")
        found = self.medium.find(name)
        inode = self.medium.create(name) if found is None else found
        self.medium.resize(inode, 0)
        step = 1024 * 1024
        for at in range(0, size, step):
            await self._finish(lambda at=at: self._write(inode, name, at, bytes(min(step, size - at))))  # type: ignore[misc]
            await self._finish(lambda: self._sync(inode, name))
            if enough is not None and enough.is_set():
                return

    async def zero(self, file: File, start: int, end: int) -> None:
        assert isinstance(file, SimFile)
        await self._finish(lambda: self._zero(file, start, end))

    async def _zero(self, file: SimFile, start: int, end: int) -> None:
        await self._elapse()
        self.medium.resize(file.inode, start)
        if end > start:
            await self._write(file.inode, file.name, start, bytes(end - start))
        await self._sync(file.inode, file.name)

    async def truncate(self, file: File, size: int) -> None:
        assert isinstance(file, SimFile)
        await self._finish(lambda: self._zero(file, size, size))

    async def rename(self, old: str, new: str) -> None:
        await self._finish(lambda: self._rename(old, new))

    async def _rename(self, old: str, new: str) -> None:
        await self._elapse()
        if self.medium.find(old) is None:
            self._fail("rename", old, "No such file or directory")
        self.medium.rename(old, new)
        for file in self._files:
            if file.name == old:
                file.name = new

    async def remove(self, name: str) -> None:
        self._check()
        await self._call()
        if self.medium.find(name) is not None:
            self.medium.unlink(name)

    async def replace(self, name: str, data: bytes) -> None:
        await self._finish(lambda: self._replace(name, data))

    async def _replace(self, name: str, data: bytes) -> None:
        await self._elapse()
        aside = f"{name}.{next(self._asides)}.new"
        found = self.medium.find(aside)
        inode = self.medium.create(aside) if found is None else found
        self.medium.resize(inode, 0)
        await self._write(inode, aside, 0, data)
        await self._sync(inode, aside)
        self.medium.rename(aside, name)
        await self._sync_dir(name.rpartition("/")[0])

    async def make_folder(self, folder: str) -> None:
        self._check()
        await self._call()
        self.medium.make_folder(folder)

    async def sync_dir(self, folder: str) -> None:
        await self._finish(lambda: self._sync_dir(folder))

    async def _sync_dir(self, folder: str) -> None:
        await self._elapse(seconds=SYNC_S)
        self._count_sync(folder or ".")
        self.medium.sync_dir(folder)

    async def set_read_only(self, name: str) -> None:
        self._check()
        await self._call()

    def free_bytes(self) -> int:
        return max(0, self.capacity_bytes - self.medium.used_bytes())

    def lock(self) -> None:
        if self._locked:
            raise ForeignLog("the simulated directory is in use by process 1")
        self._locked = True

    def close(self) -> None:
        self._locked = False

    # What everything above is made of

    async def _write(self, inode: int, name: str, at: int, data: Buffer) -> None:
        await self._elapse(len(data))
        self._put(inode, name, at, data)

    def _put(self, inode: int, name: str, at: int, data: Buffer) -> None:
        node = self.medium.inodes[inode]
        grows = max(0, at + len(data) - len(node.seen))
        lacking = grows - self.free_bytes() if grows else 0
        data = bytes(data)
        if self._misplace_in:
            self._misplace_in -= 1
            if not self._misplace_in:
                at = self.rng.randrange(max(1, len(node.seen) // SECTOR)) * SECTOR
        if lacking > 0:
            if lacking < len(data):
                self.medium.write(inode, at, data[: len(data) - lacking])
            self._fail("write", name, "No space left on device")
        self.medium.write(inode, at, data)

    async def _sync(self, inode: int, name: str) -> None:
        await self._elapse(seconds=SYNC_S)
        try:
            self._count_sync(name)
        except DiskFailed:
            self.medium.fail_sync(inode)
            raise
        self.medium.sync(inode)

    def _count_sync(self, name: str) -> None:
        self.syncs += 1
        if self._fail_sync_in:
            self._fail_sync_in -= 1
            if not self._fail_sync_in:
                self._fail("fdatasync", name, "Input/output error")

    async def _call(self, size: int = 0) -> None:
        """Let simulated time pass; on a dead disk, for ever."""
        try:
            await self._elapse(size)
        except _Dead:
            await trio.sleep_forever()

    async def _elapse(self, size: int = 0, seconds: float = CALL_S) -> None:
        seconds = (seconds + size / BYTES_PER_S) * self.slowness * self.rng.uniform(0.5, 1.5)
        with trio.move_on_after(seconds):
            await self._death.wait()
        while not self._running.is_set():
            await self._running.wait()
        if self.dead:
            raise _Dead

    async def _finish(self, action: Callable[[], Awaitable[T]]) -> T:
        """A change that was begun is finished though nobody waits for it any more: a device cannot be cancelled."""
        self._check()
        try:
            with trio.CancelScope(shield=True):
                result = await action()
        except _Dead:
            await trio.sleep_forever()
        await trio.lowlevel.checkpoint_if_cancelled()
        return result

    def _check(self) -> None:
        if self._failure is not None and not self.dead:
            raise DiskFailed(self._failure)

    def _fail(self, doing: str, name: str, reason: str) -> NoReturn:
        if self._failure is None:
            self._failure = f"{name}: {doing} failed: {reason}. Nothing more is acked; look at the disk, then restart"
        raise DiskFailed(self._failure)


class _Dead(Exception):
    """The process of this disk is gone."""
