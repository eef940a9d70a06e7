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
from functools import cache
from struct import Struct
from typing import Any

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
)
from chronik_repl.wal.index import ENTRY, ActiveIndex
from chronik_repl.wal.state import BATCH, OFFSET_MAX, State

Appended = Callable[[Pending], object]


class Intake:
    def __init__(
        self, state: State, frame_bytes_max: int, appended: Appended, high_watermark: Position | None = None
    ) -> None:
        """`appended` hears of every batch above the high watermark. With one given here,
        committed offsets are set as of it when it is passed, and as of the snapshot that everything begins with, which
        speaks of nothing above it; without one they are someone else's business."""
        self.state = state
        self.index: ActiveIndex | None = None  # of the segment that the frames stand in
        self.records = 0
        self._frame_bytes_max = frame_bytes_max
        self._appended = appended
        self._show_at = high_watermark
        self._shows = high_watermark is not None
        self._name_len = 0  # of the last batch's topic

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
        first = self._shows and self.state.blank
        touched = self.state.apply(frame)
        if first:
            self.show()
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
        name_len, unpack = self._name_len, _unpacker(self._name_len)
        last_name, last_number = b"", -1  # of the frame before: the next one is often of the same partition
        while length - at >= SMALLEST + name_len:
            (
                magic, version, body, topic_len, name, number, base, count, time_ms, kind, of_epoch, stands_at,
                previous, checksum, in_base, in_length, delta, newest_ms, producer_id, producer_epoch, sequence,
            ) = unpack(view, at)  # fmt: skip
            size = body + 8
            frame_end = at + size
            if magic != MAGIC or version != VERSION or size > limit or frame_end > length:
                break
            if topic_len != name_len:
                if topic_len > TOPIC_BYTES_MAX or size < SMALLEST + topic_len:
                    break
                name_len, unpack = topic_len, _unpacker(topic_len)
                continue
            if size < SMALLEST + name_len or kind or stands_at != position or previous != chain:
                break
            if epoch is not None and of_epoch != epoch:
                break
            data_at = at + OVERHEAD + name_len
            if crc32c(view[data_at:frame_end], crc32c(view[at : data_at - 4])) != checksum:
                break
            if number != last_number or name != last_name:
                topic = topics.get(name)
                if topic is None or not 0 <= number < len(topic.partitions):
                    break
                partition = topic.partitions[number]
                key = (topic.name, number)
                last_name, last_number, entries = name, number, rows.get(key)
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
            if entries is None:
                if not rows:
                    index.first_batch_ms = time_ms
                entries = rows[key] = bytearray()
            entries += pack(base, newest_ms, position - start, size, count, 0)
            if show_at is None:
                appended((end, partition, next_offset))
            records += count
            at, position, chain = frame_end, end, checksum
        self.records += records
        self._name_len = name_len
        return at, position, chain


SMALLEST = OVERHEAD + BATCH.size  # a frame with a batch and no topic


@cache
def _unpacker(topic_len: int) -> Callable[[memoryview, int], tuple[Any, ...]]:
    """Of a frame with a topic of this length, in one go: its fields, and those of the batch in it that count here (all
    but leader epoch, magic, CRC, attributes, base timestamp and record count)."""
    whole = Struct(f">HHIH{topic_len}siqIqHIQIIqi4xx4x2xi8xqqhi4x")
    assert whole.size == SMALLEST + topic_len
    return whole.unpack_from
