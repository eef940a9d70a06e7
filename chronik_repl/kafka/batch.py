"""The head of a record batch (v2): what a server must know of a batch, and all that it reads of it.

    i64 base offset | i32 length of what follows | i32 leader epoch | i8 magic 2 | u32 CRC32C of what follows
    i16 attributes | i32 last offset delta | i64 base timestamp | i64 max timestamp
    i64 producer id | i16 producer epoch | i32 base sequence | i32 record count | records, compressed or not

Records are never parsed: the CRC vouches for them, and they go through as the producer packed them.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from crc32c import crc32c

from chronik_repl.kafka.codes import Code

HEAD = struct.Struct(">qiibIhiqqqhii")
CRC_FROM = 21  # attributes: the first byte that the CRC covers
LENGTH_FROM = 12  # what `length` counts starts here
COMPRESSION = 0x07
TRANSACTIONAL = 0x10
CONTROL = 0x20
COMPRESSIONS = 5  # none, gzip, snappy, lz4, zstd
RECORD_BYTES_MIN = 7  # its length, attributes, two deltas, no key, no value, no headers
NO_PRODUCER = -1


class BatchHead(NamedTuple):
    """A batch that was checked. `record_count` is also last offset delta + 1."""

    attributes: int
    base_timestamp_ms: int
    max_timestamp_ms: int
    producer_id: int  # -1: not idempotent
    producer_epoch: int
    base_sequence: int
    record_count: int


class BadBatch(Exception):
    """Not a batch that this server takes; `code` makes the client do the right thing."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code = code


def check(records: memoryview | None, bytes_max: int) -> BatchHead:
    """Exactly one sound batch, as Kafka asks of a Produce request, of at most `bytes_max`. Raises BadBatch."""
    size = 0 if records is None else len(records)
    if records is None or size < HEAD.size:
        if records is not None and size > 16 and 0 <= records[16] < 2:
            raise BadBatch(Code.INVALID_RECORD, "a message set of an old format; only record batches (v2) are taken")
        raise BadBatch(Code.CORRUPT_MESSAGE, f"{size} bytes are no record batch")
    (
        _,
        length,
        _,
        magic,
        crc,
        attributes,
        last_delta,
        base_timestamp,
        max_timestamp,
        producer_id,
        producer_epoch,
        base_sequence,
        count,
    ) = HEAD.unpack_from(records, 0)
    if magic != 2:
        raise BadBatch(Code.INVALID_RECORD, f"record batch of format {magic}; only format 2 is taken")
    if length + LENGTH_FROM != size:
        if HEAD.size <= length + LENGTH_FROM < size:
            raise BadBatch(Code.INVALID_RECORD, "more than one record batch for a partition")
        raise BadBatch(Code.CORRUPT_MESSAGE, f"a record batch of {length + LENGTH_FROM} bytes stands in {size}")
    if size > bytes_max:
        raise BadBatch(Code.MESSAGE_TOO_LARGE, f"a record batch of {size} bytes; at most {bytes_max} are taken")
    if crc32c(records[CRC_FROM:]) != crc:
        raise BadBatch(Code.CORRUPT_MESSAGE, "the record batch's CRC does not match")
    if attributes & (COMPRESSION | TRANSACTIONAL | CONTROL) >= COMPRESSIONS:
        if attributes & CONTROL:
            raise BadBatch(Code.INVALID_RECORD, "a control batch is not a client's to write")
        if attributes & TRANSACTIONAL:
            raise BadBatch(Code.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, "this server has no transactions")
        raise BadBatch(Code.UNSUPPORTED_COMPRESSION_TYPE, f"compression {attributes & COMPRESSION} is not known")
    if count < 1 or last_delta != count - 1:
        raise BadBatch(Code.INVALID_RECORD, f"{count} records with last offset delta {last_delta}")
    if count * RECORD_BYTES_MIN > size and not attributes & COMPRESSION:  # else 70 bytes could take 2**31 offsets
        raise BadBatch(Code.INVALID_RECORD, f"{count} records in {size} bytes")
    return BatchHead(attributes, base_timestamp, max_timestamp, producer_id, producer_epoch, base_sequence, count)
