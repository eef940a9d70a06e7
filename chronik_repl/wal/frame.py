"""The frame: the one unit of bytes, the same on disk and on the wire. This file owns its layout.

Big-endian, at position P (docs/protocol.md draws it):

    u16 magic 0x5741 | u16 version 2 | u32 length of all that follows
    u16 topic_len | topic | i32 partition | i64 base_offset | u32 record_count | i64 timestamp_ms
    u16 kind | u32 epoch | u64 position P | u32 previous | u32 checksum
    data

`checksum` is CRC32C over the whole frame but itself; `previous` is the checksum of the frame before. So a
frame vouches for its own place and for everything before it.

What comes in here is untrusted: `decode` checks lengths before it touches what they speak of, and returns or
raises `BadFrame`, nothing else. What it promises: a frame that it returns is whole, unchanged and in its place.
"""

from __future__ import annotations

import re
import struct
from enum import IntEnum
from typing import NamedTuple

from crc32c import crc32c

from chronik_repl.errors import ProtocolError
from chronik_repl.positions import Checksum, Epoch, Offset, Position
from chronik_repl.wal.seam import Buffer

MAGIC = 0x5741
VERSION = 2
HEAD = struct.Struct(">HHI")  # magic, version, length: every message of ours starts so
TOPIC_LEN = struct.Struct(">H")
FIELDS = struct.Struct(">iqIqHIQI")  # partition … previous: what stands between topic and checksum
CHECKSUM = struct.Struct(">I")
OVERHEAD = HEAD.size + TOPIC_LEN.size + FIELDS.size + CHECKSUM.size  # of a frame, besides topic and data
LENGTH_MIN = OVERHEAD - HEAD.size
TOPIC_BYTES_MAX = 249
TOPIC_PATTERN = re.compile(r"[A-Za-z0-9._-]{1,249}\Z")
FRAME_BYTES_MAX_DEFAULT = 16 * 1024 * 1024


class Kind(IntEnum):
    DATA = 0  # one Kafka record batch (v2), as the producer sent it
    EPOCH_START = 1
    SEGMENT_START = 2  # a part of a state snapshot
    SOURCE_POSITION = 3
    STATE_CHANGE = 4


KIND_MAX = max(Kind)
head_and_topic_len = struct.Struct(">HHIH").unpack_from
fields_and_checksum = struct.Struct(">iqIqHIQII").unpack_from
_new_frame = tuple.__new__


class BadFrame(ProtocolError):
    """These bytes are not a frame of this place. On disk the caller decides: torn tail or damage."""


Fields = tuple[bytes, int, int, int, int, int, int, int, int, tuple[Buffer, ...]]  # what `seal` takes


class Frame(NamedTuple):
    """One frame, checked. `data` is a view over the caller's buffer: copy what outlives it."""

    topic: bytes
    partition: int
    base_offset: Offset
    record_count: int
    timestamp_ms: int
    kind: int
    epoch: Epoch
    position: Position
    previous: Checksum
    checksum: Checksum
    data: memoryview
    size: int  # of the whole frame; position + size is where the next one stands


def seal(
    prefix: bytes,
    base_offset: int,
    record_count: int,
    timestamp_ms: int,
    kind: int,
    epoch: int,
    position: int,
    previous: int,
    partition: int,
    pieces: tuple[Buffer, ...],
) -> tuple[tuple[Buffer, ...], Checksum]:
    """A frame in pieces, for the one who copies them to where it shall stand, and its checksum. `prefix` is
    `topic_prefix(topic)`."""
    length = LENGTH_MIN - TOPIC_LEN.size + len(prefix)
    for piece in pieces:
        length += len(piece)
    head = b"".join(
        (
            HEAD.pack(MAGIC, VERSION, length),
            prefix,
            FIELDS.pack(partition, base_offset, record_count, timestamp_ms, kind, epoch, position, previous),
        )
    )
    checksum = crc32c(head)
    for piece in pieces:
        checksum = crc32c(piece, checksum)
    return (head, CHECKSUM.pack(checksum), *pieces), Checksum(checksum)


def encode(*fields: *Fields) -> tuple[bytes, Checksum]:
    """What `seal` gives, as one piece."""
    pieces, checksum = seal(*fields)
    return b"".join(pieces), checksum


def topic_prefix(topic: str) -> bytes:
    """topic_len and topic, as they stand in a frame. The empty topic is for frames that are of no topic."""
    raw = topic.encode("ascii")
    return TOPIC_LEN.pack(len(raw)) + raw


def frame_size(buffer: bytes | bytearray | memoryview, at: int, frame_bytes_max: int) -> int:
    """Of the frame whose first 8 bytes stand at `at`: its whole size, refused above the limit before it is read."""
    magic, version, length = HEAD.unpack_from(buffer, at)
    if magic != MAGIC:
        raise BadFrame(f"no frame: magic {magic:#06x}")
    if version != VERSION:
        raise BadFrame(f"frame version {version}; this program reads {VERSION}")
    size: int = HEAD.size + length
    if length < LENGTH_MIN or size > frame_bytes_max:
        raise BadFrame(f"frame of {size} bytes; {OVERHEAD} to {frame_bytes_max} are allowed")
    return size


def decode(
    view: memoryview,
    at: int,
    position: int,
    previous: int | None,
    frame_bytes_max: int = FRAME_BYTES_MAX_DEFAULT,
) -> Frame | None:
    """The frame at `at` in `view`, expected at `position` after a frame with checksum `previous` (None: any).

    None when `view` ends before the frame does. Raises BadFrame for anything that is not that frame.
    """
    available = len(view) - at
    if available < HEAD.size + TOPIC_LEN.size:
        if available >= HEAD.size:
            frame_size(view, at, frame_bytes_max)
        return None
    magic, version, length, topic_len = head_and_topic_len(view, at)
    size: int = 8 + length
    if magic != MAGIC or version != VERSION or length < LENGTH_MIN or size > frame_bytes_max:
        frame_size(view, at, frame_bytes_max)  # says what is wrong
    if available < size:
        return None
    if topic_len > TOPIC_BYTES_MAX or OVERHEAD + topic_len > size:
        raise BadFrame(f"topic of {topic_len} bytes in a frame of {size}")
    fields_at = at + 10 + topic_len
    (partition, base_offset, record_count, timestamp_ms, kind, epoch, stands_at, chain, checksum) = fields_and_checksum(
        view, fields_at
    )
    data_at = fields_at + 46
    data = view[data_at : at + size]
    if crc32c(data, crc32c(view[at : data_at - 4])) != checksum:
        raise BadFrame(f"checksum of the frame at position {position} does not match")
    if stands_at != position:
        raise BadFrame(f"the frame of position {stands_at} stands at {position}")
    if chain != previous and previous is not None:
        raise BadFrame(f"the frame at {position} follows another frame than the one before it")
    if kind > KIND_MAX:
        raise BadFrame(f"frame kind {kind} at {position}; a newer version wrote it")
    topic = bytes(view[at + 10 : fields_at]) if topic_len else b""
    # Half the cost of calling the class: this is the hot path of recovery and of every follower.
    return _new_frame(
        Frame,
        (
            topic,
            partition,
            base_offset,
            record_count,
            timestamp_ms,
            kind,
            epoch,
            stands_at,
            chain,
            checksum,
            data,
            size,
        ),
    )
