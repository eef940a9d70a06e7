"""Logs for the tests and the bench, written from the two layouts alone: millions of records cheaply, for one batch's
bytes are used again and again with other offsets.

A `Writer` makes one stream and writes it as segments; `copy_log` gives a second node the same stream with blocks of its
own before it, as a follower has it.
"""

from __future__ import annotations

import gzip
import shutil
import struct
from pathlib import Path
from typing import BinaryIO

import cramjam
from crc32c import crc32c

from chronik_repl.positions import Checksum, Position
from chronik_repl.wal import segment
from chronik_repl.wal.changes import EpochStart, LogStartMoved, SnapshotPart, TopicMade, encode_change
from chronik_repl.wal.frame import Kind, encode, topic_prefix

CLUSTER = "the-cluster"
BATCH_HEAD = struct.Struct(">qiibIhiqqqhii")
CODECS = {"none": 0, "gzip": 1, "snappy": 2, "lz4": 3, "zstd": 4}
TIME_MS = 1_700_000_000_000

Record = tuple[bytes | None, bytes | None, list[tuple[str, bytes | None]]]


def varint(value: int) -> bytes:
    value = (value << 1) ^ (value >> 63)
    out = bytearray()
    while value > 0x7F:
        out.append((value & 0x7F) | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _sized(value: bytes | None) -> bytes:
    return varint(-1) if value is None else varint(len(value)) + value


def compress(codec: str, raw: bytes) -> bytes:
    if codec == "gzip":
        return gzip.compress(raw, 1)
    if codec == "snappy":
        return bytes(cramjam.snappy.compress_raw(raw))
    if codec == "lz4":
        return bytes(cramjam.lz4.compress(raw))
    if codec == "zstd":
        return bytes(cramjam.zstd.compress(raw, 1))
    return raw


def batch(records: list[Record], codec: str = "none", time_ms: int = TIME_MS, attributes: int = 0) -> bytes:
    """A v2 record batch as a producer sends it; record i is i ms younger than the first."""
    body = bytearray()
    for delta, (key, value, headers) in enumerate(records):
        record = b"\0" + varint(delta) + varint(delta) + _sized(key) + _sized(value) + varint(len(headers))
        for name, content in headers:
            record += _sized(name.encode()) + _sized(content)
        body += varint(len(record)) + record
    payload = compress(codec, bytes(body))
    attributes |= CODECS[codec]
    last = len(records) - 1
    tail = struct.pack(">hiqqqhii", attributes, last, time_ms, time_ms + last, -1, -1, -1, len(records)) + payload
    return struct.pack(">qiibI", 0, 9 + len(tail), 0, 2, crc32c(tail)) + tail


class Written:
    """A frame that was written, so that a test can say what it did to which."""

    def __init__(self, position: int, raw: bytes, topic: str, partition: int, base: int, count: int) -> None:
        self.position, self.raw, self.topic, self.partition, self.base, self.count = (
            position,
            raw,
            topic,
            partition,
            base,
            count,
        )

    @property
    def end(self) -> int:
        return self.position + len(self.raw)


class Writer:
    def __init__(
        self, folder: Path, *, segment_bytes: int = 1 << 20, cluster: str = CLUSTER, keep: bool = False
    ) -> None:
        self.folder = folder / segment.FOLDER
        self.folder.mkdir(parents=True, exist_ok=True)
        self.segment_bytes, self.cluster, self.keep = segment_bytes, cluster, keep
        self.position, self.chain, self.epoch, self.time_ms = 0, 0, 0, TIME_MS
        self.offsets: dict[tuple[str, int], int] = {}
        self.written: list[Written] = []
        self.starts: list[int] = []
        self._file: BinaryIO | None = None
        self._segment_start = 0
        self.roll()
        self.begin_epoch(leader=1)

    def roll(self) -> None:
        self._finish()
        self._segment_start = self.position
        self.starts.append(self.position)
        self._file = open(self.folder / segment.segment_name(Position(self.position)), "wb+")  # noqa: SIM115
        header = segment.Header(Position(self.position), Checksum(self.chain), self.cluster)
        self._file.write(segment.encode_header(header))
        self._file.seek(segment.FRAMES_AT)
        self.put("", 0, 0, Kind.SEGMENT_START, -1, encode_change(SnapshotPart(0, 1, b"\x80")))

    def _finish(self) -> None:
        if self._file is None:
            return
        write_mark(self._file, 7, self.position, self.position)
        self._file.close()
        self._file = None

    def put(self, topic: str, base: int, count: int, kind: int, partition: int, *pieces: bytes) -> Written:
        raw, checksum = encode(
            topic_prefix(topic),
            base,
            count,
            self.time_ms,
            kind,
            self.epoch,
            self.position,
            self.chain,
            partition,
            pieces,
        )
        assert self._file is not None
        self._file.write(raw)
        written = Written(self.position, raw, topic, partition, base, count)
        self.position += len(raw)
        self.chain = checksum
        if self.keep:
            self.written.append(written)
        return written

    def begin_epoch(self, leader: int) -> None:
        self.epoch += 1
        self.put("", 0, 0, Kind.EPOCH_START, -1, encode_change(EpochStart(leader, f"dir-{leader}")))

    def make_topic(self, topic: str, partitions: int) -> None:
        self.put("", 0, 0, Kind.STATE_CHANGE, -1, encode_change(TopicMade(topic, partitions)))

    def move_log_start(self, start: int) -> None:
        self.put("", 0, 0, Kind.STATE_CHANGE, -1, encode_change(LogStartMoved(start)))

    def data(self, topic: str, partition: int, raw: bytes, count: int) -> Written:
        if self.position - self._segment_start >= self.segment_bytes:
            self.roll()
        base = self.offsets.get((topic, partition), 0)
        self.offsets[topic, partition] = base + count
        self.time_ms += 1
        head = struct.pack(">qii", base, len(raw) - 12, self.epoch)
        return self.put(topic, base, count, Kind.DATA, partition, head, raw[16:])

    def close(self, *, spare_bytes: int = 0) -> None:
        """As a node that runs leaves it: the active file may go on with zeros."""
        assert self._file is not None
        if spare_bytes:
            self._file.write(bytes(spare_bytes))
        self._finish()


def write_mark(file: BinaryIO, sequence: int, durable_end: int, high_watermark: int) -> None:
    file.seek(segment.mark_offset(sequence))
    file.write(segment.encode_mark(segment.Mark(sequence, Position(durable_end), Position(high_watermark))))


def copy_log(source: Path, target: Path) -> Path:
    """Another node's copy: the same stream, other marks before it."""
    shutil.copytree(source, target)
    for path in sorted((target / segment.FOLDER).glob("*.wal")):
        with open(path, "rb+") as file:
            mark = segment.best_mark(file.read(segment.FRAMES_AT))
            assert mark is not None
            write_mark(file, mark.sequence + 1, mark.durable_end, mark.high_watermark)
    return target
