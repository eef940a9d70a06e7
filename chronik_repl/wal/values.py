"""The plain values that go into the log and come out of it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from chronik_repl.positions import Offset, Position
from chronik_repl.wal.frame import FRAME_BYTES_MAX_DEFAULT

MiB = 1024 * 1024
SEGMENT_BYTES_MAX = 1 << 30  # with the largest frame and snapshot on top, relative positions still fit into 32 bits
SEGMENT_BYTES_MIN = 4096


class LogSettings(msgspec.Struct, frozen=True):
    segment_bytes: int = 64 * MiB
    frame_bytes_max: int = FRAME_BYTES_MAX_DEFAULT
    min_free_bytes: int = 1024 * MiB  # below it appends are refused, reads go on
    linger_s: float = 0.0  # how long the first frame of a group may wait for company; 0: not at all
    retention_bytes: int = 0  # 0: no limit
    retention_hours: float = 168
    keep_bytes: int = 10 * 1024 * MiB  # how much a slow member may hold back
    scrub_mb_per_s: float = 8

    def __post_init__(self) -> None:
        if not SEGMENT_BYTES_MIN <= self.segment_bytes <= SEGMENT_BYTES_MAX:
            raise ValueError(
                f"segment_bytes is {self.segment_bytes}; allowed are {SEGMENT_BYTES_MIN} to {SEGMENT_BYTES_MAX}"
            )


class Appended(NamedTuple):
    """Where a frame stands. `end` is the position to wait for."""

    position: Position
    end: Position
    base_offset: Offset
    timestamp_ms: int


class Fetched(NamedTuple):
    """Whole batches in order, the first one holding the offset that was asked for."""

    batches: Sequence[memoryview]
    next_offset: Offset  # where to go on
    high_watermark_offset: Offset
    log_start_offset: Offset


class Damage(msgspec.Struct, frozen=True):
    """Bytes that are not what was written. `what` says it in words."""

    file: str
    start: int
    end: int
    what: str
    topic: str = ""
    partition: int = -1
    offset: int = -1


class Histogram(msgspec.Struct):
    """How many values were at most each bound, and their sum. What is beyond the last bound counts too."""

    bounds: tuple[float, ...]
    counts: list[int] = []
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


def _commit_seconds() -> Histogram:
    return Histogram((1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0))


def _group_bytes() -> Histogram:
    return Histogram(tuple(1024.0 * 4**power for power in range(8)))  # 1 KiB to 16 MiB


class LogStats(msgspec.Struct):
    """Counters since the log was opened."""

    appended_frames: int = 0
    appended_bytes: int = 0
    appended_records: int = 0
    groups_committed: int = 0
    group_bytes: int = 0  # of the last group
    group_frames: int = 0
    marks_written: int = 0
    segments_rolled: int = 0
    segments_removed: int = 0
    commit_s: float = 0.0  # spent in commits, as the event loop sees them
    commit_last_s: float = 0.0
    commit_longest_s: float = 0.0
    commit_seconds: Histogram = msgspec.field(default_factory=_commit_seconds)
    committed_bytes: Histogram = msgspec.field(default_factory=_group_bytes)  # of each group
    fetched_bytes: int = 0
    read_bytes: int = 0  # from files, for fetches and catch-up
    indexes_rebuilt: int = 0
    scrubbed_bytes: int = 0
    scrub_rounds: int = 0
