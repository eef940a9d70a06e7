"""The machine's disk: one data directory, and the only place where anything in it is made durable.

It keeps what `Disk` promises (seam.py). Commits go to a thread of their own; everything else that may wait goes to
trio's threads. Every error of a change is final.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import mmap
import os
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import trio

from chronik_repl.errors import CorruptLog, DiskFailed, DiskFull, ForeignLog
from chronik_repl.wal.commit_thread import CommitThread, Job
from chronik_repl.wal.seam import Buffer, Disk, File, Write

__all__ = ["Buffer", "Disk", "File", "RealDisk", "Write"]

T = TypeVar("T")

LOCK = "lock"
IOV_MAX = 1024  # buffers that one pwritev takes
FILL_STEP = 1024 * 1024  # of zeros; of a fill that is paced a quarter: groups wait behind its syncs
SMALL_READ = 256 * 1024
AHEAD_BYTES = 32 * 1024  # for less a second thread costs more than it gives
_ZEROS = memoryview(bytes(FILL_STEP))


class RealDisk:
    """A directory of this machine.

    Commits go to one thread (commit_thread.py), started with the first of them.
    """

    def __init__(self, path: str | os.PathLike[str], *, fill_pace: float = 6.0) -> None:
        """`fill_pace`: after each step of a fill rest for this many times what the step took."""
        self.path = Path(path)
        self.path.mkdir(parents=True, exist_ok=True)
        self._fill_pace = fill_pace
        self._limiter = trio.CapacityLimiter(4)
        self._failure: str | None = None
        self._files: set[RealFile] = set()
        self._asides = itertools.count()
        self._lock_fd = -1
        self._closed = False
        self._scratch = memoryview(bytearray(SMALL_READ))
        self._read_at_once = 0
        self._committer: CommitThread | None = None

    # Files

    async def open(self, name: str, *, create: bool = False) -> File:
        fd, writable = await self._in_thread(self._open, name, create)
        file = RealFile(self, name, fd, writable)
        self._files.add(file)
        return file

    def _open(self, name: str, create: bool) -> tuple[int, bool]:
        path = self.path / name
        flags = os.O_RDWR | os.O_CLOEXEC
        try:
            return os.open(path, flags | os.O_CREAT if create else flags, 0o644), True
        except PermissionError:
            try:
                return os.open(path, os.O_RDONLY | os.O_CLOEXEC), False  # a sealed segment
            except PermissionError as error:
                raise CorruptLog(
                    f"{path}: cannot be opened: {error.strerror}. Give it back to the user of this process", file=name
                ) from error
        except IsADirectoryError as error:
            raise CorruptLog(f"{path}: a folder stands where a file should be. Move it away", file=name) from error

    async def read(self, file: File, at: int, size: int) -> bytes:
        assert isinstance(file, RealFile)
        if size > SMALL_READ:  # the copying alone would hold up the event loop
            return await self._in_thread(self._read, file, at, size)
        got = self._read_cached(file, at, self._scratch[:size])
        if got is None:
            return await self._in_thread(self._read, file, at, size)
        data = bytes(self._scratch[:got])
        # No pass of the event loop for each: a fetch is made of many small ones. But never on and on.
        self._read_at_once += size
        if self._read_at_once > SMALL_READ:
            self._read_at_once = 0
            await trio.lowlevel.cancel_shielded_checkpoint()
        return data

    def _read(self, file: RealFile, at: int, size: int) -> bytes:
        try:
            data = os.pread(file.fd, size, at)
            while 0 < len(data) < size and (more := os.pread(file.fd, size - len(data), at + len(data))):
                data += more
        except OSError as error:
            raise self._unreadable(file, at, error) from error
        return data

    async def read_into(self, file: File, at: int, buffer: memoryview) -> int:
        assert isinstance(file, RealFile)
        got = self._read_cached(file, at, buffer) if len(buffer) <= SMALL_READ else None
        return await self._in_thread(self._read_into, file, at, buffer) if got is None else got

    def _read_cached(self, file: RealFile, at: int, buffer: memoryview) -> int | None:
        """Without waiting for the device; None if that was not all there is."""
        try:
            got = os.preadv(file.fd, (buffer,), at, os.RWF_NOWAIT)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EOPNOTSUPP, errno.EIO):
                raise
            return None
        return got if got == len(buffer) or at + got >= os.fstat(file.fd).st_size else None

    def _read_into(self, file: RealFile, at: int, buffer: memoryview) -> int:
        got = 0
        try:
            while got < len(buffer) and (more := os.preadv(file.fd, (buffer[got:],), at + got)):
                got += more
        except OSError as error:
            raise self._unreadable(file, at + got, error) from error
        return got

    def _unreadable(self, file: RealFile, at: int, error: OSError) -> CorruptLog:
        name = file.name
        return CorruptLog(f"{self.path / name}: cannot be read from byte {at} on: {error.strerror}", file=name)

    async def drop_cached(self, file: File) -> None:
        assert isinstance(file, RealFile)
        await self._in_thread(os.posix_fadvise, file.fd, 0, 0, os.POSIX_FADV_DONTNEED)

    async def size(self, file: File) -> int:
        assert isinstance(file, RealFile)
        await trio.lowlevel.cancel_shielded_checkpoint()
        return os.fstat(file.fd).st_size

    async def map(self, name: str) -> memoryview:
        return await self._in_thread(self._map, name)

    def _map(self, name: str) -> memoryview:
        with (self.path / name).open("rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                return memoryview(b"")
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        mapped.madvise(mmap.MADV_WILLNEED)
        return memoryview(mapped)

    async def list(self, folder: str) -> dict[str, int]:
        return await self._in_thread(self._list, folder)

    def _list(self, folder: str) -> dict[str, int]:
        try:
            with os.scandir(self.path / folder) as entries:
                return {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}
        except FileNotFoundError:
            return {}

    async def commit(self, file: File, writes: Sequence[Write]) -> None:
        self._check()
        await self._begin(file, (), writes)()

    def begin(self, file: File, early: Write, late: Write) -> Callable[[], Awaitable[None]]:
        return self._begin(file, (early,), (late,))

    def _begin(self, file: File, early: Sequence[Write], late: Sequence[Write]) -> Callable[[], Awaitable[None]]:
        assert isinstance(file, RealFile)
        assert not self._closed, "the disk is closed"
        if self._committer is None:
            self._committer = CommitThread()
        file.committed_to = True
        large = any(sum(map(len, write.buffers)) >= AHEAD_BYTES for write in early)
        job = self._committer.begin(
            partial(self._write, file, early), partial(self._write, file, late), partial(self._sync, file), large=large
        )
        return partial(self._ended, self._committer, job)

    async def _ended(self, committer: CommitThread, job: Job) -> None:
        failure = await committer.ended(job)
        if failure is not None:
            raise DiskFailed(failure)

    def _write(self, file: RealFile, writes: Sequence[Write]) -> None:
        try:
            if self._failure is None:
                self._make_writable(file)
                for at, buffers in writes:
                    _write_all(file.fd, at, buffers)
        except OSError as error:
            self._fail("write", file.name, error)

    def _sync(self, file: RealFile) -> str | None:
        try:
            if self._failure is None:
                os.fdatasync(file.fd)
        except OSError as error:
            self._fail("fdatasync", file.name, error)
        return self._failure

    # Everything else that changes something

    async def preallocate(self, name: str, size: int, *, enough: trio.Event | None = None) -> None:
        self._check()
        enough = trio.Event() if enough is None else enough
        fd = await self._change("fill", name, self._start_fill, name, size)
        fill = _Fill(fd, size, self._fill_pace)

        async def pass_on() -> None:
            try:
                await enough.wait()
            finally:
                fill.stopped = True
                fill.rest_over.set()

        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(pass_on)
                await self._change("fill", name, fill.run)
                nursery.cancel_scope.cancel()
        finally:
            os.close(fd)

    def _start_fill(self, name: str, size: int) -> int:
        path = self.path / name
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            os.posix_fallocate(fd, 0, size)  # one extent where the file system can; and no space is told now
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                os.unlink(path)
                os.close(fd)
                raise DiskFull(f"{path}: no space for {size} bytes. Free some; reads go on meanwhile") from error
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENODEV):
                os.close(fd)
                raise
        return fd

    async def zero(self, file: File, start: int, end: int) -> None:
        assert isinstance(file, RealFile)
        await self._change("zero", file.name, self._zero, file, start, end)

    def _zero(self, file: RealFile, start: int, end: int) -> None:
        self._make_writable(file)
        os.ftruncate(file.fd, start)
        for at in range(start, end, FILL_STEP):
            _write_all(file.fd, at, (_ZEROS[: min(end - at, FILL_STEP)],))
        os.fsync(file.fd)

    async def truncate(self, file: File, size: int) -> None:
        assert isinstance(file, RealFile)
        await self._change("truncate", file.name, self._truncate, file, size)

    def _truncate(self, file: RealFile, size: int) -> None:
        self._make_writable(file)
        os.ftruncate(file.fd, size)
        os.fsync(file.fd)

    def _make_writable(self, file: RealFile) -> None:
        if not file.writable:
            os.fchmod(file.fd, 0o644)
            fd = os.open(self.path / file.name, os.O_RDWR | os.O_CLOEXEC)
            os.dup2(fd, file.fd, inheritable=False)
            os.close(fd)
            file.writable = True

    async def rename(self, old: str, new: str) -> None:
        await self._change("rename", old, os.rename, self.path / old, self.path / new)
        for file in self._files:
            if file.name == old:
                file.name = new

    async def remove(self, name: str) -> None:
        await self._change("remove", name, partial((self.path / name).unlink, missing_ok=True))

    async def replace(self, name: str, data: bytes) -> None:
        await self._change("replace", name, self._replace, name, data)

    def _replace(self, name: str, data: bytes) -> None:
        path = self.path / name
        aside = path.with_name(f"{path.name}.{next(self._asides)}.new")  # two may be under way for one name
        fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            _write_all(fd, 0, (data,))
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(aside, path)
        _sync_dir(path.parent)

    async def make_folder(self, folder: str) -> None:
        await self._change("make", folder, self._make_folder, folder)

    def _make_folder(self, folder: str) -> None:
        (self.path / folder).mkdir(exist_ok=True)
        _sync_dir((self.path / folder).parent)

    async def sync_dir(self, folder: str) -> None:
        await self._change("sync", folder or ".", _sync_dir, self.path / folder)

    async def set_read_only(self, name: str) -> None:
        await self._change("chmod", name, os.chmod, self.path / name, 0o444)

    def free_bytes(self) -> int:
        stat = os.statvfs(self.path)
        return stat.f_bavail * stat.f_frsize

    def lock(self) -> None:
        path = self.path / LOCK
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except PermissionError as error:
            raise ForeignLog(
                f"{self.path} cannot be written to: {error.strerror}. Give it to this process's user, or name another"
            ) from error
        _hold(self.path, fd)
        os.ftruncate(fd, 0)
        os.pwrite(fd, b"%d\n" % os.getpid(), 0)
        self._lock_fd = fd

    def close(self) -> None:
        """Ends the committer after what it was given, closes every file and gives the directory free."""
        if self._closed:
            return
        self._closed = True
        if self._committer is not None:
            self._committer.end()
            self._committer = None
        for file in list(self._files):
            file.close()
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    # What a failure means

    def _check(self) -> None:
        assert not self._closed, "the disk is closed"
        if self._failure is not None:
            raise DiskFailed(self._failure)

    def _fail(self, doing: str, name: str, error: OSError) -> None:
        if self._failure is None:  # the first one is the one to tell
            self._failure = (
                f"{self.path / name}: {doing} failed: {error.strerror}. Nothing more is acked; what survived "
                "is known after a restart: look at the disk first"
            )

    async def _change(self, doing: str, name: str, function: Callable[..., T], *arguments: object) -> T:
        self._check()
        try:
            return await self._in_thread(function, *arguments)
        except OSError as error:
            self._fail(doing, name, error)
            assert self._failure is not None
            raise DiskFailed(self._failure) from error

    async def _in_thread(self, function: Callable[..., T], *arguments: object) -> T:
        return await trio.to_thread.run_sync(function, *arguments, limiter=self._limiter)


def refuse_in_use(path: Path) -> None:
    """Raises ForeignLog where a process has that directory. Changes nothing."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):  # `RealDisk` says what is wrong
        fd = os.open(path / LOCK, os.O_RDONLY | os.O_CLOEXEC)
        _hold(path, fd)
        os.close(fd)


def _hold(path: Path, fd: int) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(fd)
        raise ForeignLog(
            f"{path} is in use by process {holder}. Stop that one first, or give this one another directory"
        ) from None


class RealFile:
    def __init__(self, disk: RealDisk, name: str, fd: int, writable: bool) -> None:
        self.disk = disk
        self.name = name
        self.fd = fd
        self.writable = writable
        self.committed_to = False
        self._closed = False

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.disk._files.discard(self)
        if self.committed_to and self.disk._committer is not None:
            # A cancelled commit may still be under way: its turn first, or it would write to whoever got this number.
            self.disk._committer.afterwards(partial(os.close, self.fd))
        else:
            os.close(self.fd)


def _write_all(fd: int, at: int, buffers: Sequence[Buffer]) -> None:
    for first in range(0, len(buffers), IOV_MAX):
        chunk = buffers[first : first + IOV_MAX]
        size = sum(map(len, chunk))
        written = os.pwritev(fd, chunk, at)
        if written < size:  # a signal, or the end of the space: then the next call says so
            rest = memoryview(b"".join(chunk))
            while written < size:
                written += os.pwrite(fd, rest[written:], at + written)
        at += size


class _Fill:
    """Zeros, step by step, in one thread; after each step a rest for `pace` times what it took."""

    def __init__(self, fd: int, size: int, pace: float) -> None:
        self.fd, self.size, self.pace = fd, size, pace
        self.stopped = False
        self.rest_over = threading.Event()

    def run(self) -> None:
        at = 0
        while at < self.size:
            started, step = time.perf_counter(), min(self.size - at, FILL_STEP // 4 if self.pace else FILL_STEP)
            _write_all(self.fd, at, (_ZEROS[:step],))
            at += step
            os.fdatasync(self.fd)
            if self.pace:
                self.rest_over.wait((time.perf_counter() - started) * self.pace)
            if self.stopped:
                return


def _sync_dir(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
