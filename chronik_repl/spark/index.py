"""A segment's index file, read as docs/protocol.md draws it, to see whether it lies. Nothing of the comparison trusts
it.

`read_index` gives rows a partition and the landmarks; `lies` says what disagrees with the frames that a strict walk
saw.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NamedTuple

from crc32c import crc32c

MAGIC = b"CHRONIDX"
HEADER = struct.Struct(
    ">8sIQQIIIIII"
)  # magic, format, start, end, end chain, partitions, entries, landmarks, names, CRC
PARTITION = struct.Struct(
    ">IHHiIIqq"
)  # name at, name length, 0, partition, first entry, entries, next offset, max time
ENTRY = struct.Struct(">qqIIII")  # base offset, max time, position - start, size, records, 0
LANDMARK = struct.Struct(">II")  # position - start, chain there
CRC = struct.Struct(">I")
LANDMARKS_MAX = 1 << 20

Rows = dict[tuple[bytes, int], bytearray]


class IndexFile(NamedTuple):
    end: int
    end_chain: int
    rows: dict[tuple[bytes, int], bytes]  # entries of each partition, as they stand in the file
    next_offsets: dict[tuple[bytes, int], int]
    landmarks: list[tuple[int, int]]  # position, chain there


def read_index(raw: bytes, start: int) -> IndexFile | str:
    """The file, or in words why it cannot be read."""
    if len(raw) < HEADER.size + CRC.size:
        return "the index is too short"
    magic, form, first, end, chain, partitions, entries, landmarks, names, crc = HEADER.unpack_from(raw)
    if magic != MAGIC or form != 1:
        return "not an index that this version reads"
    if CRC.unpack_from(raw, HEADER.size)[0] != crc32c(raw[: HEADER.size]):
        return "the checksum of the index's header does not match"
    body = memoryview(raw)[HEADER.size + CRC.size :]
    entries_at = partitions * PARTITION.size
    landmarks_at = entries_at + entries * ENTRY.size
    names_at = landmarks_at + landmarks * LANDMARK.size
    if names_at + names != len(body) or crc32c(body) != crc:
        return "the index's checksum does not match"
    if first != start:
        return f"the index is of the segment at {first}"
    rows, next_offsets = {}, {}
    for number in range(partitions):
        at, length, _, partition, entry, count, next_offset, _ = PARTITION.unpack_from(body, number * PARTITION.size)
        if entry + count > entries or at + length > names:
            return "the index points outside itself"
        key = (bytes(body[names_at + at : names_at + at + length]), partition)
        row_at = entries_at + entry * ENTRY.size
        rows[key] = bytes(body[row_at : row_at + count * ENTRY.size])
        next_offsets[key] = next_offset
    marks = [LANDMARK.unpack_from(body, landmarks_at + i * LANDMARK.size) for i in range(landmarks)]
    return IndexFile(end, chain, rows, next_offsets, [(start + at, mark) for at, mark in marks])


def landmarks_in(read: Callable[[int, int], bytes], start: int) -> list[tuple[int, int]]:
    """Only the landmarks, without reading the rest: (position, chain there). Unchecked, so only hints."""
    head = read(0, HEADER.size)
    if len(head) < HEADER.size:
        return []
    magic, form, first, _, _, partitions, entries, landmarks, _, _ = HEADER.unpack(head)
    if magic != MAGIC or form != 1 or first != start or landmarks > LANDMARKS_MAX:
        return []
    at = HEADER.size + CRC.size + partitions * PARTITION.size + entries * ENTRY.size
    raw = read(at, landmarks * LANDMARK.size)
    whole = len(raw) - len(raw) % LANDMARK.size
    return [(start + relative, chain) for relative, chain in LANDMARK.iter_unpack(raw[:whole])]


def lies(index: IndexFile, walked: Rows, seen: set[int], segment_start: int, start: int, end: int, chain: int) -> str:
    """What the index says of positions [start, end) that the frames there do not; '' if nothing.

    `seen` are the landmarks that the walk found to be right, `chain` is the checksum of the last frame.
    """
    if end >= index.end and (index.end, index.end_chain) != (end, chain):
        return f"the index ends at {index.end}, the segment at {end}"
    for key in sorted(walked.keys() | index.rows.keys()):
        name = f"{key[0].decode('ascii', 'replace')}/{key[1]}"
        ours, theirs = bytes(walked.get(key, b"")), index.rows.get(key, b"")
        if (start, end) != (segment_start, index.end):
            theirs = b"".join(
                ENTRY.pack(*row) for row in ENTRY.iter_unpack(theirs) if start <= segment_start + row[2] < end
            )
        if ours != theirs:
            return _first_lie(name, ours, theirs, segment_start)
        if ours and end == index.end:
            base, _, _, _, records, _ = ENTRY.unpack_from(ours, len(ours) - ENTRY.size)
            if index.next_offsets[key] != base + records:
                return f"{name} is said to go on at offset {index.next_offsets[key]}, and goes on at {base + records}"
    for position, _ in index.landmarks:
        if start <= position < end and position not in seen:
            return f"no frame with that chain value stands at the landmark {position}"
    return ""


def _first_lie(name: str, ours: bytes, theirs: bytes, start: int) -> str:
    for at in range(0, max(len(ours), len(theirs)), ENTRY.size):
        mine, other = ours[at : at + ENTRY.size], theirs[at : at + ENTRY.size]
        if mine == other:
            continue
        if not other:
            return f"{name}: offset {ENTRY.unpack(mine)[0]} is not in the index"
        base, _, relative, size, records, _ = ENTRY.unpack(other)
        says = f"{name}: offset {base} (+{records}) is said to stand at {start + relative} with {size} bytes"
        if not mine:
            return f"{says}; it does not"
        base, _, relative, size, records, _ = ENTRY.unpack(mine)
        return f"{says}; offset {base} (+{records}) stands at {start + relative} with {size} bytes"
    return ""
