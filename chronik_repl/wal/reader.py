"""Reading: by position, by (topic, partition, offset), by time; while the log is being written.

Whatever comes from a file is checked before it is handed out: its checksum, its position, and that it is the batch
that was asked for. An index that leads elsewhere is made again from its segment; a segment that is bad is named
(CorruptLog), never skipped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from chronik_repl.errors import CorruptLog, OutOfRange
from chronik_repl.positions import Checksum, Offset, Position
from chronik_repl.wal.disk import Disk
from chronik_repl.wal.frame import BadFrame, Frame, Kind, decode
from chronik_repl.wal.index import ActiveIndex, BadIndex, Entry, SealedIndex
from chronik_repl.wal.intake import Intake
from chronik_repl.wal.replay import fold
from chronik_repl.wal.segments import CACHED_BYTES, Segment, Store
from chronik_repl.wal.state import PartitionState, State
from chronik_repl.wal.values import Damage, LogStats

READ_BYTES_MAX = 8 * 1024 * 1024


class _Wrong(Exception):
    """The index led to something else than it said."""


class Found(NamedTuple):
    segment: Segment
    entries: ActiveIndex | SealedIndex


class Reader:
    def __init__(
        self,
        disk: Disk,
        store: Store,
        stats: LogStats,
        durable: Callable[[], Position],
        damaged: Callable[[Damage], None],
    ) -> None:
        self._disk, self._store, self._stats = disk, store, stats
        self._durable = durable  # what is above may not be in the file yet
        self._damaged = damaged

    async def read(self, position: Position, size_max: int, end: Position) -> bytes:
        """Stream bytes as they stand in the file, from `position` up to the end of its segment, below `end`."""
        segment = self._store.holding(position)
        size = min(size_max, segment.end - position, end - position)
        if size <= 0:
            return b""
        async with self._store.pinned(segment) as file:
            data = await self._disk.read(file, segment.file_offset(position), size)
        self._stats.read_bytes += len(data)
        return data

    async def read_into(self, position: Position, buffer: memoryview, end: Position) -> int:
        """The same, into a buffer of the caller's, who reads in order and will not come back: a segment that is not new
        leaves memory behind him."""
        segment = self._store.holding(position)
        size = min(len(buffer), segment.end - position, end - position)
        if size <= 0:
            return 0
        async with self._store.pinned(segment) as file:
            size = await self._disk.read_into(file, segment.file_offset(position), buffer[:size])
            if segment.sealed and position + size == segment.end <= self._durable() - CACHED_BYTES:
                await self._disk.drop_cached(file)
        self._stats.read_bytes += size
        return size

    async def fetch(
        self, partition: PartitionState, offset: Offset, bytes_max: int, committed: Offset, upto: Position
    ) -> list[memoryview]:
        """Whole batches from the one that holds `offset` on, below `committed`, at least one."""
        batches: list[memoryview] = []
        size = 0
        wrong = 0
        while offset < committed and (size < bytes_max or not batches):
            if offset < partition.start_offset:
                raise OutOfRange(f"offset {offset} of {partition.topic}/{partition.partition} was removed")
            found = await self._find(partition, offset)
            if found is None:
                break
            try:
                got = await self._fetch_from(found, partition, offset, bytes_max - size, committed, upto, not batches)
            except (_Wrong, BadIndex):
                wrong += 1
                await self._mistrust(found.segment, wrong)
                continue
            if not got:
                break
            wrong = 0
            for frame in got:
                batches.append(frame.data)
                size += len(frame.data)
            offset = Offset(got[-1].base_offset + got[-1].record_count)
        self._stats.fetched_bytes += size
        return batches

    async def _mistrust(self, segment: Segment, times: int) -> None:
        """An index led to the wrong place: make it again. If that was not it, those before it sent us here."""
        if times > 2:
            raise self._corrupt(segment, segment.start, "the frames and the index made of them disagree")
        suspects = [segment] if times == 1 else [s for s in self._store.list if s.end <= segment.end]
        for suspect in suspects:
            if suspect.active is None and not suspect.gone:
                await self.rebuild_index(suspect)

    async def _find(self, partition: PartitionState, offset: Offset) -> Found | None:
        """The segment that holds the batch of `offset`: the first at whose end the partition is beyond it."""
        segments = self._store.list
        if not segments:
            return None
        last = segments[-1]
        if last.active is not None:
            rows = last.active.rows.get((partition.topic, partition.partition))
            if rows is not None and next(last.active.entries(*_key(partition), 0)).base_offset <= offset:
                return Found(last, last.active)
        low, high = 0, len(segments) - 1
        while low < high:
            middle = (low + high) // 2
            segment = segments[middle]
            index = await self.index(segment)
            if segment.gone or middle >= len(segments) or segments[middle] is not segment:
                low, high = 0, len(segments) - 1  # retention or truncation came between
                continue
            try:
                next_offset = index.next_offset(*_key(partition))
            except BadIndex:
                await self.rebuild_index(segment)
                continue
            if next_offset is None or next_offset <= offset:
                low = middle + 1
            else:
                high = middle
        if low >= len(segments):
            return None
        return Found(segments[low], await self.index(segments[low]))

    async def _fetch_from(
        self,
        found: Found,
        partition: PartitionState,
        offset: Offset,
        bytes_max: int,
        committed: Offset,
        upto: Position,
        at_least_one: bool,
    ) -> list[Frame]:
        segment = found.segment
        run: list[Entry] = []
        frames: list[Frame] = []
        size = 0
        for entry in found.entries.entries(*_key(partition), offset):
            if entry.base_offset + entry.record_count > committed or segment.start + entry.relative + entry.size > upto:
                break
            if size + entry.size > bytes_max and (size or not at_least_one):
                break
            if run and run[-1].relative + run[-1].size != entry.relative:
                frames += await self._read_run(segment, partition, run)
                run = []
            run.append(entry)
            size += entry.size
            if size >= READ_BYTES_MAX:
                break
        if run:
            frames += await self._read_run(segment, partition, run)
        if frames and frames[0].base_offset > offset:
            raise _Wrong
        if not frames and segment.end <= upto and at_least_one:
            raise _Wrong  # all of it is committed, and the batch should be here
        return frames

    async def _read_run(self, segment: Segment, partition: PartitionState, run: list[Entry]) -> list[Frame]:
        """Entries whose frames stand side by side: one read."""
        first = run[0].relative
        size = run[-1].relative + run[-1].size - first
        if size > segment.end - segment.start - first:
            raise _Wrong
        async with self._store.pinned(segment) as file:
            data = await self._disk.read(file, segment.file_offset(segment.start + first), size)
        self._stats.read_bytes += len(data)
        view = memoryview(data)
        frames = []
        topic = partition.topic.encode()
        for entry in run:
            position = Position(segment.start + entry.relative)
            try:
                frame = decode(view, entry.relative - first, position, None, self._store.frame_bytes_max)
            except BadFrame as error:
                await self._confirm_damage(segment, position, str(error))
                raise _Wrong from error
            if frame is None:
                await self._confirm_damage(segment, position, "the file ends inside a frame")
                raise _Wrong
            if (frame.kind, frame.topic, frame.partition, frame.base_offset, frame.record_count) != (
                Kind.DATA,
                topic,
                partition.partition,
                entry.base_offset,
                entry.record_count,
            ):
                raise _Wrong
            frames.append(frame)
        return frames

    async def _confirm_damage(self, segment: Segment, position: Position, why: str) -> None:
        """Is it the segment or the index that is wrong? Raises CorruptLog if the segment has no good frame at
        `position` though one should stand there."""
        scanned = await self._store.walk(segment, min(segment.end, self._durable()), _nothing)
        if scanned.why:
            raise self._corrupt(segment, scanned.end, scanned.why)

    def _corrupt(self, segment: Segment, position: Position, why: str) -> CorruptLog:
        self._damaged(Damage(segment.name, position, segment.end, why))
        message = f"{segment.name}: damaged at position {position}: {why}"
        return CorruptLog(message, file=segment.name, start=position, end=segment.end)

    async def index(self, segment: Segment) -> ActiveIndex | SealedIndex:
        """Of any segment; made again if its file is missing or wrong."""
        if segment.active is not None:
            return segment.active
        if segment.mapped is not None:
            self._store.touch_index(segment)
            return segment.mapped
        try:
            index = SealedIndex(await self._disk.map(segment.index_name), segment.start, segment.end)
        except (FileNotFoundError, BadIndex):
            return await self.rebuild_index(segment)
        self._store.map_index(segment, index)
        return index

    async def rebuild_index(self, segment: Segment) -> ActiveIndex | SealedIndex:
        """Read the segment and write its index again. Raises CorruptLog if the segment is not whole."""
        if segment.active is not None:
            raise CorruptLog(f"{segment.name}: the index in memory does not fit the file", file=segment.name)
        index = await self.index_of(segment)
        await self._disk.replace(segment.index_name, index.encode())
        self._stats.indexes_rebuilt += 1
        if self._store.list[-1:] == [segment]:  # a truncation came in between; an index says that one follows
            await self._disk.remove(segment.index_name)
            return index
        sealed = SealedIndex(await self._disk.map(segment.index_name), segment.start, segment.end)
        self._store.map_index(segment, sealed)
        return sealed

    async def index_of(self, segment: Segment) -> ActiveIndex:
        """From the segment's own bytes."""
        intake = Intake(State(), self._store.frame_bytes_max, lambda pending: None)
        self._store.pin(segment)
        try:
            folded = await fold(self._store, segment.end, intake, below=segment.start)
        finally:
            self._store.unpin(segment)
        if folded.end != segment.end:
            raise self._corrupt(self._store.holding(folded.end), folded.end, folded.why)
        folded.active.close(((p.topic, p.partition), p.next_offset) for p in intake.state.partitions())
        return folded.active

    async def checksum_at(self, position: Position) -> Checksum | None:
        """The chain value at a frame boundary; None if no frame ends there."""
        segment = self._store.holding(position)
        if segment.active is not None:
            return segment.active.checksum_at(position)
        if position == segment.start:
            return segment.chain
        index = await self.index(segment)
        landmark = index.landmark(position - segment.start)
        if landmark is None:
            return None
        relative, chain = landmark
        start = Position(segment.start + relative)
        if start == position:
            return chain
        reached = start

        def each(frame: Frame) -> None:
            nonlocal reached, chain
            reached, chain = Position(frame.position + frame.size), frame.checksum
            if reached >= position:
                raise BadFrame("far enough")

        await self._store.walk(segment, segment.end, each, start=start, chain=chain)
        return chain if reached == position else None

    async def offset_for_time(
        self, partition: PartitionState, timestamp_ms: int, committed: Offset
    ) -> tuple[Offset, int] | None:
        """The first committed batch whose max timestamp is at least this: its base offset and that timestamp."""
        for segment in list(self._store.list):
            if segment.gone:
                continue
            index = await self.index(segment)
            row = index.partition(*_key(partition))
            if row is None or row.max_timestamp_ms < timestamp_ms or row.next_offset <= partition.start_offset:
                continue
            for entry in index.entries(*_key(partition), partition.start_offset):
                if entry.base_offset >= committed:
                    return None
                if entry.max_timestamp_ms >= timestamp_ms:
                    return entry.base_offset, entry.max_timestamp_ms
        return None


def _nothing(frame: Frame) -> None:
    """The walk itself is the check."""


def _key(partition: PartitionState) -> tuple[str, int]:
    return partition.topic, partition.partition


def require(partition: PartitionState | None, topic: str, number: int) -> PartitionState:
    if partition is None:
        raise OutOfRange(f"there is no partition {number} of a topic {topic!r}")
    return partition
