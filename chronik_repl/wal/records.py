"""The records inside a batch, for people who look at a log. Nothing on the way of the data reads them.

In: one Kafka record batch (v2), as it stands in a data frame. Out: its head, and its records one by one, from each of
Kafka's compressions. The bytes are a producer's: whatever they are, this returns or raises `BadBatch`, and unpacks at
most `unpacked_bytes_max`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple

import cramjam
from crc32c import crc32c

from chronik_repl.errors import ProtocolError
from chronik_repl.positions import Offset

BATCH = struct.Struct(">qiibIhiqqqhii")
# base offset, length of what follows it, leader epoch, magic, CRC32C of what follows it, attributes, last offset delta,
# base timestamp, max timestamp, producer id, producer epoch, base sequence, record count
LENGTH_COUNTS_FROM = 12
CRC_COUNTS_FROM = 21
MAGIC = 2
COMPRESSIONS = ("none", "gzip", "snappy", "lz4", "zstd")
XERIAL_MAGIC = b"\x82SNAPPY\0"
XERIAL_HEAD_BYTES = 16
UNPACKED_BYTES_MAX = 256 * 1024 * 1024


class BadBatch(ProtocolError):
    """These bytes are not a record batch (v2)."""


class BatchHead(NamedTuple):
    base_offset: Offset
    record_count: int
    compression: str
    transactional: bool
    control: bool
    log_append_time: bool
    base_timestamp_ms: int
    max_timestamp_ms: int
    last_offset_delta: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    leader_epoch: int


class Record(NamedTuple):
    offset: Offset
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: list[tuple[bytes, bytes | None]]


def read_head(batch: bytes | memoryview) -> BatchHead:
    """Checks lengths, magic and the batch's own CRC."""
    if len(batch) < BATCH.size:
        raise BadBatch(f"a batch of {len(batch)} bytes; its head alone has {BATCH.size}")
    (
        base,
        length,
        leader_epoch,
        magic,
        crc,
        attributes,
        last_delta,
        base_time,
        max_time,
        producer,
        epoch,
        sequence,
        n,
    ) = BATCH.unpack_from(batch)
    if magic != MAGIC:
        raise BadBatch(f"a batch of version {magic}; only {MAGIC} is stored")
    if length != len(batch) - LENGTH_COUNTS_FROM:
        raise BadBatch(f"the batch says {length} bytes and has {len(batch) - LENGTH_COUNTS_FROM}")
    if crc32c(batch[CRC_COUNTS_FROM:]) != crc:
        raise BadBatch("the batch's own checksum does not match")
    if attributes & 7 >= len(COMPRESSIONS):
        raise BadBatch(f"compression {attributes & 7} is unknown")
    if n < 0 or last_delta < 0:
        raise BadBatch(f"a batch of {n} records up to {last_delta}")
    return BatchHead(
        base,
        n,
        COMPRESSIONS[attributes & 7],
        bool(attributes & 16),
        bool(attributes & 32),
        bool(attributes & 8),
        base_time,
        max_time,
        last_delta,
        producer,
        epoch,
        sequence,
        leader_epoch,
    )


def read_records(batch: bytes | memoryview, unpacked_bytes_max: int = UNPACKED_BYTES_MAX) -> Iterator[Record]:
    head = read_head(batch)
    packed = bytes(batch[BATCH.size :])
    data = packed if head.compression == "none" else unpack(head.compression, packed, unpacked_bytes_max)
    at = 0
    for number in range(head.record_count):
        try:
            record, at = _read_record(data, at, head)
        except IndexError:
            raise BadBatch(f"record {number} of {head.record_count} is cut short") from None
        yield record
    if at != len(data):
        raise BadBatch(f"{len(data) - at} bytes after the last record")


def _read_record(data: bytes, at: int, head: BatchHead) -> tuple[Record, int]:
    length, at = _varint(data, at)
    end = at + length
    if length < 0 or end > len(data):
        raise IndexError
    time_delta, at = _varint(data, at + 1)  # after one byte of attributes, which mean nothing yet
    offset_delta, at = _varint(data, at)
    key, at = _bytes(data, at, end)
    value, at = _bytes(data, at, end)
    count, at = _varint(data, at)
    if not 0 <= count <= end - at:
        raise BadBatch(f"a record with {count} headers")
    headers = []
    for _ in range(count):
        name, at = _bytes(data, at, end)
        content, at = _bytes(data, at, end)
        if name is None:
            raise BadBatch("a header without a name")
        headers.append((name, content))
    if at != end:
        raise BadBatch(f"a record of {length} bytes has {at - end + length} in its fields")
    time = head.max_timestamp_ms if head.log_append_time else head.base_timestamp_ms + time_delta
    return Record(Offset(head.base_offset + offset_delta), time, key, value, headers), end


def _bytes(data: bytes, at: int, end: int) -> tuple[bytes | None, int]:
    length, at = _varint(data, at)
    if length == -1:
        return None, at
    if length < 0 or at + length > end:
        raise IndexError
    return data[at : at + length], at + length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Zigzag, least significant seven bits first, at most ten bytes."""
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return (value >> 1) ^ -(value & 1), at
    raise BadBatch("a number of more than ten bytes")


def unpack(compression: str, packed: bytes, size_max: int) -> bytes:
    """What was packed by one of Kafka's compressions, or BadBatch; never more than `size_max` bytes."""
    try:
        if compression == "snappy":
            return _unsnappy(packed, size_max)
        if compression in ("gzip", "lz4", "zstd"):
            return _unpack_into(getattr(cramjam, compression).decompress_into, packed, size_max)
    except cramjam.DecompressionError as error:
        raise BadBatch(f"{compression}: {error}") from error
    raise BadBatch(f"compression {compression!r} is unknown")


def _unsnappy(packed: bytes, size_max: int) -> bytes:
    """Java's clients cut snappy into blocks, under a head of their own (xerial); librdkafka does not."""
    if not packed.startswith(XERIAL_MAGIC):
        return _unsnappy_block(packed, size_max)
    pieces = []
    at = XERIAL_HEAD_BYTES
    while at < len(packed):
        length = int.from_bytes(packed[at : at + 4], "big")
        at += 4
        if not 0 < length <= len(packed) - at:
            raise BadBatch(f"snappy: a block of {length} bytes where {len(packed) - at} are left")
        pieces.append(_unsnappy_block(packed[at : at + length], size_max))
        size_max -= len(pieces[-1])
        at += length
    return b"".join(pieces)


def _unsnappy_block(packed: bytes, size_max: int) -> bytes:
    size = cramjam.snappy.decompress_raw_len(packed)
    if size > size_max:
        raise BadBatch(f"snappy: {size} bytes when unpacked; at most {size_max} are read")
    return bytes(cramjam.snappy.decompress_raw(packed))


def _unpack_into(decompress_into: Callable[[bytes, bytearray], int], packed: bytes, size_max: int) -> bytes:
    """These formats do not tell their size for sure: try with more room until it is enough or too much."""
    room = min(size_max, max(4096, 4 * len(packed)))
    while True:
        target = bytearray(room)
        try:
            return bytes(memoryview(target)[: decompress_into(packed, target)])
        except cramjam.DecompressionError as error:
            if "whole buffer" not in str(error):
                raise
            if room == size_max:
                raise BadBatch(f"more than {size_max} bytes when unpacked; no more are read") from error
        room = min(size_max, 4 * room)
