"""The seam between the log and the machine: what the log asks of one data directory.

`RealDisk` (disk.py) is the machine's; the simulator has the other one (tests/simulation/disk.py), which keeps, loses,
tears and misplaces what was not synced.

Names are relative to the data directory, with `/` between folder and file. Every method that waits is async; nothing
here blocks the event loop. Any OSError of a write, sync, rename or truncate becomes DiskFailed, which is final: after
it every call that changes something raises the same error.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, Protocol

import trio

Buffer = bytes | bytearray | memoryview


class Write(NamedTuple):
    """Consecutive bytes for one place in a file."""

    at: int
    buffers: Sequence[Buffer]


class File(Protocol):
    """An open file of the directory. Its name may change by `Disk.rename`; the handle stays good."""

    @property
    def name(self) -> str: ...

    def close(self) -> None: ...


class Disk(Protocol):
    async def open(self, name: str, *, create: bool = False) -> File:
        """For reading and writing. Without `create` a missing file raises FileNotFoundError."""

    async def commit(self, file: File, writes: Sequence[Write]) -> None:
        """All of these writes, in this order, then one fdatasync. Commits of one disk run one after another, in call
        order, on the committer thread; a second may be called while the first runs, so that the device never waits.
        A return means that all earlier commits are durable too; two that end together may return in either order."""

    def begin(self, file: File, early: Write, late: Write) -> Callable[[], Awaitable[None]]:
        """As `commit` of both, given to the disk in this step; call and await what it returns, exactly once, before any
        commit that is asked for later is awaited. What fails is raised there. `early` may reach the disk before the
        commits ahead of it are synced; `late` not before they are durable: it may speak of them."""

    async def read(self, file: File, at: int, size: int) -> bytes:
        """Up to `size` bytes; fewer only at the end of the file. Served from the page cache without a thread hop."""

    async def read_into(self, file: File, at: int, buffer: memoryview) -> int:
        """As `read`, into a buffer of the caller's; returns how many bytes. For those who read much: fresh memory
        costs more than the reading. Small reads of what is cached let nobody else run meanwhile: yield now and then."""

    async def drop_cached(self, file: File) -> None:
        """What memory holds of it is given back; the next read comes from the device. A hint: what is not synced
        stays."""

    async def map(self, name: str) -> memoryview:
        """A whole file, mapped and not loaded: for files that are replaced, never changed. Raises FileNotFoundError."""

    async def size(self, file: File) -> int: ...

    async def list(self, folder: str) -> dict[str, int]:
        """File name → size; {} for a folder that is not there. "" is the data directory itself."""

    async def preallocate(self, name: str, size: int, *, enough: trio.Event | None = None) -> None:
        """Make (or make again) a file of zeros and sync it, in steps of 1 MiB with rests between them. Once `enough` is
        set it returns after the step that it is in: the rest of the file has space but no written zeros, or is not
        there yet; both read as nothing. Not yet in the directory for sure.
        Raises DiskFull, leaving nothing behind, where there is no space for it: that is not yet a failure."""

    async def zero(self, file: File, start: int, end: int) -> None:
        """Cut the file at `start`, fill with zeros to `end`, sync: what truncation leaves behind."""

    async def truncate(self, file: File, size: int) -> None:
        """Cut and sync."""

    async def rename(self, old: str, new: str) -> None:
        """Durable only after `sync_dir`."""

    async def remove(self, name: str) -> None: ...

    async def replace(self, name: str, data: bytes) -> None:
        """Written aside, synced, renamed, the folder synced: after a crash the old or the new, whole."""

    async def make_folder(self, folder: str) -> None: ...

    async def sync_dir(self, folder: str) -> None: ...

    async def set_read_only(self, name: str) -> None: ...

    def free_bytes(self) -> int: ...

    def lock(self) -> None:
        """Take the directory for this process, until `close`. Raises ForeignLog naming the pid that holds it."""

    def close(self) -> None: ...
