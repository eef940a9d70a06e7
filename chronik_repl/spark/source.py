"""`spark.read.format("chronik")`: a log as a table. `readStream`, with the same options, is stream.py's.

    spark.dataSource.register(ChronikSource)
    # records, as Kafka's source names them
    spark.read.format("chronik").load("/var/lib/chronik")
    spark.read.format("chronik").option("mode", "frames").load("s3a://backup/node-2")

Read is what is below the high watermark that the directory itself knows (its durable mark), on a node that runs or on
a copy. A task reads one segment, checks every frame, and gives Arrow batches of the columns that the schema names.

    path      a node's data directory: local, or what pyarrow reads (s3://, hdfs://, gs://, abfss://)
    mode      records (default) or frames
    upto      committed (default): below the high watermark; durable: below the durable mark; or a position
    metrics   a local directory where each task leaves a file with the bytes that it read
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    StringType,
    StructType,
    TimestampType,
)

from chronik_repl.errors import ConfigError, CorruptLog, OutOfRange
from chronik_repl.spark.columns import batches
from chronik_repl.spark.filters import Wanted
from chronik_repl.spark.frames import FrameReader, Stretch
from chronik_repl.spark.storage import open_file, storage_of
from chronik_repl.spark.survey import Copy, high_watermark_of, survey

HEADERS = ArrayType(StructType().add("key", StringType()).add("value", BinaryType()))
RECORDS: dict[str, DataType] = {  # as Spark's Kafka source names them
    "key": BinaryType(),
    "value": BinaryType(),
    "topic": StringType(),
    "partition": IntegerType(),
    "offset": LongType(),
    "timestamp": TimestampType(),
    "timestampType": IntegerType(),
    "headers": HEADERS,
}
FRAMES: dict[str, DataType] = {
    "position": LongType(),
    "size": IntegerType(),
    "kind": StringType(),
    "topic": StringType(),
    "partition": IntegerType(),
    "offset": LongType(),
    "recordCount": IntegerType(),
    "timestamp": TimestampType(),
    "epoch": LongType(),
    "previous": LongType(),
    "checksum": LongType(),
    "data": BinaryType(),
}
COLUMNS = {"records": RECORDS, "frames": FRAMES}


class ChronikSource(DataSource):  # type: ignore[misc]
    @classmethod
    def name(cls) -> str:
        return "chronik"

    def schema(self) -> StructType:
        schema = StructType()
        for name, kind in COLUMNS[self.mode].items():
            schema.add(name, kind)
        return schema

    @property
    def mode(self) -> str:
        mode = str(self.options.get("mode", "records"))
        if mode not in COLUMNS:
            raise ConfigError(f"mode is {mode!r}; it may be records or frames")
        return mode

    def reader(self, schema: StructType) -> DataSourceReader:
        return ChronikReader(dict(self.options), self.mode, schema)

    def streamReader(self, schema: StructType) -> Any:
        from chronik_repl.spark.stream import ChronikStreamReader

        return ChronikStreamReader(dict(self.options), self.mode, schema)


class Task(InputPartition):  # type: ignore[misc]
    """One stretch of one segment."""

    def __init__(self, stretch: Stretch) -> None:
        super().__init__(tuple(stretch))

    @property
    def stretch(self) -> Stretch:
        return Stretch(*self.value)


class LogFolder:
    """The directory that the options name, as it is now."""

    def __init__(self, options: dict[str, str], mode: str, schema: StructType) -> None:
        self.options = {k.lower(): v for k, v in options.items()}
        self.mode, self.schema = mode, schema
        self.path = self.options.get("path", "")
        if not self.path:
            raise ConfigError('which log? Give the data directory: .load("/var/lib/chronik")')
        known = COLUMNS[mode]
        for field in schema.fields:
            if field.name not in known:
                raise ConfigError(f"there is no column {field.name} in mode {mode!r}; there are {', '.join(known)}")
            if field.dataType != known[field.name]:
                raise ConfigError(f"column {field.name} is {known[field.name].simpleString()}; cast it after reading")

    def look(self) -> tuple[Copy, int]:
        """What it holds, and up to where it may be read."""
        copy = survey("log", self.path, storage_of(self.path), 0)
        if copy.unreadable:
            raise ConfigError(copy.unreadable)
        wrong = next((s.wrong for s in copy.segments if s.wrong), "")
        if wrong:
            raise CorruptLog(f"{wrong}. `chronik wal verify` tells more")
        upto = self.options.get("upto", "committed")
        if upto == "durable":
            return copy, copy.durable_end
        committed = high_watermark_of(copy, storage_of(self.path))
        if upto == "committed":
            return copy, committed
        if not upto.isdigit():
            raise ConfigError(f"upto is {upto!r}; it may be committed, durable or a position")
        return copy, min(int(upto), copy.durable_end)

    def stretches(self, copy: Copy, start: int, end: int) -> list[Stretch]:
        found = []
        for number, file in enumerate(copy.segments):
            following = copy.segments[number + 1].start if number + 1 < len(copy.segments) else None
            low, high = max(start, file.start), min(end, following if following is not None else end)
            if low < high:
                found.append(
                    Stretch(file.path, file.start, low, high, file.index_path if following is not None else "")
                )
        return found

    def read(self, stretch: Stretch, wanted: Wanted) -> Iterator[pa.RecordBatch]:
        file = open_file(stretch.path)
        if file is None:
            raise OutOfRange(f"{stretch.path} is gone: retention removed it. Read again from the new log start")
        raw_index = b""
        try:
            if stretch.index_path and wanted and self.mode == "records":
                index = open_file(stretch.index_path)
                raw_index = index.read(0, index.size) if index else b""
            reader = FrameReader(stretch, file, raw_index, wanted)
            yield from batches(self.mode, reader, wanted, to_arrow_schema(self.schema, timezone="UTC"))
            self._tell(reader.bytes_read)
        finally:
            file.close()

    def _tell(self, bytes_read: int) -> None:
        folder = self.options.get("metrics")
        if folder:
            (Path(folder) / f"{os.getpid()}-{uuid.uuid4().hex}.json").write_text(json.dumps({"bytes_read": bytes_read}))


class ChronikReader(DataSourceReader):  # type: ignore[misc]
    def __init__(self, options: dict[str, str], mode: str, schema: StructType) -> None:
        self.folder = LogFolder(options, mode, schema)
        self.wanted = Wanted()

    def pushFilters(self, filters: list[Any]) -> Iterable[Any]:
        return self.wanted.take(filters)

    def partitions(self) -> list[InputPartition]:
        copy, upto = self.folder.look()
        start, end = max(copy.start, self.wanted.position_min if self.folder.mode == "frames" else 0), upto
        if self.folder.mode == "frames":
            start = max((s.start for s in copy.segments if s.start <= start), default=copy.start)
            end = min(end, max(start, self._end_of(copy, end)))
        return [Task(s) for s in self.folder.stretches(copy, start, end)] or [InputPartition(None)]

    def _end_of(self, copy: Copy, end: int) -> int:
        """The end of the last segment that may hold a position that is wanted."""
        return min((s.start for s in copy.segments if s.start > self.wanted.position_max), default=end)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if isinstance(partition, Task):
            yield from self.folder.read(partition.stretch, self.wanted)
