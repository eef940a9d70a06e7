"""The log: append and get a place at once, wait until it is durable, read it back, recover.

One log a node, for all topics. `append_*` gives frames their positions and offsets, folds them into the state and puts
them into the open group and to the listeners (the rings); nothing there waits. The committer (committer.py) makes groups durable
and moves `durable`. The role decides what is committed and says so by `commit_to`; readers see what is below `committed`,
which never exceeds what is durable here.

Everything runs on the event loop's thread. `run` must run for anything to become durable. A failed write or sync is
final: everyone who waits gets DiskFailed, nothing more is accepted, `run` raises it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from struct import Struct

import trio

from chronik_repl.errors import ChronikError, CorruptLog, DiskFailed, DiskFull, NotLeader, OutOfRange
from chronik_repl.positions import CHAIN_SEED, NO_EPOCH, ORIGIN, Checksum, Epoch, Offset, Position
from chronik_repl.wal.changes import (
    Change,
    EpochStart,
    LogStartMoved,
    MembersChanged,
    SnapshotPart,
    encode_change,
)
from chronik_repl.wal.committer import Committer
from chronik_repl.wal.disk import Buffer, Disk, Write
from chronik_repl.wal.frame import OVERHEAD, BadFrame, Frame, Kind, decode, encode, topic_prefix
from chronik_repl.wal.index import ActiveIndex
from chronik_repl.wal.opening import OPEN_STEP, Loaded, Pending, fold, load, look_at_head
from chronik_repl.wal.reader import Reader, require
from chronik_repl.wal.segment import FOLDER, FRAMES_AT, Mark
from chronik_repl.wal.segments import Segment, Store
from chronik_repl.wal.snapshot import split
from chronik_repl.wal.state import BATCH, PartitionState, State, kind_of
from chronik_repl.wal.values import Appended, Damage, Fetched, LogSettings, LogStats
from chronik_repl.wal.watermark import Watermark

Listener = Callable[[Position, bytes, int], None]
BATCH_HEAD = Struct(">q4si")  # base offset, length, leader epoch: what the leader writes into a batch
NO_TOPIC = topic_prefix("")
GROWS_NOTHING = (EpochStart, LogStartMoved, MembersChanged)  # may be appended on a disk that is full


def wall_clock_ms() -> int:
    return time.time_ns() // 1_000_000


class Log:
    def __init__(self, disk: Disk, settings: LogSettings, clock_ms: Callable[[], int]) -> None:
        """Use `open`."""
        self.settings = settings
        self.stats = LogStats()
        self.damage: list[Damage] = []
        self.listeners: list[Listener] = []
        self.cluster_id: str | None = None
        self.state = State()
        self.end = ORIGIN
        self.end_checksum = CHAIN_SEED
        self.durable = Watermark(ORIGIN)
        self.durable_checksum = CHAIN_SEED
        self.committed = Watermark(ORIGIN)
        self._disk = disk
        self._clock_ms = clock_ms
        self._store = Store(disk, settings.frame_bytes_max)
        self._committer = Committer(
            disk, self._store, settings, self.stats, self._became_durable, lambda: self.committed.value
        )
        self._reader = Reader(disk, self._store, self.stats, self._note_damage)
        self._epoch = NO_EPOCH  # of the last frame
        self._refusal: ChronikError | None = NotLeader("this node does not lead")
        self._failure: DiskFailed | None = None
        self._commit_goal = ORIGIN  # what the role said is committed; may be ahead of what is durable here
        self._pending: deque[Pending] = deque()  # batches above the high watermark
        self._starts: deque[tuple[Position, Position]] = deque()  # log starts above it: end of the frame, start
        self._start_moved = trio.Event()
        self._active: ActiveIndex | None = None
        self._segment: Segment | None = None  # the one that is appended to
        self._roll_at = ORIGIN  # a frame that would end beyond this goes into a new segment

    # Opening and closing

    @classmethod
    async def open(
        cls,
        disk: Disk,
        settings: LogSettings,
        cluster_id: str | None,
        *,
        clock_ms: Callable[[], int] = wall_clock_ms,
    ) -> Log:
        """Recover what is there. Raises CorruptLog, ForeignLog, FormatTooNew, having changed nothing.

        `cluster_id` None: take what is there.
        """
        log = cls(disk, settings, clock_ms)
        try:
            await log._recover(await load(disk, log._store, cluster_id))
        except BaseException:
            log._store.close()
            raise
        return log

    async def _recover(self, loaded: Loaded) -> None:
        """What counts is known: make it durable, and the rest gone."""
        await self._disk.make_folder(FOLDER)
        for name in loaded.leftovers:
            await self._disk.remove(f"{FOLDER}/{name}")
        self.cluster_id = loaded.cluster_id
        self._committer.cluster_id = loaded.cluster_id or ""
        if not loaded.segments:
            return
        last = loaded.segments[-1]
        if not loaded.state.history and loaded.segments[0].start == ORIGIN:
            # Founded, and cut off before its first epoch began: nothing was ever accepted.
            for segment in reversed(loaded.segments):
                await self._store.forget(segment)
            await self._disk.sync_dir(FOLDER)
            return
        file = await self._store.file(last)
        self._committer.start_at(last, loaded.end, loaded.mark)
        self.end, self.end_checksum = loaded.end, loaded.chain
        high_watermark = min(loaded.mark.high_watermark, loaded.end)
        self.committed = Watermark(high_watermark)
        self._commit_goal = high_watermark
        if loaded.end > loaded.mark.durable_end:
            # It may be in the page cache only: write it again, so that the sync means something.
            data = await self._disk.read(
                file, last.file_offset(loaded.mark.durable_end), loaded.end - loaded.mark.durable_end
            )
            await self._disk.commit(file, (Write(last.file_offset(loaded.mark.durable_end), (data,)),))
        if not await self._zeros_after(last, loaded.end, loaded.file_end):
            await self._disk.zero(file, last.file_offset(loaded.end), last.file_offset(loaded.file_end))
        self.durable = Watermark(loaded.end)
        self.durable_checksum = loaded.chain
        await self._committer.mark()
        self._adopt_state(loaded.state, loaded.pending)
        self._write_into(last)
        for segment in loaded.segments[:-1]:
            segment.sealed = True
        if loaded.end == last.start and len(loaded.segments) > 1:
            await self._cut(loaded.end)
        await self._raise_starts()

    async def _zeros_after(self, segment: Segment, start: Position, end: Position) -> bool:
        async with self._store.pinned(segment) as file:
            while start < end:
                data = await self._disk.read(file, segment.file_offset(start), min(OPEN_STEP, end - start))
                if not data:
                    break
                if data.count(0) != len(data):
                    return False
                start = Position(start + len(data))
        return True

    def _adopt_state(self, state: State, pending: Sequence[Pending]) -> None:
        self.state = state
        self._pending = deque(pending)
        self._epoch = state.history[-1].epoch if state.history else NO_EPOCH
        self._starts = deque([(self.end, state.log_start)])

    def _write_into(self, segment: Segment) -> None:
        self._segment, self._active = segment, segment.active
        self._roll_at = Position(segment.start + self.settings.segment_bytes)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Make what is appended durable, until cancelled. Raises DiskFailed."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._committer.work)
                nursery.start_soon(self._committer.work)
                nursery.start_soon(self._committer.keep_marks_fresh)
                nursery.start_soon(self._committer.keep_spare)
                nursery.start_soon(self._committer.watch_space)
                nursery.start_soon(self._keep_sealing)
                nursery.start_soon(self._keep_removing)
                task_status.started()
        except* DiskFailed as errors:
            failure = _first(errors)
            self._fail(failure)
            raise failure from None

    async def close(self) -> None:
        """After `run` has ended: the rest becomes durable, and a mark says so. Not after a failure."""
        try:
            if self._failure is None:
                await self._committer.finish()
        finally:
            self._store.close()

    def _fail(self, error: DiskFailed) -> None:
        self._failure = error
        self._refusal = error
        self.durable.fail_forever(error)
        self.committed.fail_forever(error)

    # Where it stands

    @property
    def start(self) -> Position:
        """The first position that is held here."""
        return self._store.list[0].start if self._store.list else self.end

    @property
    def segments(self) -> int:
        return len(self._store.list)

    @property
    def pending_bytes(self) -> int:
        """Appended and not yet with the disk."""
        return self._committer.pending_bytes

    @property
    def full(self) -> bool:
        """Below the floor of free space."""
        return self._committer.full

    def committed_offset(self, topic: str, partition: int) -> Offset:
        return require(self.state.find(topic, partition), topic, partition).committed_offset

    def end_offset(self, topic: str, partition: int) -> Offset:
        return require(self.state.find(topic, partition), topic, partition).next_offset

    def log_start_offset(self, topic: str, partition: int) -> Offset:
        return require(self.state.find(topic, partition), topic, partition).start_offset

    # Appending, as the leader

    def found(self, cluster_id: str) -> None:
        """The log is brand-new, and this node will write its first frame."""
        assert not self._store.list, "a log is founded once"
        self.cluster_id = self._committer.cluster_id = cluster_id

    def begin_epoch(self, epoch: Epoch, change: EpochStart) -> Appended:
        """From here on what is appended carries this epoch, and is accepted."""
        if epoch <= self._epoch:
            raise NotLeader(f"epoch {epoch} is not after {self._epoch}, the log's last")
        if self._failure is not None:
            raise self._failure
        assert self.cluster_id, "found() comes first"
        torn_snapshot = self.state.snapshot_pending
        self._epoch = epoch
        self._refusal = None
        if self._segment is None:
            self._roll()
        appended = self._append(change)
        if torn_snapshot:
            # The last leader did not finish it. A log can begin only at a whole one, so here is one.
            self._roll()
        return appended

    def append_batch(self, topic: str, partition: int, batch: Buffer, *, record_count: int) -> Appended:
        """Give one record batch (v2), which the caller has checked, its place. Returns at once; `durable` says when
        it survived. Raises DiskFull, NotLeader, OutOfRange, BadFrame (too large)."""
        if self._refusal is not None:
            raise self._refusal
        if self._committer.full:
            raise self._disk_full()
        topic_state = self.state.topics.get(topic)
        if topic_state is None or not 0 <= partition < len(topic_state.partitions):
            raise OutOfRange(f"there is no partition {partition} of a topic {topic!r}")
        part = topic_state.partitions[partition]
        prefix = topic_state.prefix
        size = OVERHEAD - 2 + len(prefix) + len(batch)
        if size > self.settings.frame_bytes_max:
            raise BadFrame(f"a frame of {size} bytes; {self.settings.frame_bytes_max} are allowed")
        if self.end + size > self._roll_at:
            self._roll()
        position = self.end
        state = self.state
        now_ms = self._clock_ms()
        if now_ms < state.timestamp_ms:
            now_ms = state.timestamp_ms
        else:
            state.timestamp_ms = now_ms
        base = part.next_offset
        view = memoryview(batch)
        _, _, _, _, _, _, _, _, newest_ms, producer_id, producer_epoch, sequence, _ = BATCH.unpack_from(view)
        head = BATCH_HEAD.pack(base, bytes(view[8:12]), self._epoch)
        frame, checksum = encode(
            prefix,
            base,
            record_count,
            now_ms,
            0,
            self._epoch,
            position,
            self.end_checksum,
            partition,
            (head, view[16:]),
        )
        end = Position(position + size)
        next_offset = part.next_offset = Offset(base + record_count)
        if producer_id >= 0:
            part.produced(producer_id, producer_epoch, sequence, (base, end, record_count), now_ms)
        active = self._active
        assert active is not None and self._segment is not None
        active.ends.append(end)
        active.checksums.append(checksum)
        active.add((topic, partition), base, newest_ms, position, size, record_count)
        self._pending.append(Pending(end, part, next_offset))
        self._push(frame, end, checksum, record_count)
        return Appended(position, end, base, now_ms)

    def append_change(self, change: Change) -> Appended:
        """Give a change of state its place. Raises DiskFull, NotLeader, BadFrame."""
        if self._refusal is not None:
            raise self._refusal
        if self._committer.full and not isinstance(change, GROWS_NOTHING):
            raise self._disk_full()
        self.state.check(change, kind_of(change))
        return self._append(change)

    def _append(self, change: Change) -> Appended:
        data = encode_change(change)
        size = OVERHEAD + len(data)
        if size > self.settings.frame_bytes_max:
            raise BadFrame(f"a frame of {size} bytes; {self.settings.frame_bytes_max} are allowed")
        if self.end + size > self._roll_at and not isinstance(change, SnapshotPart):
            self._roll()
        state, position, previous = self.state, self.end, self.end_checksum
        now_ms = state.timestamp_ms = max(self._clock_ms(), state.timestamp_ms)
        frame, checksum = encode(NO_TOPIC, 0, 0, now_ms, kind_of(change), self._epoch, position, previous, -1, (data,))
        end = Position(position + size)
        if not isinstance(change, SnapshotPart):
            state.fold(change, position, end, self._epoch, previous)
            if isinstance(change, LogStartMoved):
                self._starts.append((end, state.log_start))
        assert self._active is not None
        self._active.ends.append(end)
        self._active.checksums.append(checksum)
        self._push(frame, end, checksum, 0)
        return Appended(position, end, Offset(0), now_ms)

    def _push(self, frame: bytes, end: Position, checksum: Checksum, record_count: int) -> None:
        """Into the open group and to the listeners."""
        segment = self._segment
        assert segment is not None
        position = self.end
        self.end = segment.end = end
        self.end_checksum = checksum
        self._committer.add(segment, frame, end, checksum)
        stats = self.stats
        stats.appended_frames += 1
        stats.appended_bytes += len(frame)
        stats.appended_records += record_count
        for listener in self.listeners:
            listener(position, frame, record_count)

    def _roll(self) -> None:
        """The leader begins a new segment, with a snapshot of the state."""
        self.state.expire()
        parts = split(self.state.snapshot())
        self._begin_segment(max(self._clock_ms(), self.state.timestamp_ms))
        for part in parts:
            self._append(part)
        assert self._segment is not None
        self._segment.snapshot_whole = True
        self._roll_at = Position(max(self._roll_at, self.end + 1))

    def _begin_segment(self, timestamp_ms: int) -> None:
        """From here on everything goes into a new one. Its file is made when the committer comes to it."""
        if self._active is not None:
            self._active.close(((p.topic, p.partition), p.next_offset) for p in self.state.partitions())
        segment = Segment(self.end, self.end_checksum)
        segment.first_timestamp_ms = timestamp_ms
        segment.active = ActiveIndex(segment.start, segment.chain)
        self._store.list.append(segment)
        self._write_into(segment)

    def _disk_full(self) -> DiskFull:
        return DiskFull(
            f"less than {self.settings.min_free_bytes} bytes are free: appends are refused, reads go on. "
            f"Free some space, or lower CHRONIK_MIN_FREE_BYTES"
        )

    def stop_accepting(self, error: ChronikError) -> None:
        """Deposed or draining: appends raise it, and those who wait now get it."""
        self._refusal = self._failure or error
        self.durable.fail(error)
        self.committed.fail(error)

    def accept(self) -> None:
        self._refusal = self._failure

    # Appending, as a follower

    def append_received(self, data: memoryview) -> int:
        """Check and append all whole frames at the start of `data`; returns the bytes consumed. Raises BadFrame, DiskFull.

        A segment-start frame among them starts a new segment here too.
        """
        if self._failure is not None:
            raise self._failure
        if self._committer.full:
            raise self._disk_full()
        at = taken = 0
        try:
            while True:
                frame = decode(data, at, self.end, self.end_checksum, self.settings.frame_bytes_max)
                if frame is None:
                    return at
                if frame.epoch != self._epoch or self._segment is None:
                    self._check_turn(frame)
                touched = self.state.apply(frame)
                if isinstance(touched, SnapshotPart) and touched.part == 0:
                    self._pass_on(data[taken:at])
                    taken = at
                    self._begin_segment(frame.timestamp_ms)
                self._take(frame, touched)
                at += frame.size
        finally:
            self._pass_on(data[taken:at])

    def _check_turn(self, frame: Frame) -> None:
        """A frame of another epoch than the one before it, or the first one of all."""
        if self._segment is None and frame.kind != Kind.SEGMENT_START:
            raise BadFrame(f"the frame at {frame.position} is of kind {frame.kind}; a log begins with a segment start")
        if frame.epoch < self._epoch:
            raise BadFrame(f"the frame at {frame.position} is of epoch {frame.epoch}, after {self._epoch}")
        if frame.epoch > self._epoch and frame.kind != Kind.EPOCH_START and self._segment is not None:
            raise BadFrame(f"epoch {frame.epoch} at {frame.position} has no beginning")

    def _take(self, frame: Frame, touched: PartitionState | Change) -> None:
        end = Position(frame.position + frame.size)
        active, segment = self._active, self._segment
        assert active is not None and segment is not None
        stats = self.stats
        if isinstance(touched, PartitionState):
            active.add_frame(frame, touched.topic)
            self._pending.append(Pending(end, touched, touched.next_offset))
            stats.appended_records += frame.record_count
        else:
            active.add_frame(frame, "")
            if isinstance(touched, LogStartMoved):
                self._starts.append((end, self.state.log_start))
            elif isinstance(touched, SnapshotPart) and touched.part == touched.parts - 1:
                segment.snapshot_whole = True
                self._starts.append((end, self.state.log_start))
        self.end = segment.end = end
        self.end_checksum = frame.checksum
        self._epoch = frame.epoch
        stats.appended_frames += 1
        stats.appended_bytes += frame.size

    def _pass_on(self, frames: memoryview) -> None:
        if frames:
            assert self._segment is not None
            self._committer.add(self._segment, bytes(frames), self.end, self.end_checksum)

    async def begin_at(self, position: Position, chain: Checksum, cluster_id: str) -> None:
        """Forget everything and start anew at a segment start of the leader's."""
        async with self._committer.alone():
            self._committer.discard()
            await self._forget_from(ORIGIN)
            self.cluster_id = self._committer.cluster_id = cluster_id
            self._start_empty(position, chain)

    def _start_empty(self, position: Position, chain: Checksum) -> None:
        self._committer.start_at(None, position, None)
        self._segment = self._active = None
        self._roll_at = position
        self.end, self.end_checksum, self.durable_checksum = position, chain, chain
        self.durable.reset(position)
        self.committed.reset(position)
        self._commit_goal = position
        self._adopt_state(State(), ())

    async def _forget_from(self, position: Position) -> None:
        """Remove every segment that starts at or after `position`, the last one first."""
        for segment in [s for s in reversed(self._store.list) if s.start >= position]:
            if segment is self._committer.current:
                self._committer.start_at(None, segment.start, None)
            if segment in self._committer.finished:
                self._committer.finished.remove(segment)
            await self._store.forget(segment)
            await self._disk.sync_dir(FOLDER)

    async def truncate(self, to: Position, *, lost: bool = False) -> None:
        """Cut everything from `to` on. `lost`: it may be below the high watermark, and what is cut is kept in lost/.

        Raises OutOfRange if no frame ends there, or (without `lost`) if it is below the high watermark.
        """
        if to == self.end:
            return
        if to < self.start or to > self.end or await self.checksum_at(to) is None:
            raise OutOfRange(
                f"cannot truncate to {to}: the log is from {self.start} to {self.end} and no frame ends there"
            )
        if to < self.committed.value and not lost:
            raise OutOfRange(f"cannot truncate to {to}: it is committed up to {self.committed.value}")
        await self.durable.wait(self.end)
        async with self._committer.alone():
            if lost:
                await self._keep_lost(to)
            await self._cut(to)

    async def _keep_lost(self, to: Position) -> None:
        await self._disk.make_folder("lost")
        position, number = to, 0
        while position < self.end:
            data = await self._reader.read(position, 16 * 1024 * 1024, self.end)
            await self._disk.replace(f"lost/{to:020d}-{self.end:020d}.{number:06d}", data)
            position, number = Position(position + len(data)), number + 1

    async def _cut(self, to: Position) -> None:
        segment = self._store.holding(Position(max(to - 1, self.start)))
        if to == segment.start:
            await self._forget_from(ORIGIN)
            self._start_empty(to, segment.chain)
            return
        file = await self._store.file(segment)
        if self.committed.value > to:
            self.committed.reset(to)
        self._commit_goal = self.committed.value
        await self._committer.lower_marks(segment, to)
        await self._forget_from(Position(segment.start + 1))
        self._committer.start_at(segment, to, None)
        await self._disk.remove(segment.index_name)
        self._store.drop_index(segment)
        size = FRAMES_AT + max(self.settings.segment_bytes, segment.end - segment.start)
        await self._disk.zero(file, segment.file_offset(to), size)
        segment.end, segment.sealed = to, False
        if segment in self._committer.finished:
            self._committer.finished.remove(segment)
        await self._refold(to)
        await self._committer.mark()

    async def _refold(self, to: Position) -> None:
        """The state at `to`, which is the log's end from now on."""
        last = self._store.list[-1]
        index = ActiveIndex(last.start, last.chain)
        pending: list[Pending] = []
        high_watermark = self.committed.value
        offsets = {(p.topic, p.partition): p.committed_offset for p in self.state.partitions()}

        def each(state: State, frame: Frame, touched: object) -> None:
            end = Position(frame.position + frame.size)
            if isinstance(touched, PartitionState) and end > high_watermark:
                pending.append(Pending(end, touched, touched.next_offset))
            if frame.position >= last.start:
                index.add_frame(frame, touched.topic if isinstance(touched, PartitionState) else "")

        folded = await fold(self._store, to, each, below=to, step=OPEN_STEP)
        if folded.end != to:
            name = self._store.holding(folded.end).name
            raise CorruptLog(f"{name}: damaged at position {folded.end}: {folded.why}", file=name, start=folded.end)
        for partition in folded.state.partitions():
            known = offsets.get((partition.topic, partition.partition), Offset(0))
            partition.committed_offset = min(known, partition.next_offset)
        self.end, self.end_checksum, self.durable_checksum = to, folded.chain, folded.chain
        self.durable.reset(to)
        self._adopt_state(folded.state, pending)
        last.active = index
        await look_at_head(self._disk, self._store, last)
        self._write_into(last)
        await self._raise_starts()

    # Durable and committed

    def _became_durable(self, end: Position, chain: Checksum) -> None:
        if end > self.durable.value:
            self.durable_checksum = chain
            self.durable.advance(end)
            if self._commit_goal > self.committed.value:
                self.commit_to(self._commit_goal)

    def commit_to(self, position: Position) -> None:
        """The high watermark, as the role knows it. Never back; never shown above what is durable here."""
        if position > self._commit_goal:
            self._commit_goal = position
        target = min(self._commit_goal, self.durable.value)
        if target <= self.committed.value:
            return
        pending = self._pending
        while pending and pending[0].end <= target:
            _, partition, next_offset = pending.popleft()
            partition.committed_offset = Offset(next_offset)
        self.committed.advance(target)
        self._committer.high_watermark_moved()
        if self._starts and self._starts[0][0] <= target:
            self._start_moved.set()

    # Reading

    async def read(self, position: Position, size_max: int) -> bytes:
        """The stream's bytes from `position`, up to the end of its segment, as far as they are durable here."""
        return await self._reader.read(position, size_max, self.durable.value)

    async def segment_bounds(self, position: Position) -> tuple[Position, Position, Checksum]:
        """Of the segment that holds `position`: start, end, and the chain value at its start."""
        segment = self._store.holding(position)
        return segment.start, segment.end, segment.chain

    async def checksum_at(self, position: Position) -> Checksum | None:
        """The chain value at a frame boundary; None if no frame ends there. Raises OutOfRange."""
        if position == self.end:
            return self.end_checksum
        return await self._reader.checksum_at(position)

    async def fetch(
        self, topic: str, partition: int, offset: int, bytes_max: int, *, upto: Position | None = None
    ) -> Fetched:
        """Whole batches from the one that holds `offset` on, below the high watermark (and `upto`); at least one, even if
        it is larger than `bytes_max`. Empty from the high watermark to the next offset. Raises OutOfRange."""
        part = require(self.state.find(topic, partition), topic, partition)
        if not part.start_offset <= offset <= part.next_offset:
            raise OutOfRange(
                f"offset {offset} of {topic}/{partition}: the log has {part.start_offset} to {part.next_offset}"
            )
        committed = part.committed_offset
        limit = self.committed.value if upto is None else min(upto, self.committed.value)
        batches = await self._reader.fetch(part, Offset(offset), bytes_max, committed, limit)
        next_offset = Offset(offset)
        if batches:
            base, _, _, _, _, _, last_delta, _, _, _, _, _, _ = BATCH.unpack_from(batches[-1])
            next_offset = Offset(base + last_delta + 1)
        return Fetched(batches, next_offset, committed, part.start_offset)

    async def offset_for_time(self, topic: str, partition: int, timestamp_ms: int) -> tuple[Offset, int] | None:
        """The first committed batch with a record at or after this time: its base offset and its newest timestamp."""
        part = require(self.state.find(topic, partition), topic, partition)
        return await self._reader.offset_for_time(part, timestamp_ms, part.committed_offset)

    # In the background

    async def _keep_sealing(self) -> None:
        committer = self._committer
        while True:
            await committer.to_seal.wait()
            committer.to_seal = trio.Event()
            while committer.finished:
                await self._seal(committer.finished[0])
                committer.finished.popleft()

    async def _seal(self, segment: Segment) -> None:
        """Cut to size, its index beside it, read-only."""
        assert segment.active is not None
        async with self._store.pinned(segment) as file:
            await self._disk.truncate(file, segment.file_offset(segment.end))
            await self._disk.replace(segment.index_name, segment.active.encode())
            await self._disk.set_read_only(segment.name)
        segment.sealed = True
        segment.active = None

    async def _keep_removing(self) -> None:
        """Retention: once a new log start is committed, the segments before it go."""
        while True:
            await self._start_moved.wait()
            self._start_moved = trio.Event()
            start = ORIGIN
            while self._starts and self._starts[0][0] <= self.committed.value:
                start = max(start, self._starts.popleft()[1])
            await self._remove_before(start)

    async def _remove_before(self, start: Position) -> None:
        gone = [s for s in self._store.list if s.end <= start and s.sealed]
        for segment in gone:
            await self._store.forget(segment)
            await self._disk.sync_dir(FOLDER)  # each in turn: a power cut must not leave a gap behind
            self.stats.segments_removed += 1
        if gone:
            await self._raise_starts()

    async def _raise_starts(self) -> None:
        """A partition begins with what it had next at the log's first segment."""
        if not self._store.list or self._store.list[0].start == ORIGIN:
            return
        first = self._store.list[0]
        state = State()

        def each(frame: Frame) -> None:
            if frame.kind != Kind.SEGMENT_START:
                raise BadFrame("the snapshot ends here")
            state.apply(frame)

        await self._store.walk(first, min(first.end, self.durable.value), each)
        for then in state.partitions():
            now = self.state.find(then.topic, then.partition)
            if now is not None:
                now.start_offset = max(now.start_offset, then.next_offset)

    def _note_damage(self, damage: Damage) -> None:
        if damage not in self.damage:
            self.damage.append(damage)


def _first(errors: BaseExceptionGroup[DiskFailed]) -> DiskFailed:
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, DiskFailed)
    return error


__all__ = ["Appended", "Damage", "Fetched", "Log", "LogSettings", "LogStats", "Mark", "Watermark"]
