"""The scrubber: sealed segments are read and checked in the background, so that rot is found before someone needs the
bytes.

Bounded by a rate; one segment after another, round and round. Every frame's checksum, place and chain is checked, and
that the segment joins the next one. After bad bytes it goes on at the next frame that the index knows. Findings are
the same for `chronik wal verify`; each is told once.
"""

from __future__ import annotations

from collections.abc import Callable

import trio

from chronik_repl.errors import CorruptLog, OutOfRange
from chronik_repl.positions import Checksum, Position
from chronik_repl.wal.frame import Frame
from chronik_repl.wal.index import ActiveIndex, SealedIndex
from chronik_repl.wal.reader import Reader
from chronik_repl.wal.recovery import scan
from chronik_repl.wal.segments import Segment, Store
from chronik_repl.wal.values import Damage, LogStats

STEP_BYTES = 128 * 1024
REST_S = 60.0  # between two rounds, and while there is nothing to check


class Scrubber:
    def __init__(
        self, store: Store, reader: Reader, stats: LogStats, mb_per_s: float, found: Callable[[Damage], None]
    ) -> None:
        self._store, self._reader, self._stats = store, reader, stats
        self._seconds_a_byte = 1 / (mb_per_s * 1_000_000) if mb_per_s > 0 else 0.0
        self._found = found

    async def run(self) -> None:
        if not self._seconds_a_byte:
            return
        while True:
            at = Position(-1)
            while True:
                segment = next((s for s in self._store.list if s.start > at and s.sealed), None)
                if segment is None:
                    break
                at = segment.start
                await self.check(segment)
            self._stats.scrub_rounds += 1
            await trio.sleep(REST_S)

    async def check(self, segment: Segment) -> None:
        """Read one segment at the bounded rate and tell what is wrong with it."""
        try:
            await self._check(segment)
        except OutOfRange:
            return  # removed meanwhile
        except CorruptLog as error:  # the file cannot be read at all
            self._found(Damage(segment.name, segment.start, segment.end, str(error)))

    async def _check(self, segment: Segment) -> None:
        await self._store.drop_cached(segment)  # it is the disk that is to be checked, not what memory knows of it
        await self._read_through(segment)
        await self._store.drop_cached(segment)

    async def _read_through(self, segment: Segment) -> None:
        position, chain = segment.start, segment.chain
        known: Checksum | None = chain
        size = STEP_BYTES
        while position < segment.end:
            async with self._store.pinned(segment) as file:
                want = min(size, segment.end - position)
                data = await self._store.disk.read(file, segment.file_offset(position), want)
            self._stats.scrubbed_bytes += len(data)
            scanned = scan(memoryview(data), position, known, self._store.frame_bytes_max, _nothing)
            why = scanned.why
            if not why and scanned.end == position:
                if len(data) < want or want == segment.end - position:
                    why = "the segment ends inside a frame"
                else:
                    size = max(scanned.want, 2 * size)
                    continue
            position, size = scanned.end, STEP_BYTES
            known = scanned.chain
            if why:
                resume = await self._next_frame(segment, position)
                self._found(await self.describe(segment, position, resume, why))
                position, known = resume, None
            if self._seconds_a_byte:
                await trio.sleep(len(data) * self._seconds_a_byte)
        number = self._store.list.index(segment) if segment in self._store.list else -1
        if 0 <= number < len(self._store.list) - 1 and known is not None:
            following = self._store.list[number + 1]
            if following.chain != known:
                what = f"it ends with chain value {known:#x}; the next segment begins with {following.chain:#x}"
                self._found(Damage(segment.name, segment.end, segment.end, what))

    async def _index(self, segment: Segment) -> ActiveIndex | SealedIndex | None:
        """Only one that is there: from a damaged segment none can be made."""
        try:
            return await self._reader.index(segment)
        except CorruptLog:
            return None

    async def _next_frame(self, segment: Segment, position: Position) -> Position:
        index = await self._index(segment)
        if index is None:
            return segment.end
        relative = index.next_frame(position - segment.start)
        return segment.end if relative is None else Position(segment.start + relative)

    async def describe(self, segment: Segment, start: Position, end: Position, why: str) -> Damage:
        """In the words of someone who reads records: which batch is it?"""
        index = await self._index(segment)
        batch = index.batch_at(start - segment.start) if index is not None else None
        if batch is None:
            return Damage(segment.name, start, end, why)
        topic, partition, entry = batch
        return Damage(segment.name, start, end, why, topic, partition, entry.base_offset)


def _nothing(frame: Frame) -> None:
    """The scan itself is the check."""
