"""Beside appending: finished segments are sealed, those that are no longer new leave the machine's memory, those before
the log's start are removed.

Sealing cuts a segment to size, writes its index beside it and makes it read-only. Nothing depends on it having
happened: a crash before or in the middle leaves a segment that is sealed at the next start. But where an index stands,
a segment followed: that is how opening notices that the last one is missing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import trio

from chronik_repl.errors import CorruptLog
from chronik_repl.positions import ORIGIN, Position
from chronik_repl.wal.committer import Committer
from chronik_repl.wal.disk import Disk
from chronik_repl.wal.frame import BadFrame, Frame, Kind
from chronik_repl.wal.reader import Reader
from chronik_repl.wal.segment import FOLDER
from chronik_repl.wal.segments import CACHED_BYTES, Segment, Store
from chronik_repl.wal.state import State
from chronik_repl.wal.values import LogStats


class Housekeeper:
    def __init__(
        self,
        disk: Disk,
        store: Store,
        committer: Committer,
        reader: Reader,
        stats: LogStats,
        state: Callable[[], State],
    ) -> None:
        self._disk, self._store, self._committer, self._reader, self._stats = disk, store, committer, reader, stats
        self._state = state
        self._start = ORIGIN  # where the log is to begin
        self._start_moved = trio.Event()
        self._cached_from = ORIGIN

    # Sealing

    async def keep_sealing(self) -> None:
        committer = self._committer
        for segment in self._store.list:
            if not segment.sealed and segment.made and segment is not committer.current:
                committer.finished.append(segment)
        while True:
            while committer.finished:
                segment = committer.finished[0]
                await self._seal(segment)
                await self._drop_cached_before(Position(max(0, segment.end - CACHED_BYTES)))
                if committer.finished and committer.finished[0] is segment:
                    committer.finished.popleft()
                self._start_moved.set()
            await committer.to_seal.wait()
            committer.to_seal = trio.Event()

    async def _seal(self, segment: Segment) -> None:
        async with self._committer.sealing:
            if not segment.gone and segment is not self._committer.current:  # as it may be since a truncation
                await self._seal_it(segment)

    async def _seal_it(self, segment: Segment) -> None:
        async with self._store.pinned(segment) as file:
            try:
                index = segment.active or await self._reader.index_of(segment)
            except CorruptLog:
                return  # noted as damage; it stays as it is
            await self._disk.truncate(file, segment.file_offset(segment.end))
            await self._disk.replace(segment.index_name, index.encode())
            await self._disk.set_read_only(segment.name)
        segment.sealed = True
        segment.active = None

    async def _drop_cached_before(self, newest: Position) -> None:
        """A log is written once and mostly read as it grows. Left alone it fills all memory with what nobody reads, and
        every new page is one that someone else had."""
        since, self._cached_from = min(self._cached_from, newest), newest
        for segment in [s for s in self._store.list if since < s.end <= newest and s.sealed]:
            if not segment.gone:
                with suppress(CorruptLog):  # its file is not there; who wants the bytes says so
                    await self._store.drop_cached(segment)

    # Removing

    def start_at(self, start: Position) -> None:
        """A new log start is committed: what ends at or before it goes."""
        if start > self._start:
            self._start = start
            self._start_moved.set()

    async def keep_removing(self) -> None:
        while True:
            gone = [s for s in self._store.list if s.end <= self._start and s.sealed]
            if gone:
                await self.raise_starts(after=gone[-1].end)
                for segment in gone:
                    await self._store.forget(segment)
                    await self._disk.sync_dir(FOLDER)  # each in turn: a power cut must not leave a gap behind
                    self._stats.segments_removed += 1
            await self._start_moved.wait()
            self._start_moved = trio.Event()

    async def raise_starts(self, after: Position) -> None:
        """A partition begins with what it had next in the snapshot of the log's first segment, the one at `after`."""
        first = next((s for s in self._store.list if s.start >= after), None)
        if first is None or first.start == ORIGIN:
            return
        then = State()

        def each(frame: Frame) -> None:
            if frame.kind != Kind.SEGMENT_START:
                raise BadFrame("the snapshot ends here")
            then.apply(frame)

        await self._store.walk(first, first.end, each)
        now = self._state()
        for partition in then.partitions():
            known = now.find(partition.topic, partition.partition)
            if known is not None:
                known.start_offset = max(known.start_offset, partition.next_offset)
