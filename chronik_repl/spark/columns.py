"""Frames and records as Arrow batches, with exactly the columns that were asked for.

Records are named as Spark's Kafka source names them. What is not asked for is not decoded: topics, partitions and
offsets alone need no record to be unpacked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa

from chronik_repl.spark.filters import Wanted
from chronik_repl.spark.frames import Found, FrameReader
from chronik_repl.wal.frame import Kind
from chronik_repl.wal.records import read_head, read_records

KIND_NAMES = {k.value: k.name.lower().replace("_", " ") for k in Kind}
ROWS_MAX = 10_000
BATCH_BYTES_MAX = 16 * 1024 * 1024
_UNDECODED = {"topic", "partition", "offset"}


def batches(mode: str, reader: FrameReader, wanted: Wanted, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    columns: dict[str, list[Any]] = {name: [] for name in schema.names}
    add = _frame_adder(columns) if mode == "frames" else _record_adder(columns)
    rows = size = 0
    for found in reader:
        frame = found.frame
        topic = frame.topic.decode("ascii", "replace")
        if not wanted.partition(topic, frame.partition):
            continue
        if mode == "records" and frame.kind != Kind.DATA:
            continue
        if mode == "frames" and not wanted.position_min <= frame.place <= wanted.position_max:
            continue
        if mode == "frames" and frame.time_ms < wanted.time_ms_min:
            continue
        if mode == "records":
            head = read_head(found.data)
            if head.control or not wanted.batch(frame.base_offset, frame.record_count, head.max_timestamp_ms):
                continue
        rows += add(found, topic)
        size += frame.size
        if rows >= ROWS_MAX or size >= BATCH_BYTES_MAX:
            yield _batch(columns, schema)
            rows = size = 0
    if rows:
        yield _batch(columns, schema)


def _batch(columns: dict[str, list[Any]], schema: pa.Schema) -> pa.RecordBatch:
    arrays = [pa.array(columns[field.name], field.type) for field in schema]
    for values in columns.values():
        values.clear()
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _frame_adder(columns: dict[str, list[Any]]) -> Callable[[Found, str], int]:
    values: dict[str, Callable[[Found, str], Any]] = {
        "position": lambda f, _: f.frame.place,
        "size": lambda f, _: f.frame.size,
        "kind": lambda f, _: KIND_NAMES.get(f.frame.kind, str(f.frame.kind)),
        "topic": lambda _, topic: topic,
        "partition": lambda f, _: f.frame.partition,
        "offset": lambda f, _: f.frame.base_offset,
        "recordCount": lambda f, _: f.frame.record_count,
        "timestamp": lambda f, _: f.frame.time_ms * 1000,
        "epoch": lambda f, _: f.frame.epoch,
        "previous": lambda f, _: f.frame.previous,
        "checksum": lambda f, _: f.frame.checksum,
        "data": lambda f, _: bytes(f.data),
    }
    asked = [(column, values[name]) for name, column in columns.items()]

    def add(found: Found, topic: str) -> int:
        for column, value in asked:
            column.append(value(found, topic))
        return 1

    return add


def _record_adder(columns: dict[str, list[Any]]) -> Callable[[Found, str], int]:
    column = columns.get

    def add_undecoded(found: Found, topic: str) -> int:
        frame = found.frame
        _repeat(column("topic"), topic, frame.record_count)
        _repeat(column("partition"), frame.partition, frame.record_count)
        offsets = column("offset")
        if offsets is not None:
            offsets.extend(range(frame.base_offset, frame.base_offset + frame.record_count))
        return frame.record_count

    def add(found: Found, topic: str) -> int:
        frame = found.frame
        head = read_head(found.data)
        records = list(read_records(found.data))
        count = len(records)
        _repeat(column("topic"), topic, count)
        _repeat(column("partition"), frame.partition, count)
        _repeat(column("timestampType"), int(head.log_append_time), count)
        for name, values in columns.items():
            if name == "key":
                values.extend([r.key for r in records])
            elif name == "value":
                values.extend([r.value for r in records])
            elif name == "offset":
                values.extend([r.offset for r in records])
            elif name == "timestamp":
                values.extend([r.timestamp_ms * 1000 for r in records])
            elif name == "headers":
                values.extend([_headers(r.headers) if r.headers else None for r in records])
        return count

    return add_undecoded if set(columns) <= _UNDECODED else add


def _repeat(column: list[Any] | None, value: Any, count: int) -> None:
    if column is not None:
        column.extend([value] * count)


def _headers(headers: list[tuple[bytes, bytes | None]]) -> list[dict[str, Any]]:
    return [{"key": name.decode("utf-8", "replace"), "value": value} for name, value in headers]
