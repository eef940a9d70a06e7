"""Beside appending: finished segments are sealed, those before the log's start removed.

Sealing cuts a segment to size, writes its index beside it and makes it read-only. Nothing depends on it having
happened: a crash before or in the middle leaves a segment that is sealed at the next start.
"""

from __future__ import annotations

from collections.abc import Callable

import trio

from chronik_repl.errors import CorruptLog
from chronik_repl.positions import ORIGIN, Position
from chronik_repl.wal.committer import Committer
from chronik_repl.wal.disk import Disk
from chronik_repl.wal.frame import BadFrame, Frame, Kind
from chronik_repl.wal.reader import Reader
from chronik_repl.wal.segment import FOLDER
from chronik_repl.wal.segments import Segment, Store
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
        self._sealed_one = trio.Event()

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
                if committer.finished and committer.finished[0] is segment:
                    committer.finished.popleft()
                self._start_moved.set()
            await committer.to_seal.wait()
            committer.to_seal = trio.Event()

    async def _seal(self, segment: Segment) -> None:
        async with self._store.pinned(segment) as file:
            try:
                index = segment.active or await self._reader.index_of(segment)
            except CorruptLog:
                return  # noted as damage; it stays as it is
            await self._disk.truncate(file, segment.file_offset(segment.end))
            await self._disk.replace(segment.index_name, index.encode())
            await self._disk.set_read_only(segment.name)
        if not segment.gone and segment is not self._committer.current:
            segment.sealed = True
            segment.active = None

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
