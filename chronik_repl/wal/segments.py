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
WALK_BYTES = 256 * 1024
AHEAD_BYTES = 8 * 1024 * 1024


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
        ahead: bool = False,
    ) -> Walk:
        """Hand the segment's frames from `start` (its own, unless told) to `end` to `each`.

        Stops at the first bytes that are no frame; the answer says where and why. `batches` may take some of them,
        faster. `ahead`: the next bytes are read while these are looked at; otherwise in small steps, for others run
        meanwhile.
        """
        position = segment.start if start is None else start
        walk = Walk(position, segment.chain if chain is None else chain, self.frame_bytes_max, each, batches)
        async with self.pinned(segment) as file:
            at, stop = segment.file_offset(position), segment.file_offset(end)
            if ahead and stop - at > AHEAD_BYTES:
                await self._walk_ahead(walk, file, at, stop)
            else:
                while at < stop and not walk.why:
                    piece = await self.disk.read(file, at, min(WALK_BYTES, stop - at))
                    if not piece:
                        break
                    walk.feed(piece)
                    at += len(piece)
        if walk.end < end and not walk.why:
            walk.why = "the file ends inside a frame, or before one that should be there"
        return walk

    async def _walk_ahead(self, walk: Walk, file: File, at: int, stop: int) -> None:
        """Two buffers: while one is looked at the other is filled."""
        filled, to_look_at = trio.open_memory_channel[memoryview | CorruptLog](0)
        looked_at, to_fill = trio.open_memory_channel[memoryview](2)
        for _ in range(2):
            looked_at.send_nowait(memoryview(bytearray(AHEAD_BYTES)))

        async def fill() -> None:
            async with filled:
                for start in range(at, stop, AHEAD_BYTES):
                    buffer = (await to_fill.receive())[: stop - start]
                    try:
                        size = await self.disk.read_into(file, start, buffer)
                    except CorruptLog as error:
                        await filled.send(error)
                        return
                    await filled.send(buffer[:size])

        failure: CorruptLog | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fill)
            async for piece in to_look_at:
                if isinstance(piece, CorruptLog):
                    failure = piece
                    break
                walk.feed(piece)
                if walk.why or len(piece) < AHEAD_BYTES:
                    break
                looked_at.send_nowait(piece)
            nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure
