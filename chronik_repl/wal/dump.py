"""A log as text: a line a frame, or with `json` an object a line; on demand the records in it.

Nothing of the node goes into it: no path, no mark, no header. Two equal logs give equal dumps, byte for byte, so `diff`
is a way to compare them.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from chronik_repl.errors import CorruptLog, ProtocolError
from chronik_repl.wal.changes import SnapshotPart, decode_change
from chronik_repl.wal.frame import Frame, Kind
from chronik_repl.wal.records import BadBatch, Record, read_head, read_records
from chronik_repl.wal.survey import SegmentFile, segment_paths

KINDS = {
    Kind.DATA: "data",
    Kind.EPOCH_START: "epoch-start",
    Kind.SEGMENT_START: "segment-start",
    Kind.SOURCE_POSITION: "source-position",
    Kind.STATE_CHANGE: "state-change",
}
COLUMNS = f"{'position':>20} {'size':>9} {'time':<24} {'epoch':>5} {'kind':<15} what"
FIRST_TIME_MS, LAST_TIME_MS = -62_135_596_800_000, 253_402_300_799_999  # the years 1 to 9999


class Wanted(NamedTuple):
    """Which frames, and how."""

    start: int = 0
    end: int | None = None
    topic: str | None = None
    partition: int | None = None
    records: bool = False
    json: bool = False


class Trouble(NamedTuple):
    """Goes to stderr, not into the dump."""

    text: str


def dump(directory: Path, wanted: Wanted) -> Iterator[str | Trouble]:
    """The lines. Raises CannotRead or FormatTooNew."""
    paths = segment_paths(directory)
    if not wanted.json:
        yield COLUMNS
    for number, (start, path) in enumerate(paths):
        following = paths[number + 1][0] if number + 1 < len(paths) else None
        if following is not None and following <= wanted.start:
            continue
        if wanted.end is not None and start >= wanted.end:
            break
        try:
            file = SegmentFile(path, start)
        except FileNotFoundError:  # retention, meanwhile
            continue
        except CorruptLog as error:
            yield Trouble(str(error))
            continue
        with file:
            for piece in file.walk(file.header.chain):
                if isinstance(piece, Frame):
                    if _is_wanted(piece, wanted):
                        yield from _show_json(piece, wanted) if wanted.json else _show(piece, wanted)
                elif piece.start >= file.durable_end(following):
                    break  # the room for more frames, or a tail that was not finished
                else:
                    yield Trouble(f"{path.name}: damage from position {piece.start} to {piece.end}: {piece.why}")


def _is_wanted(frame: Frame, wanted: Wanted) -> bool:
    if frame.position < wanted.start or (wanted.end is not None and frame.position >= wanted.end):
        return False
    if wanted.topic is not None and frame.topic != wanted.topic.encode():
        return False
    return wanted.partition is None or (frame.kind == Kind.DATA and frame.partition == wanted.partition)


def _show(frame: Frame, wanted: Wanted) -> Iterator[str]:
    if frame.kind == Kind.DATA:
        topic = frame.topic.decode("latin-1")
        last = frame.base_offset + frame.record_count - 1
        what = f"{topic}/{frame.partition} {frame.base_offset}..{last}"
        try:
            head = read_head(frame.data)
            what += f" {head.compression}" if head.compression != "none" else ""
            what += f" producer={head.producer_id}/{head.producer_epoch}" if head.producer_id >= 0 else ""
        except BadBatch as error:
            what += f" BAD: {error}"
    else:
        what = json.dumps(_change(frame), ensure_ascii=False, separators=(",", ":"))
    time = show_time(frame.timestamp_ms)
    yield f"{frame.position:>20} {frame.size:>9} {time:<24} {frame.epoch:>5} {KINDS[Kind(frame.kind)]:<15} {what}"
    if wanted.records and frame.kind == Kind.DATA:
        try:
            for record in read_records(frame.data):
                headers = " ".join(f"{_text(name)}={_text(content)}" for name, content in record.headers)
                line = f"{record.offset:>31} {show_time(record.timestamp_ms):<24} "
                yield f"{line}{_text(record.key)}: {_text(record.value)}{'  {' + headers + '}' if headers else ''}"
        except BadBatch as error:
            yield f"{'':>31} BAD: {error}"


def _show_json(frame: Frame, wanted: Wanted) -> Iterator[str]:
    line: dict[str, Any] = {
        "position": frame.position,
        "size": frame.size,
        "kind": KINDS[Kind(frame.kind)],
        "epoch": frame.epoch,
        "timestamp_ms": frame.timestamp_ms,
        "previous": frame.previous,
        "checksum": frame.checksum,
    }
    if frame.kind == Kind.DATA:
        line |= {
            "topic": frame.topic.decode("latin-1"),
            "partition": frame.partition,
            "base_offset": frame.base_offset,
            "record_count": frame.record_count,
        }
        try:
            head = read_head(frame.data)
            line |= {
                "compression": head.compression,
                "max_timestamp_ms": head.max_timestamp_ms,
                "producer_id": head.producer_id,
                "producer_epoch": head.producer_epoch,
                "base_sequence": head.base_sequence,
            }
            if wanted.records:
                line["records"] = [_record(record) for record in read_records(frame.data)]
        except BadBatch as error:
            line["bad"] = str(error)
    else:
        line["change"] = _change(frame)
    yield json.dumps(line, ensure_ascii=False, separators=(",", ":"))


def _record(record: Record) -> dict[str, Any]:
    return {
        "offset": record.offset,
        "timestamp_ms": record.timestamp_ms,
        "key": _json_value(record.key),
        "value": _json_value(record.value),
        "headers": [[_json_value(name), _json_value(content)] for name, content in record.headers],
    }


def _change(frame: Frame) -> Any:
    try:
        change = decode_change(frame.data)
    except ProtocolError as error:
        return {"bad": str(error)}
    if isinstance(change, SnapshotPart):
        return {"type": "snapshot", "part": change.part, "parts": change.parts, "bytes": len(change.piece)}
    return msgspec.to_builtins(change)  # bytes become base64


def _json_value(data: bytes | None) -> Any:
    """Text as text, anything else as {"base64": …}."""
    if data is None:
        return None
    try:
        return data.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode()}


def _text(data: bytes | None) -> str:
    """On one line and safe on a terminal."""
    if data is None:
        return "null"
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return "0x" + data.hex()
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def show_time(timestamp_ms: int) -> str:
    if not FIRST_TIME_MS <= timestamp_ms <= LAST_TIME_MS:
        return str(timestamp_ms)
    seconds, ms = divmod(timestamp_ms, 1000)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{ms:03d}Z"
