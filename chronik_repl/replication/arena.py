"""Where received bytes stand until the disk has them: large buffers that are used again and again.

A follower's bytes are touched three times: once when the socket hands them over, once for the checksum, once when the
file takes them. They stand still in between. Fresh memory would cost more than any of these (every page of it is a
fault), so a buffer that nobody looks at any more is taken again; the interpreter itself knows when that is: memory
with a view on it cannot be resized.
"""

from __future__ import annotations

import mmap

IDLE_MAX = 4  # buffers kept for the next time, of those that are free


class Arenas:
    """Buffers of one connection."""

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
        return mmap.mmap(-1, max(size, mmap.PAGESIZE)) if found is None else found

    def give_back(self, arena: mmap.mmap) -> None:
        """Its taker has no use for it any more; those who hold views on it may have."""
        self._known.append(arena)

    @property
    def known_bytes(self) -> int:
        return sum(map(len, self._known))


def _is_viewed(arena: mmap.mmap) -> bool:
    try:
        arena.resize(len(arena))
    except BufferError:
        return True
    return False
