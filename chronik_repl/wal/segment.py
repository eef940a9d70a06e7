"""A segment file's own bytes: its name, its header and the two durable marks. This file owns their layout.

    wal/<20-digit start position>.wal
    0      the header block, 4 KiB: magic, format, start position, chain value there, cluster id, log start, CRC32C
    4096   mark slot 0 ┐ written in turn, a group's mark under the group's own fdatasync;
    8192   mark slot 1 ┘ the highest valid sequence wins
    12288  frames, from the start position on; after the last one zeros, or the end of the file

Position P of a segment that starts at S stands at byte 12288 + (P - S). The three blocks are a node's own and not
part of the stream: two nodes with the same log differ there and nowhere else.
"""

from __future__ import annotations

import re
import struct
from typing import NamedTuple

from crc32c import crc32c

from chronik_repl.errors import CorruptLog, FormatTooNew
from chronik_repl.positions import Checksum, Position

BLOCK = 4096
FRAMES_AT = 3 * BLOCK
MAGIC = b"CHRONIK\x00"
FORMAT = 1
HEADER = struct.Struct(">8sIQI64sQ")  # magic, format, start, chain, cluster id (UTF-8, padded with zeros), log start
MARK_MAGIC = 0x4D4B  # "MK"
MARK = struct.Struct(">HQQQ")  # magic, sequence, durable end, high watermark
CRC = struct.Struct(">I")
NAME = re.compile(r"(\d{20})\.wal\Z")
FOLDER = "wal"


class Header(NamedTuple):
    start: Position
    chain: Checksum  # the checksum of the frame before the first one
    cluster_id: str
    log_start: Position = Position(0)  # where this node's log began when the file was made: what must still be there


class Mark(NamedTuple):
    """How far a node knows its own bytes to be durable: below `durable_end` bad bytes are damage, never a torn tail."""

    sequence: int
    durable_end: Position
    high_watermark: Position


def segment_name(start: Position) -> str:
    return f"{start:020d}.wal"


def encode_header(header: Header) -> bytes:
    """The whole block."""
    raw = HEADER.pack(MAGIC, FORMAT, header.start, header.chain, header.cluster_id.encode(), header.log_start)
    return (raw + CRC.pack(crc32c(raw))).ljust(BLOCK, b"\0")


def decode_header(block: bytes, file: str) -> Header:
    """Raises CorruptLog or FormatTooNew, naming the file."""
    if len(block) < HEADER.size + CRC.size:
        raise CorruptLog(f"{file}: too short for a segment header", file=file)
    magic, form, start, chain, cluster, log_start = HEADER.unpack_from(block)
    if magic != MAGIC:
        raise CorruptLog(f"{file}: not a segment of this program (magic {magic!r})", file=file)
    if CRC.unpack_from(block, HEADER.size)[0] != crc32c(block[: HEADER.size]):
        raise CorruptLog(f"{file}: the segment header is damaged", file=file)
    if form > FORMAT:
        raise FormatTooNew(f"{file}: format {form}; this version reads up to {FORMAT}. Upgrade chronik-repl")
    try:
        cluster_id = cluster.rstrip(b"\0").decode()
    except UnicodeDecodeError:
        raise CorruptLog(f"{file}: the cluster id is not text", file=file) from None
    return Header(start, chain, cluster_id, log_start)


def encode_mark(mark: Mark) -> bytes:
    raw = MARK.pack(MARK_MAGIC, *mark)
    return raw + CRC.pack(crc32c(raw))


def decode_mark(block: bytes) -> Mark | None:
    """None for a slot that was never written or is torn."""
    if len(block) < MARK.size + CRC.size:
        return None
    magic, *fields = MARK.unpack_from(block)
    if magic != MARK_MAGIC or CRC.unpack_from(block, MARK.size)[0] != crc32c(block[: MARK.size]):
        return None
    return Mark(*fields)


def mark_offset(sequence: int) -> int:
    """Where in the file the mark of this sequence goes: the two slots take turns."""
    return BLOCK * (1 + sequence % 2)


def best_mark(blocks: bytes) -> Mark | None:
    """Of a file's first three blocks: the valid mark with the highest sequence."""
    marks = [m for slot in (1, 2) if (m := decode_mark(blocks[slot * BLOCK : (slot + 1) * BLOCK]))]
    return max(marks, default=None)
