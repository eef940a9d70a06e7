"""The segments that a log holds, and their open files.

A `Segment` is what the log knows of one file. The `Store` keeps them in order, opens their files when someone needs
the bytes and closes those that nobody used lately (an LRU), and lets readers pin a segment: what is pinned is neither
closed nor removed until they are done.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import trio

from chronik_repl.errors import CorruptLog, OutOfRange
from chronik_repl.positions import Checksum, Position
from chronik_repl.wal.disk import Disk, File
from chronik_repl.wal.frame import Frame
from chronik_repl.wal.index import ActiveIndex, SealedIndex
from chronik_repl.wal.recovery import Batches, Walk
from chronik_repl.wal.segment import FOLDER, FRAMES_AT, segment_name

OPEN_FILES_MAX = 64
INDEXES_MAX = 1024  # mapped at once
CACHED_BYTES = 128 * 1024 * 1024  # behind the log's end: what those who keep up read stays in memory
WALK_BYTES = 256 * 1024
ALONE_BYTES = 4 * 1024 * 1024  # between two passes of the event loop, while nobody else needs it


class Segment:
    __slots__ = (
        "active", "chain", "end", "first_timestamp_ms", "gone", "made", "mapped", "pins", "sealed", "snapshot_whole",
        "start", "unpinned",
    )  # fmt: skip

    def __init__(self, start: Position, chain: Checksum) -> None:
        self.start = start
        self.chain = chain  # of the frame before the first
        self.end = start
        self.first_timestamp_ms = 0
        self.made = False  # its file is in the directory, for good
        self.sealed = False  # cut to size, read-only, its index written
        self.snapshot_whole = False  # a log may begin here
        self.active: ActiveIndex | None = None
        self.mapped: SealedIndex | None = None
        self.pins = 0
        self.unpinned: trio.Event | None = None
        self.gone = False

    @property
    def name(self) -> str:
        return f"{FOLDER}/{segment_name(self.start)}"

    @property
    def index_name(self) -> str:
        return f"{FOLDER}/{self.start:020d}.idx"

    def file_offset(self, position: int) -> int:
        return FRAMES_AT + position - self.start


class Store:
    def __init__(self, disk: Disk, frame_bytes_max: int) -> None:
        self.disk = disk
        self.frame_bytes_max = frame_bytes_max
        self.list: list[Segment] = []
        self._files: OrderedDict[Segment, File] = OrderedDict()
        self._replaced: list[
            tuple[Segment, File]
        ] = []  # files that someone still reads, under a name that is another's
        self._opening: dict[Segment, trio.Event] = {}
        self._indexed: OrderedDict[Segment, None] = OrderedDict()

    def holding(self, position: Position) -> Segment:
        """The segment in which `position` stands; the end of the log counts as the last one's. Raises OutOfRange."""
        number = bisect_right(self.list, position, key=lambda segment: segment.start) - 1
        if number < 0 or position > self.list[number].end:
            have = f"{self.list[0].start} to {self.list[-1].end}" if self.list else "nothing"
            raise OutOfRange(f"position {position} is not in the log; it holds {have}")
        return self.list[number]

    async def file(self, segment: Segment) -> File:
        """Its open file. Hold a pin while you use it."""
        while segment in self._opening:
            await self._opening[segment].wait()
        file = self._files.get(segment)
        if file is None:
            opened = self._opening[segment] = trio.Event()
            try:
                file = await self.disk.open(segment.name)
            except FileNotFoundError:
                raise CorruptLog(
                    f"{segment.name} is missing: it was there when the log was opened",
                    file=segment.name,
                    start=segment.start,
                    end=segment.end,
                ) from None
            finally:
                del self._opening[segment]
                opened.set()
            self.adopt(segment, file)
        self._files.move_to_end(segment)
        return file

    def opened(self, segment: Segment) -> File:
        """The file of a segment that its owner keeps open."""
        return self._files[segment]

    def adopt(self, segment: Segment, file: File) -> None:
        """An open file for this segment, made elsewhere."""
        self._files[segment] = file
        spare = len(self._files) - OPEN_FILES_MAX
        for other in [s for s in self._files if s.pins == 0 and s is not segment][: max(spare, 0)]:
            self._files.pop(other).close()

    def close_file(self, segment: Segment) -> None:
        file = self._files.pop(segment, None)
        if file is not None:
            file.close()

    def close_file_when_unpinned(self, segment: Segment) -> None:
        """The file under this name is another one now: readers finish with the old one."""
        old = self._files.pop(segment, None)
        if old is not None and segment.pins == 0:
            old.close()
        elif old is not None:
            self._replaced.append((segment, old))

    def reset(self) -> None:
        """As if nothing had been found."""
        self.close()
        self.list.clear()
        self._indexed.clear()

    def close(self) -> None:
        for _, file in self._replaced:
            file.close()
        self._replaced = []
        for segment in list(self._files):
            self.close_file(segment)

    def map_index(self, segment: Segment, index: SealedIndex) -> None:
        segment.mapped = index
        self.touch_index(segment)
        for other in list(self._indexed)[: max(0, len(self._indexed) - INDEXES_MAX)]:
            self.drop_index(other)

    def touch_index(self, segment: Segment) -> None:
        self._indexed[segment] = None
        self._indexed.move_to_end(segment)

    def drop_index(self, segment: Segment) -> None:
        segment.mapped = None
        self._indexed.pop(segment, None)

    def pin(self, segment: Segment) -> None:
        segment.pins += 1

    def unpin(self, segment: Segment) -> None:
        segment.pins -= 1
        if segment.pins == 0 and self._replaced:
            for other, file in self._replaced:
                if other is segment:
                    file.close()
            self._replaced = [entry for entry in self._replaced if entry[0] is not segment]
        if segment.pins == 0 and segment.unpinned is not None:
            segment.unpinned.set()
            segment.unpinned = None

    @asynccontextmanager
    async def pinned(self, segment: Segment) -> AsyncIterator[File]:
        """Its open file, while nobody may close or remove it. Raises OutOfRange if that has happened already."""
        if segment.gone:
            raise OutOfRange(f"{segment.name} was removed")
        self.pin(segment)
        try:
            yield await self.file(segment)
        finally:
            self.unpin(segment)

    async def drop_cached(self, segment: Segment) -> None:
        """Its bytes need not stay in memory. Raises OutOfRange if it was removed."""
        async with self.pinned(segment) as file:
            await self.disk.drop_cached(file)

    async def forget(self, segment: Segment) -> None:
        """Take it out of the list at once, its files out of the directory once nobody reads them. Not yet synced."""
        segment.gone = True
        if segment in self.list:
            self.list.remove(segment)
        while segment.pins:
            if segment.unpinned is None:
                segment.unpinned = trio.Event()
            await segment.unpinned.wait()
        self.close_file(segment)
        self.drop_index(segment)
        await self.disk.remove(segment.index_name)
        await self.disk.remove(segment.name)

    async def walk(
        self,
        segment: Segment,
        end: Position,
        each: Callable[[Frame], object],
        *,
        start: Position | None = None,
        chain: Checksum | None = None,
        batches: Batches | None = None,
        alone: bool = False,
    ) -> Walk:
        """Hand the segment's frames from `start` (its own, unless told) to `end` to `each`.

        Stops at the first bytes that are no frame; the answer says where and why. `batches` may take some of them,
        faster. `alone`: others need not run meanwhile; otherwise it goes in small steps.
        """
        position = segment.start if start is None else start
        walk = Walk(position, segment.chain if chain is None else chain, self.frame_bytes_max, each, batches)
        window = memoryview(bytearray(min(WALK_BYTES, max(end - position, 0))))
        left = 0  # bytes at its start: a frame that was not whole
        async with self.pinned(segment) as file:
            at, stop = segment.file_offset(position), segment.file_offset(end)
            while at < stop and not walk.why:
                size = await self.disk.read_into(file, at, window[left : left + stop - at])
                if not size:
                    break
                at += size
                have = left + size
                used = walk.take(window[:have])
                left = have - used
                room = window if walk.want <= len(window) else memoryview(bytearray(walk.want + WALK_BYTES))
                room[:left] = window[used:have]
                window = room
                if not alone or at % ALONE_BYTES < size:
                    await trio.lowlevel.checkpoint()
        if walk.end < end and not walk.why:
            walk.why = "the file ends inside a frame, or before one that should be there"
        return walk
