"""Where a segment's batches stand, by (topic, partition, offset). This file owns the index file's layout.

    <segment's 20 digits>.idx, big-endian:
    header      8s magic "CHRONIDX" | u32 format | u64 segment start | u64 segment end | u32 chain at the end
                u32 partitions | u32 entries | u32 landmarks | u32 names_bytes | u32 CRC32C of all that follows | u32
                CRC32C of the header so far
    partitions  36 bytes each, sorted by (topic, partition): those in use at the segment's end or with batches here
                u32 name_at | u16 name_len | u16 0 | i32 partition | u32 first_entry | u32 entry_count
                i64 next_offset at the segment's end | i64 max_timestamp of its batches here (-1: none)
    entries     32 bytes each, a batch: by partition as above, then by base offset
                i64 base_offset | i64 max_timestamp | u32 position - segment start | u32 frame size | u32 record_count
                | u32 0
    landmarks   8 bytes each, about one every 64 KiB: u32 position - segment start of a frame | u32 chain value there
    names       the topics' names

It can always be made again from the segment, so it is never trusted: a reader checks the CRCs and the segment's
bounds, and what an entry leads to must be the frame that was asked for.

The active segment's index is the same rows in memory, a bytearray for each partition, and one (end, checksum) a frame.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol

from crc32c import crc32c

from chronik_repl.errors import ChronikError
from chronik_repl.positions import Checksum, Offset, Position
from chronik_repl.wal.frame import Frame, Kind

MAGIC = b"CHRONIDX"
FORMAT = 1
HEADER = struct.Struct(">8sIQQIIIIII")
CRC = struct.Struct(">I")
PARTITION = struct.Struct(">IHHiIIqq")
ENTRY = struct.Struct(">qqIIII")
LANDMARK = struct.Struct(">II")
LANDMARK_BYTES = 64 * 1024
HEADER_BYTES = HEADER.size + CRC.size

MAX_TIMESTAMP = struct.Struct(">q")  # of a record batch
MAX_TIMESTAMP_AT = 35

_pack_entry = ENTRY.pack
_unpack_entry = ENTRY.unpack_from


class BadIndex(ChronikError):
    """Not this segment's index: make it again."""


class Entry(NamedTuple):
    base_offset: Offset
    max_timestamp_ms: int
    relative: int  # position - segment start
    size: int
    record_count: int


class PartitionRow(NamedTuple):
    next_offset: Offset
    max_timestamp_ms: int
    first_entry: int
    entry_count: int


class Index(Protocol):
    """What a reader asks; the active and the sealed kind answer alike."""

    def partition(self, topic: str, partition: int) -> PartitionRow | None: ...

    def entries(self, topic: str, partition: int, offset: int) -> Iterator[Entry]:
        """From the batch that holds `offset` (or the next one that is here) on."""

    def landmark(self, relative: int) -> tuple[int, Checksum] | None:
        """The last frame start at or below `relative` that is known here, and the chain value there."""


def _first_entry(rows: bytes | bytearray | memoryview, first: int, count: int, offset: int) -> int:
    """The first of `count` entries from number `first` on whose batch ends beyond `offset`."""
    low, high = first, first + count
    while low < high:
        middle = (low + high) // 2
        base, _, _, _, records, _ = _unpack_entry(rows, middle * 32)
        if base + records <= offset:
            low = middle + 1
        else:
            high = middle
    return low


def _read_entry(rows: bytes | bytearray | memoryview, number: int) -> Entry:
    base, timestamp, relative, size, records, _ = _unpack_entry(rows, number * 32)
    return Entry(base, timestamp, relative, size, records)


class ActiveIndex:
    """Of the segment that is being written, and of one that is not sealed yet."""

    def __init__(self, start: Position, chain: Checksum) -> None:
        self.start = start
        self.chain = chain
        self.rows: dict[tuple[str, int], bytearray] = {}
        self.ends = array("Q")  # of every frame
        self.checksums = array("I")
        self.next_offsets: dict[tuple[str, int], int] = {}  # at the segment's end, once it has one
        self.first_batch_ms: int | None = None  # when the leader got it
        self.closed = False

    def add(self, key: tuple[str, int], base: int, timestamp: int, position: int, size: int, records: int) -> None:
        row = _pack_entry(base, timestamp, position - self.start, size, records, 0)
        rows = self.rows.get(key)
        if rows is None:
            self.rows[key] = bytearray(row)
        else:
            rows += row

    def add_frame(self, frame: Frame, topic: str) -> None:
        """Any frame that was folded; `topic` is its topic's name."""
        self.ends.append(frame.position + frame.size)
        self.checksums.append(frame.checksum)
        if frame.kind == Kind.DATA:
            if not self.rows:
                self.first_batch_ms = frame.timestamp_ms
            (timestamp,) = MAX_TIMESTAMP.unpack_from(frame.data, MAX_TIMESTAMP_AT)
            self.add(
                (topic, frame.partition), frame.base_offset, timestamp, frame.position, frame.size, frame.record_count
            )

    def partition(self, topic: str, partition: int) -> PartitionRow | None:
        rows = self.rows.get((topic, partition))
        if rows is None:
            known = self.next_offsets.get((topic, partition))
            return None if known is None else PartitionRow(Offset(known), -1, 0, 0)
        return self._row(rows)

    @staticmethod
    def _row(rows: bytearray) -> PartitionRow:
        count = len(rows) // 32
        last = _read_entry(rows, count - 1)
        newest = max(timestamp for _, timestamp, *_ in ENTRY.iter_unpack(rows))
        return PartitionRow(Offset(last.base_offset + last.record_count), newest, 0, count)

    def next_offset(self, topic: str, partition: int) -> int | None:
        rows = self.rows.get((topic, partition))
        if rows is None:
            return self.next_offsets.get((topic, partition))
        base, _, _, _, records, _ = _unpack_entry(rows, len(rows) - 32)
        return int(base + records)

    def entries(self, topic: str, partition: int, offset: int) -> Iterator[Entry]:
        rows = self.rows.get((topic, partition))
        if rows is None:
            return
        count = len(rows) // 32
        for number in range(_first_entry(rows, 0, count, offset), count):
            yield _read_entry(rows, number)

    def checksum_at(self, position: Position) -> Checksum | None:
        if position == self.start:
            return self.chain
        at = bisect_left(self.ends, position)
        if at < len(self.ends) and self.ends[at] == position:
            return Checksum(self.checksums[at])
        return None

    def landmark(self, relative: int) -> tuple[int, Checksum] | None:
        at = bisect_right(self.ends, self.start + relative)
        if at == 0:
            return 0, self.chain
        return self.ends[at - 1] - self.start, Checksum(self.checksums[at - 1])

    def batch_at(self, relative: int) -> tuple[str, int, Entry] | None:
        """The batch whose frame stands there."""
        for (topic, partition), rows in self.rows.items():
            for number in range(len(rows) // 32):
                if _unpack_entry(rows, number * 32)[2] == relative:
                    return topic, partition, _read_entry(rows, number)
        return None

    def next_frame(self, relative: int) -> int | None:
        """The first frame beyond `relative`, as far as it is known here."""
        at = bisect_right(self.ends, self.start + relative)
        return self.ends[at] - self.start if at < len(self.ends) - 1 else None

    def close(self, next_offsets: Iterable[tuple[tuple[str, int], int]]) -> None:
        """The segment has its end; these are all partitions known there."""
        self.next_offsets = dict(next_offsets)
        self.closed = True

    def encode(self) -> bytes:
        """The index file."""
        # Topics are ASCII: they sort as their bytes do.
        keys = sorted(self.next_offsets.keys() | self.rows.keys())
        table: list[bytes] = []
        entries, names = bytearray(), bytearray()
        name_at: dict[str, int] = {}
        pack = PARTITION.pack
        for key in keys:
            topic, partition = key
            at = name_at.get(topic)
            if at is None:
                at = name_at[topic] = len(names)
                names += topic.encode()
            rows = self.rows.get(key)
            first = len(entries) // 32
            if rows is None:
                table.append(pack(at, len(topic), 0, partition, first, 0, self.next_offsets[key], -1))
                continue
            row = self._row(rows)
            table.append(
                pack(at, len(topic), 0, partition, first, row.entry_count, row.next_offset, row.max_timestamp_ms)
            )
            entries += rows
        landmarks = bytearray(LANDMARK.pack(0, self.chain))
        last = 0
        number = 0
        while (number := bisect_left(self.ends, self.start + last + LANDMARK_BYTES, number)) < len(self.ends):
            last = self.ends[number] - self.start
            landmarks += LANDMARK.pack(last, self.checksums[number])
        body = b"".join((*table, entries, landmarks, names))
        header = HEADER.pack(
            MAGIC,
            FORMAT,
            self.start,
            self.ends[-1] if self.ends else self.start,
            self.checksums[-1] if self.checksums else self.chain,
            len(keys),
            len(entries) // 32,
            len(landmarks) // 8,
            len(names),
            crc32c(body),
        )
        return header + CRC.pack(crc32c(header)) + body


class SealedIndex:
    """Over the bytes of an index file, usually a mapping of it. Raises BadIndex for anything else than this
    segment's."""

    def __init__(self, data: bytes | memoryview, start: Position, end: Position) -> None:
        if len(data) < HEADER_BYTES:
            raise BadIndex(f"{len(data)} bytes")
        view = memoryview(data)
        magic, form, first, last, chain, partitions, entries, landmarks, names, crc = HEADER.unpack_from(view)
        if magic != MAGIC or form != FORMAT:
            raise BadIndex(f"magic {magic!r}, format {form}")
        if CRC.unpack_from(view, HEADER.size)[0] != crc32c(view[: HEADER.size]):
            raise BadIndex("the header's checksum does not match")
        if (first, last) != (start, end):
            raise BadIndex(f"it is of {first} to {last}, the segment of {start} to {end}")
        table_at = HEADER_BYTES
        entries_at = table_at + partitions * PARTITION.size
        landmarks_at = entries_at + entries * ENTRY.size
        names_at = landmarks_at + landmarks * LANDMARK.size
        if names_at + names != len(view) or landmarks == 0:
            raise BadIndex(f"{len(view)} bytes do not fit its counts")
        if crc32c(view[HEADER_BYTES:]) != crc:
            raise BadIndex("the checksum does not match")
        self.start, self.end, self.end_chain = start, end, Checksum(chain)
        self._partitions, self._landmark_count, self._entry_count = partitions, landmarks, entries
        self._table = view[table_at:entries_at]
        self._entries = view[entries_at:landmarks_at]
        self._landmarks = view[landmarks_at:names_at]
        self._names = view[names_at:]

    def partition(self, topic: str, partition: int) -> PartitionRow | None:
        wanted = (topic.encode(), partition)
        low, high = 0, self._partitions
        while low < high:
            middle = (low + high) // 2
            at, length, _, number, first, count, next_offset, newest = PARTITION.unpack_from(self._table, middle * 36)
            key = (bytes(self._names[at : at + length]), number)
            if key == wanted:
                if first + count > self._entry_count:
                    raise BadIndex(f"the entries of {topic}/{partition} are not there")
                return PartitionRow(next_offset, newest, first, count)
            if key < wanted:
                low = middle + 1
            else:
                high = middle
        return None

    def next_offset(self, topic: str, partition: int) -> int | None:
        row = self.partition(topic, partition)
        return None if row is None else row.next_offset

    def next_offsets(self) -> Iterator[tuple[tuple[str, int], Offset]]:
        """Of every partition known at the segment's end."""
        for at, length, _, number, _, _, next_offset, _ in PARTITION.iter_unpack(self._table):
            yield (bytes(self._names[at : at + length]).decode("ascii", "replace"), number), next_offset

    def entries(self, topic: str, partition: int, offset: int) -> Iterator[Entry]:
        row = self.partition(topic, partition)
        if row is None:
            return
        end = row.first_entry + row.entry_count
        for number in range(_first_entry(self._entries, row.first_entry, row.entry_count, offset), end):
            yield _read_entry(self._entries, number)

    def landmark(self, relative: int) -> tuple[int, Checksum] | None:
        low, high = 0, self._landmark_count
        while low < high:
            middle = (low + high) // 2
            if LANDMARK.unpack_from(self._landmarks, middle * 8)[0] <= relative:
                low = middle + 1
            else:
                high = middle
        if low == 0:
            return None
        at, chain = LANDMARK.unpack_from(self._landmarks, (low - 1) * 8)
        return at, Checksum(chain)

    def batch_at(self, relative: int) -> tuple[str, int, Entry] | None:
        for number in range(self._entry_count):
            if _unpack_entry(self._entries, number * 32)[2] == relative:
                return *self._owner(number), _read_entry(self._entries, number)
        return None

    def _owner(self, number: int) -> tuple[str, int]:
        for row in range(self._partitions):
            at, length, _, partition, first, count, _, _ = PARTITION.unpack_from(self._table, row * 36)
            if first <= number < first + count:
                return bytes(self._names[at : at + length]).decode("ascii", "replace"), partition
        raise BadIndex(f"entry {number} is of no partition")

    def next_frame(self, relative: int) -> int | None:
        beyond = [
            at for number in range(self._entry_count) if (at := _unpack_entry(self._entries, number * 32)[2]) > relative
        ]
        return min(beyond, default=None)
