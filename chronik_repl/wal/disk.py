"""The seam between the log and the machine: one data directory, and the only place where anything is made durable.

`Disk` is what the log asks of a directory. `RealDisk` is the machine's; the simulator has the other one
(tests/simulation/disk.py), which keeps, loses, tears and misplaces what was not synced.

Names are relative to the data directory, with `/` between folder and file. Every method that waits is async; nothing
here blocks the event loop. Any OSError of a write, sync, rename or truncate becomes DiskFailed, which is final: after
it every call that changes something raises the same error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

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
        order, on the committer thread; a second may be called while the first runs, so that the device never waits."""

    async def read(self, file: File, at: int, size: int) -> bytes:
        """Up to `size` bytes; fewer only at the end of the file. Served from the page cache without a thread hop."""

    async def size(self, file: File) -> int: ...

    async def list(self, folder: str) -> dict[str, int]:
        """File name → size; {} for a folder that is not there. "" is the data directory itself."""

    async def preallocate(self, name: str, size: int) -> None:
        """Make (or make again) a file of zeros and sync it, in paced steps of 1 MiB. Not yet in the directory for sure."""

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
