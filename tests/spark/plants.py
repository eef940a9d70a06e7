"""Differences to plant in a copy of a log, each as the bytes of one file are rewritten; and what must be said of it."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

from chronik_repl.positions import Checksum, Position
from chronik_repl.spark.compare import Range
from chronik_repl.wal import segment
from chronik_repl.wal.frame import FIELDS, HEAD, encode, topic_prefix
from tests.spark.logs import CLUSTER, Written

Edit = Callable[[bytearray], bytearray | None]


def edit(folder: Path, start: int, change: Edit) -> None:
    """Rewrite a segment's stream, keeping the three blocks before it."""
    path = folder / segment.FOLDER / segment.segment_name(Position(start))
    raw = bytearray(path.read_bytes())
    blocks, stream = raw[: segment.FRAMES_AT], raw[segment.FRAMES_AT :]
    changed = change(stream)
    path.write_bytes(blocks + (stream if changed is None else changed))


def flip(folder: Path, start: int, position: int, bit: int = 3) -> None:
    def change(stream: bytearray) -> None:
        stream[position - start] ^= 1 << bit

    edit(folder, start, change)


def cut_out(folder: Path, start: int, frame: Written) -> None:
    def change(stream: bytearray) -> None:
        del stream[frame.position - start : frame.end - start]

    edit(folder, start, change)


def put_in(folder: Path, start: int, position: int, raw: bytes) -> None:
    def change(stream: bytearray) -> None:
        stream[position - start : position - start] = raw

    edit(folder, start, change)


def swap(folder: Path, start: int, first: Written, second: Written) -> None:
    def change(stream: bytearray) -> None:
        stream[first.position - start : second.end - start] = second.raw + first.raw

    edit(folder, start, change)


def overwrite(folder: Path, start: int, position: int, raw: bytes) -> None:
    def change(stream: bytearray) -> None:
        stream[position - start : position - start + len(raw)] = raw

    edit(folder, start, change)


def truncate(folder: Path, start: int, position: int) -> None:
    edit(folder, start, lambda stream: stream[: position - start])


def checksum_of(frame: Written) -> int:
    at = HEAD.size + 2 + len(frame.topic) + FIELDS.size
    return int(struct.unpack_from(">I", frame.raw, at)[0])


def fields_of(frame: Written) -> tuple[int, ...]:
    return FIELDS.unpack_from(frame.raw, HEAD.size + 2 + len(frame.topic))


def data_of(frame: Written) -> bytes:
    return frame.raw[HEAD.size + 2 + len(frame.topic) + FIELDS.size + 4 :]


def again(
    frame: Written,
    *,
    base: int | None = None,
    position: int | None = None,
    previous: int | None = None,
    epoch: int | None = None,
) -> bytes:
    """The frame with other fields and a right checksum; its batch says the same offset as before."""
    partition, old_base, count, time_ms, kind, old_epoch, old_position, old_previous = fields_of(frame)
    return encode(
        topic_prefix(frame.topic),
        old_base if base is None else base,
        count,
        time_ms,
        kind,
        old_epoch if epoch is None else epoch,
        old_position if position is None else position,
        old_previous if previous is None else previous,
        partition,
        (data_of(frame),),
    )[0]


def wrong_chain_in_header(folder: Path, start: int) -> Path:
    path = folder / segment.FOLDER / segment.segment_name(Position(start))
    raw = bytearray(path.read_bytes())
    raw[: segment.BLOCK] = segment.encode_header(segment.Header(Position(start), Checksum(12345), CLUSTER))
    path.write_bytes(raw)
    return path


def records(*frames: Written) -> tuple[Range, ...]:
    return tuple(sorted(Range(f.topic, f.partition, f.base, f.base + f.count) for f in frames))
