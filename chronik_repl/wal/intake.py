"""Frames that come from a file or a peer: into the state, the index, and the queue of what the high watermark has to
pass.

`take` is the careful way, for one frame that was decoded. `take_batches` is the fast one: it walks over frames that are
plain record batches, whole and in order, in one pass without an object for each, and stops before the first that is
anything else. It never says what is wrong with a frame: that is the careful way's to find out. So a follower and a
recovery pay a few µs for a frame, and a mistake here could only be to take what the careful way would not; a test
compares them.
"""

from __future__ import annotations

from collections.abc import Callable

from crc32c import crc32c

from chronik_repl.positions import Checksum, Epoch, Position
from chronik_repl.wal.changes import Change
from chronik_repl.wal.entities import PartitionState, Pending
from chronik_repl.wal.frame import (
    MAGIC,
    OVERHEAD,
    TOPIC_BYTES_MAX,
    VERSION,
    Frame,
    fields_and_checksum,
    head_and_topic_len,
)
from chronik_repl.wal.index import ENTRY, ActiveIndex
from chronik_repl.wal.state import BATCH, OFFSET_MAX, State

Appended = Callable[[Pending], object]


class Intake:
    def __init__(
        self, state: State, frame_bytes_max: int, appended: Appended, high_watermark: Position | None = None
    ) -> None:
        """`appended` hears of every batch above the high watermark. With one given here,
        committed offsets are set as of it when it is passed; without one they are someone else's business."""
        self.state = state
        self.index: ActiveIndex | None = None  # of the segment that the frames stand in
        self.records = 0
        self._frame_bytes_max = frame_bytes_max
        self._appended = appended
        self._show_at = high_watermark

    def show(self) -> None:
        """All that was taken so far is committed."""
        for partition in self.state.partitions():
            partition.committed_offset = partition.next_offset

    def take(self, frame: Frame) -> PartitionState | Change:
        """Returns what it touched. Raises BadFrame, with nothing changed, if the frame cannot stand here."""
        end = Position(frame.position + frame.size)
        if self._show_at is not None and end > self._show_at:
            self.show()
            self._show_at = None
        touched = self.state.apply(frame)
        if isinstance(touched, PartitionState):
            self.records += frame.record_count
            if self._show_at is None:
                self._appended((end, touched, touched.next_offset))
            if self.index is not None:
                self.index.add_frame(frame, touched.topic)
        elif self.index is not None:
            self.index.add_frame(frame, "")
        return touched

    def take_batches(
        self, view: memoryview, at: int, position: Position, chain: Checksum, epoch: Epoch | None = None
    ) -> tuple[int, Position, Checksum]:
        """From `at` of `view` on, where the frame of `position` stands; returns where it stopped, and why is not its to
        say. `epoch`: only frames of this one."""
        state, index, appended = self.state, self.index, self._appended
        if index is None or state.snapshot_pending:
            return at, position, chain
        topics, rows, start = state.topics_raw, index.rows, index.start
        add_end, add_checksum, pack = index.ends.append, index.checksums.append, ENTRY.pack
        limit, length, show_at = self._frame_bytes_max, len(view), self._show_at
        now_ms, records = state.timestamp_ms, 0
        while length - at >= SMALLEST:
            magic, version, body, topic_len = head_and_topic_len(view, at)
            size = body + 8
            frame_end = at + size
            if magic != MAGIC or version != VERSION or size > limit or frame_end > length:
                break
            if topic_len > TOPIC_BYTES_MAX or size < SMALLEST + topic_len:
                break
            fields_at = at + 10 + topic_len
            number, base, count, time_ms, kind, of_epoch, stands_at, previous, checksum = fields_and_checksum(
                view, fields_at
            )
            if kind or stands_at != position or previous != chain or (epoch is not None and of_epoch != epoch):
                break
            data_at = fields_at + 46
            if crc32c(view[data_at:frame_end], crc32c(view[at : data_at - 4])) != checksum:
                break
            topic = topics.get(bytes(view[at + 10 : fields_at]))
            if topic is None or not 0 <= number < len(topic.partitions):
                break
            partition = topic.partitions[number]
            in_base, in_length, _, _, _, _, delta, _, newest_ms, producer_id, producer_epoch, sequence, _ = (
                _unpack_batch(view, data_at)
            )
            if in_base != base or base != partition.next_offset or delta + 1 != count or count < 1:
                break
            if data_at + 12 + in_length != frame_end or base > OFFSET_MAX - count:
                break
            end = position + size
            if show_at is not None and end > show_at:
                break
            partition.next_offset = next_offset = base + count
            if producer_id >= 0:
                partition.produced(producer_id, producer_epoch, sequence, (base, end, count), time_ms)
            if time_ms > now_ms:
                now_ms = state.timestamp_ms = time_ms
            add_end(end)
            add_checksum(checksum)
            row = pack(base, newest_ms, position - start, size, count, 0)
            key = (topic.name, number)
            if key in rows:
                rows[key] += row
            else:
                rows[key] = bytearray(row)
            if show_at is None:
                appended((end, partition, next_offset))
            records += count
            at, position, chain = frame_end, end, checksum
        self.records += records
        return at, position, chain


_unpack_batch = BATCH.unpack_from
SMALLEST = OVERHEAD + BATCH.size  # a frame with a batch and no topic
