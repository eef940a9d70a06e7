"""Where frames stand until the disk and the followers have them: large buffers that are used again and again.

A follower's bytes are touched three times: once when the socket hands them over, once for the checksum, once when the
file takes them. A leader's: for the checksum, when they become a frame, for the file and for each socket. They stand
still in between. Fresh memory would cost more than any of these (every page of it is a fault), so a buffer that nobody
looks at any more is taken again; the interpreter itself knows when that is: memory with a view on it cannot be resized.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import suppress

from chronik_repl.wal.seam import Buffer

IDLE_MAX = 4  # buffers kept for the next time, of those that are free
HUGE_PAGE_BYTES = 2 * 1024 * 1024
ROOM_BYTES = 4 * 1024 * 1024  # of one buffer that frames are put into, one after the other


class Arenas:
    """Buffers of one connection, or of one log's end."""

    def __init__(self) -> None:
        self._known: list[mmap.mmap] = []

    def take(self, size: int) -> mmap.mmap:
        """At least so many bytes that nobody looks at, with anything in them. It stands here until it is taken."""
        idle = 0
        found = None
        kept: list[mmap.mmap] = []
        for arena in self._known:
            if _is_viewed(arena):
                kept.append(arena)
            elif found is None and len(arena) >= size:
                found = arena
            elif idle < IDLE_MAX and len(arena) >= size:
                idle += 1
                kept.append(arena)
        self._known = kept
        return _fresh(size) if found is None else found

    def give_back(self, arena: mmap.mmap) -> None:
        """Its taker has no use for it any more; those who hold views on it may have."""
        self._known.append(arena)

    @property
    def known_bytes(self) -> int:
        return sum(map(len, self._known))


class Room:
    """Place for one frame after the other. Whoever holds a frame holds its buffer: let it go as soon as it is done."""

    def __init__(self) -> None:
        self._arenas = Arenas()
        self._arena: mmap.mmap | None = None
        self._view = memoryview(b"")
        self._at = 0

    def put(self, pieces: Sequence[Buffer], size: int) -> memoryview:
        """These pieces, of `size` bytes in all, one behind the other, where they stay as long as someone looks."""
        if self._at + size > len(self._view):
            self._move(size)
        start = at = self._at
        view = self._view
        for piece in pieces:
            end = at + len(piece)
            view[at:end] = piece
            at = end
        self._at = at
        return view[start:at]

    def _move(self, size: int) -> None:
        self._view.release()
        if self._arena is not None:
            self._arenas.give_back(self._arena)
        self._arena = self._arenas.take(max(size, ROOM_BYTES))
        self._view = memoryview(self._arena)
        self._at = 0

    @property
    def known_bytes(self) -> int:
        return self._arenas.known_bytes + len(self._view)


def _fresh(size: int) -> mmap.mmap:
    """Private memory: a page of a shared mapping costs more, and is never a large one."""
    arena = mmap.mmap(-1, max(size, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= HUGE_PAGE_BYTES:
        with suppress(OSError):  # a kernel without them
            arena.madvise(mmap.MADV_HUGEPAGE)
    return arena


def _is_viewed(arena: mmap.mmap) -> bool:
    try:
        arena.resize(len(arena))
    except BufferError:
        return True
    return False
