"""The log's end: where frames get their place. Nothing here waits.

On the leader a batch or a change gets a position, an offset and a time, is folded into the state and goes into the
open group and to the listeners (the rings). On a follower frames come with all that: they are checked, folded and go
into the open group. Where a new segment starts is the leader's decision; it stands in the log as a segment-start
frame, a snapshot of the state.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct

from chronik_repl.errors import ChronikError, DiskFull, NotLeader, OutOfRange, StateFull
from chronik_repl.positions import CHAIN_SEED, NO_EPOCH, ORIGIN, Checksum, Epoch, Offset, Position
from chronik_repl.wal.ages import AgeClock
from chronik_repl.wal.arena import Room
from chronik_repl.wal.changes import Change, EpochStart, LogStartMoved, MembersChanged, SnapshotPart, encode_change
from chronik_repl.wal.committer import Committer
from chronik_repl.wal.disk import Buffer
from chronik_repl.wal.frame import OVERHEAD, BadFrame, Frame, Kind, decode, encode, seal, topic_prefix
from chronik_repl.wal.index import ActiveIndex
from chronik_repl.wal.intake import Intake
from chronik_repl.wal.retention import roll_due
from chronik_repl.wal.segments import Segment, Store
from chronik_repl.wal.snapshot import split
from chronik_repl.wal.state import BATCH, PartitionState, State, kind_of
from chronik_repl.wal.values import Appended, LogSettings, LogStats
from chronik_repl.wal.visibility import Visibility

Listener = Callable[[Position, Buffer, int], None]
BATCH_HEAD = Struct(">q4si")  # base offset, length, leader epoch: what the leader writes into a batch
NO_TOPIC = topic_prefix("")
ROOM_BYTES_MIN = 32 * 1024  # a frame of this size or more stands in memory that was used before
STATE_BYTES_MAX = 64 * 1024 * 1024  # of a snapshot; beyond that nothing is taken that makes it larger
GROWS_NOTHING = (EpochStart, LogStartMoved, MembersChanged)  # may be appended on a disk that is full


class Writer:
    def __init__(
        self,
        store: Store,
        committer: Committer,
        visibility: Visibility,
        settings: LogSettings,
        stats: LogStats,
        clock_ms: Callable[[], int],
        ages: AgeClock,
    ) -> None:
        self._store, self._committer, self._visibility = store, committer, visibility
        self._settings, self._stats, self._clock_ms, self._ages = settings, stats, clock_ms, ages
        self.listeners: list[Listener] = []
        self.state = State()
        self.end = ORIGIN
        self.end_checksum = CHAIN_SEED
        self.epoch = NO_EPOCH  # of the last frame
        self.failure: ChronikError | None = None  # for ever
        self.refusal: ChronikError | None = NotLeader("this node does not lead")  # for the leader's appends
        self._intake = Intake(self.state, settings.frame_bytes_max, visibility.batch_appended)
        self._room = Room()
        self._segment: Segment | None = None  # the one that is appended to
        self._active: ActiveIndex | None = None
        self._snapshot_bytes = 0  # of the last one
        self._changed_bytes = 0  # of changes since then: the state cannot have grown by more
        self._roll_at = ORIGIN  # a frame that would end beyond this goes into a new segment

    def continue_at(self, end: Position, chain: Checksum, state: State, segment: Segment | None) -> None:
        """After opening, truncating or starting anew."""
        self.end, self.end_checksum, self.state = end, chain, state
        self.epoch = Epoch(state.history[-1].epoch) if state.history else NO_EPOCH
        self._intake = Intake(state, self._settings.frame_bytes_max, self._visibility.batch_appended)
        self._segment = self._active = None
        self._roll_at = end
        if segment is not None:
            self._write_into(segment)

    def _write_into(self, segment: Segment) -> None:
        self._segment = segment
        self._active = self._intake.index = segment.active
        self._roll_at = Position(segment.start + self._settings.segment_bytes)

    def begin_epoch(self, epoch: Epoch, change: EpochStart) -> Appended:
        """From here on what is appended carries this epoch, and is accepted."""
        if epoch <= self.epoch:
            raise NotLeader(f"epoch {epoch} is not after {self.epoch}, the log's last")
        if self.failure is not None:
            raise self.failure
        torn_snapshot = self.state.snapshot_pending
        self._snapshot_bytes, self._changed_bytes = len(self.state.snapshot()), 0
        self.epoch = epoch
        self.refusal = None
        if self._segment is None:
            self._roll()
        appended = self._append(change)
        if torn_snapshot:
            # The last leader did not finish it. A log can begin only at a whole one, so here is one.
            self._roll()
        return appended

    def append_batch(self, topic: str, partition: int, batch: Buffer, record_count: int) -> Appended:
        """Give one record batch (v2), which the caller has checked, its place. Returns at once; `durable` says when
        it survived. Raises DiskFull, NotLeader, OutOfRange, BadFrame (too large)."""
        if self.refusal is not None:
            raise self.refusal
        if self._committer.full:
            raise self._disk_full()
        topic_state = self.state.topics.get(topic)
        if topic_state is None or not 0 <= partition < len(topic_state.partitions):
            raise OutOfRange(f"there is no partition {partition} of a topic {topic!r}")
        part = topic_state.partitions[partition]
        prefix = topic_state.prefix
        size = OVERHEAD - 2 + len(prefix) + len(batch)
        if size > self._settings.frame_bytes_max:
            raise BadFrame(f"a frame of {size} bytes; {self._settings.frame_bytes_max} are allowed")
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
        head = BATCH_HEAD.pack(base, bytes(view[8:12]), self.epoch)
        pieces, checksum = seal(
            prefix,
            base,
            record_count,
            now_ms,
            0,
            self.epoch,
            position,
            self.end_checksum,
            partition,
            (head, view[16:]),
        )
        frame = b"".join(pieces) if size < ROOM_BYTES_MIN else self._room.put(pieces, size)
        end = Position(position + size)
        next_offset = part.next_offset = Offset(base + record_count)
        if producer_id >= 0:
            part.produced(producer_id, producer_epoch, sequence, (base, end, record_count), now_ms)
        active = self._active
        assert active is not None
        if not active.rows:
            active.first_batch_ms = now_ms
        active.ends.append(end)
        active.checksums.append(checksum)
        active.add((topic, partition), base, newest_ms, position, size, record_count)
        self._visibility.batch_appended((end, part, next_offset))
        self._push(frame, end, checksum, record_count)
        return Appended(position, end, base, now_ms)

    def append_change(self, change: Change) -> Appended:
        """Give a change of state its place. Raises DiskFull, NotLeader, BadFrame."""
        if self.refusal is not None:
            raise self.refusal
        if self._committer.full and not isinstance(change, GROWS_NOTHING):
            raise self._disk_full()
        self.state.check(change, kind_of(change))
        if self._snapshot_bytes + self._changed_bytes > STATE_BYTES_MAX:
            self._refuse_growth(change)
        return self._append(change)

    def _refuse_growth(self, change: Change) -> None:
        """A segment begins with a snapshot of the state, in memory and on the wire: clients must not make it endless.
        Raises StateFull."""
        if self._changed_bytes > STATE_BYTES_MAX // 4:  # how much of that is there still?
            self._roll()
        if self._snapshot_bytes + self._changed_bytes > STATE_BYTES_MAX and self.state.grows_by(change):
            raise StateFull(
                f"topics, groups and their offsets take more than {STATE_BYTES_MAX} bytes: no more are taken until "
                "some are deleted"
            )

    def _append(self, change: Change) -> Appended:
        data = encode_change(change)
        size = OVERHEAD + len(data)
        if size > self._settings.frame_bytes_max:
            raise BadFrame(f"a frame of {size} bytes; {self._settings.frame_bytes_max} are allowed")
        # An epoch's first frame is its start, but for the very first: so it stands where the last epoch ended.
        if self.end + size > self._roll_at and not isinstance(change, SnapshotPart | EpochStart):
            self._roll()
        state, position, previous = self.state, self.end, self.end_checksum
        now_ms = state.timestamp_ms = max(self._clock_ms(), state.timestamp_ms)
        frame, checksum = encode(NO_TOPIC, 0, 0, now_ms, kind_of(change), self.epoch, position, previous, -1, (data,))
        end = Position(position + size)
        if not isinstance(change, SnapshotPart):
            state.fold(change, position, end, self.epoch, previous)
            self._changed_bytes += len(data)
            if isinstance(change, LogStartMoved):
                self._visibility.start_appended(end, state.log_start)
        assert self._active is not None
        self._active.ends.append(end)
        self._active.checksums.append(checksum)
        self._push(frame, end, checksum, 0)
        return Appended(position, end, Offset(0), now_ms)

    def _push(self, frame: Buffer, end: Position, checksum: Checksum, record_count: int) -> None:
        """Into the open group and to the listeners."""
        segment = self._segment
        assert segment is not None
        position = self.end
        self.end = segment.end = end
        self.end_checksum = checksum
        self._committer.add(segment, frame, end, checksum)
        stats = self._stats
        stats.appended_frames += 1
        stats.appended_bytes += len(frame)
        stats.appended_records += record_count
        for listener in self.listeners:
            listener(position, frame, record_count)

    def roll_aged(self, now_ms: int) -> bool:
        """Begin a new segment if the active one's first batch is old enough for that; True if so."""
        if self.refusal is not None:
            raise self.refusal
        if self._active is None or not roll_due(self._active.first_batch_ms, now_ms, self._settings):
            return False
        self._roll()
        return True

    def _roll(self) -> None:
        """The leader begins a new segment, with a snapshot of the state."""
        self.state.expire(self._ages.now_ms())
        snapshot = self.state.snapshot()
        self._snapshot_bytes, self._changed_bytes = len(snapshot), 0
        parts = split(snapshot)
        self._begin_segment(max(self._clock_ms(), self.state.timestamp_ms))
        for part in parts:
            self._append(part)
        assert self._segment is not None
        self._segment.snapshot_whole = True
        # However large the snapshot is, more than that follows before the next one.
        size = self.end - self._segment.start
        self._roll_at = Position(max(self._roll_at, self.end + max(size, self._settings.segment_bytes // 2)))

    def _begin_segment(self, timestamp_ms: int) -> None:
        """From here on everything goes into a new one. Its file is made when the committer comes to it."""
        if self._active is not None:
            self._active.close(((p.topic, p.partition), p.next_offset) for p in self.state.partitions())
        self._visibility.segment_ended(self.end)
        segment = Segment(self.end, self.end_checksum)
        segment.first_timestamp_ms = timestamp_ms
        segment.active = ActiveIndex(segment.start, segment.chain)
        self._store.list.append(segment)
        self._write_into(segment)

    def _disk_full(self) -> DiskFull:
        return DiskFull(
            f"less than {self._settings.min_free_bytes} bytes are free: appends are refused, reads go on. "
            f"Free some space, or lower CHRONIK_MIN_FREE_BYTES"
        )

    def append_received(self, data: memoryview) -> int:
        """Check and append all whole frames at the start of `data`; returns the bytes consumed. Raises BadFrame,
        DiskFull.

        A segment-start frame among them starts a new segment here too. Whoever gave the bytes does not change them
        as long as a view on them lives: the disk takes them from there.
        """
        if self.failure is not None:
            raise self.failure
        if self._committer.full:
            raise self._disk_full()
        at = taken = 0
        try:
            while True:
                at = self._take_batches(data, at)
                frame = decode(data, at, self.end, self.end_checksum, self._settings.frame_bytes_max)
                if frame is None:
                    return at
                if frame.epoch != self.epoch or self._segment is None:
                    self._check_turn(frame)
                if frame.kind == Kind.SEGMENT_START:
                    self._pass_on(data[taken:at])
                    taken = at
                self._take(frame)
                at += frame.size
        finally:
            self._pass_on(data[taken:at])

    def _check_turn(self, frame: Frame) -> None:
        """A frame of another epoch than the one before it, or the first one of all."""
        if self._segment is None and frame.kind != Kind.SEGMENT_START:
            raise BadFrame(f"the frame at {frame.position} is of kind {frame.kind}; a log begins with a segment start")
        if frame.epoch < self.epoch:
            raise BadFrame(f"the frame at {frame.position} is of epoch {frame.epoch}, after {self.epoch}")
        if frame.epoch > self.epoch and frame.kind != Kind.EPOCH_START and self._segment is not None:
            raise BadFrame(f"epoch {frame.epoch} at {frame.position} has no beginning")

    def _take_batches(self, data: memoryview, at: int) -> int:
        """As many plain batches as there are, the fast way."""
        intake, segment, stats = self._intake, self._segment, self._stats
        if segment is None or self._active is None:
            return at
        start, frames, records = at, len(self._active.ends), intake.records
        at, self.end, self.end_checksum = intake.take_batches(data, at, self.end, self.end_checksum, self.epoch)
        segment.end = self.end
        stats.appended_frames += len(self._active.ends) - frames
        stats.appended_bytes += at - start
        stats.appended_records += intake.records - records
        return at

    def _take(self, frame: Frame) -> None:
        """One frame that is no plain batch, or is not right. Raises BadFrame."""
        touched: PartitionState | Change
        end = Position(frame.position + frame.size)
        if frame.kind == Kind.SEGMENT_START:
            first = self.state.blank
            touched = self.state.apply(frame)
            if first:  # a log that begins here: what stood before is committed, and is not here
                self._intake.show()
                for partition in self.state.partitions():
                    partition.start_offset = max(partition.start_offset, partition.next_offset)
            assert isinstance(touched, SnapshotPart)
            if touched.part == 0:
                self._begin_segment(frame.timestamp_ms)
            assert self._active is not None
            assert self._segment is not None
            self._active.add_frame(frame, "")
            if touched.part == touched.parts - 1:
                self._segment.snapshot_whole = True
                self._visibility.start_appended(end, self.state.log_start)
        else:
            touched = self._intake.take(frame)
            if isinstance(touched, LogStartMoved):
                self._visibility.start_appended(end, self.state.log_start)
            elif isinstance(touched, PartitionState):
                self._stats.appended_records += frame.record_count
        assert self._segment is not None
        self.end = self._segment.end = end
        self.end_checksum = frame.checksum
        self.epoch = frame.epoch
        self._stats.appended_frames += 1
        self._stats.appended_bytes += frame.size

    def _pass_on(self, frames: memoryview) -> None:
        """Checked frames that end where the log does, to the committer. They are not copied: what is received next
        goes elsewhere as long as someone holds them."""
        if frames:
            assert self._segment is not None
            self._committer.add(self._segment, frames, self.end, self.end_checksum, all_there_is=True)
