"""`spark.readStream.format("chronik")`: the log as a stream. An offset is a position, and every batch a range of them.

What is below the high watermark never changes, so a range read again after a crash gives the same records: with a
checkpoint and a sink that is idempotent a batch (Parquet files are), every record arrives once.

    startingPosition      earliest (default): where the log starts; latest: the high watermark; or a position
    maxBytesPerTrigger    at most so many bytes of the log a batch (at least one frame)
    maxRecordsPerTrigger  at most so many records a batch (at least one frame)
    failOnDataLoss        true (default): stop if retention removed what was not read yet; false: go on at the new start
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from chronik_repl.errors import ConfigError, OutOfRange
from chronik_repl.spark.filters import INT64_MAX, Wanted
from chronik_repl.spark.frames import FrameReader, Stretch
from chronik_repl.spark.source import LogFolder, Task
from chronik_repl.spark.storage import open_file
from chronik_repl.spark.survey import Copy
from chronik_repl.wal.frame import Kind


class ChronikStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):  # type: ignore[misc]
    def __init__(self, options: dict[str, str], mode: str, schema: StructType) -> None:
        self.folder = LogFolder(options, mode, schema)
        self._target: int | None = None  # with Trigger.AvailableNow: where this query ends
        self._fail_on_loss = self.folder.options.get("failondataloss", "true").lower() != "false"

    def initialOffset(self) -> dict[str, int]:
        copy, upto = self.folder.look()
        start = self.folder.options.get("startingposition", "earliest")
        if start == "earliest":
            return {"position": copy.start}
        if start == "latest":
            return {"position": upto}
        if not start.isdigit() or not copy.start <= int(start) <= upto:
            raise ConfigError(
                f"startingPosition is {start!r}; it may be earliest, latest or a position from {copy.start} to {upto}"
            )
        return {"position": int(start)}

    def getDefaultReadLimit(self) -> ReadLimit:
        if size := self.folder.options.get("maxbytespertrigger"):
            return ReadMaxBytes(_positive("maxBytesPerTrigger", size))
        if rows := self.folder.options.get("maxrecordspertrigger"):
            return ReadMaxRows(_positive("maxRecordsPerTrigger", rows))
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = self.folder.look()[1]

    def reportLatestOffset(self) -> dict[str, int]:
        return {"position": self.folder.look()[1]}

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:
        copy, upto = self.folder.look()
        if self._target is not None:
            upto = min(upto, self._target)
        position = self._still_there(copy, int(start["position"]))
        if upto <= position:
            return start
        bytes_max = limit.max_bytes if isinstance(limit, ReadMaxBytes) else INT64_MAX
        rows_max = limit.max_rows if isinstance(limit, ReadMaxRows) else INT64_MAX
        if bytes_max >= upto - position and rows_max == INT64_MAX:
            return {"position": upto}
        return {"position": self._cut(copy, position, upto, bytes_max, rows_max)}

    def _still_there(self, copy: Copy, position: int) -> int:
        if position >= copy.start:
            return position
        if self._fail_on_loss:
            raise OutOfRange(
                f"positions {position} to {copy.start} were removed by retention before they were read; "
                "start again with a new "
                "checkpoint, or set failOnDataLoss to false to go on at the log's start"
            )
        return copy.start

    def _cut(self, copy: Copy, start: int, upto: int, bytes_max: int, rows_max: int) -> int:
        """The last frame's end within the limits; at least one frame."""
        end, rows = start, 0
        for stretch in self.folder.stretches(copy, start, min(upto, start + min(bytes_max, upto - start) + (1 << 30))):
            file = open_file(stretch.path)
            if file is None:
                break
            try:
                for found in FrameReader(stretch, file, b"", Wanted()):
                    rows += found.frame.record_count if found.frame.kind == Kind.DATA else 0
                    stop = found.frame.place + found.frame.size
                    if (stop - start > bytes_max or rows > rows_max) and end > start:
                        return end
                    end = stop
            finally:
                file.close()
        return end

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        copy, _ = self.folder.look()
        position = self._still_there(copy, int(start["position"]))
        return [Task(s) for s in self.folder.stretches(copy, position, int(end["position"]))]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if isinstance(partition, Task):
            stretch: Stretch = partition.stretch
            yield from self.folder.read(stretch, Wanted())

    def commit(self, end: dict[str, Any]) -> None:
        """Nothing to do: the log keeps what its retention says, not what we have read."""


def _positive(name: str, text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(f"{name} is {text!r}; it must be a number above 0")
    return int(text)
