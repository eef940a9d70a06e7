"""The frames of one segment between two positions, one by one, for the data source. Damage is raised, never skipped.

With filters, and an index beside the file, only the frames that may hold what is wanted are read; the index is no
more than a hint where to look: each frame must be the one that it promised, else all frames from there on are read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from chronik_repl.errors import CorruptLog
from chronik_repl.positions import Position
from chronik_repl.spark.filters import Wanted
from chronik_repl.spark.index import ENTRY, IndexFile, read_index
from chronik_repl.spark.layout import Piece, frame_at, frame_bytes_at
from chronik_repl.spark.storage import Bytes
from chronik_repl.wal.frame import OVERHEAD
from chronik_repl.wal.segment import FRAMES_AT

WINDOW_BYTES = 4 * 1024 * 1024
GAP_BYTES = 64 * 1024  # frames that are closer than this are fetched in one read


Row = tuple[int, int, bytes, int, int]  # of the index: position, size, topic, partition, base offset


class Stretch(NamedTuple):
    """A part of one segment's stream."""

    path: str
    segment_start: int
    start: int
    end: int
    index_path: str = ""


class Found(NamedTuple):
    frame: Piece
    data: memoryview  # good until the next one is asked for


class FrameReader:
    """Iterates over the frames; `bytes_read` tells what that cost."""

    def __init__(self, stretch: Stretch, file: Bytes, raw_index: bytes, wanted: Wanted) -> None:
        self.stretch, self._file, self._wanted = stretch, file, wanted
        self.bytes_read = len(raw_index)
        self._index: IndexFile | None = None
        if raw_index:
            index = read_index(raw_index, stretch.segment_start)
            self._index = index if isinstance(index, IndexFile) else None

    def __iter__(self) -> Iterator[Found]:
        if self._index is None:
            yield from self._all(self.stretch.start)
        else:
            yield from self._listed(self._listed_runs(self._index))

    def _read(self, position: int, size: int) -> memoryview:
        data = self._file.read(FRAMES_AT + position - self.stretch.segment_start, size)
        self.bytes_read += len(data)
        return memoryview(data)

    def _all(self, position: int) -> Iterator[Found]:
        end, previous = self.stretch.end, None
        window, at = memoryview(b""), 0
        while position < end:
            size = frame_bytes_at(window, at)
            if size == 0 or at + size > len(window):
                window, at = self._read(position, max(size, min(WINDOW_BYTES, end - position))), 0
                size = frame_bytes_at(window, 0)
                if size > len(window):
                    window = self._read(position, size)
            frame = frame_at(window, at, position) if size else None
            if frame is None or frame.position != position or (previous is not None and frame.previous != previous):
                raise self._damage(position)
            yield Found(frame, window[at + OVERHEAD + len(frame.topic) : at + size])
            position, at, previous = position + size, at + size, frame.checksum

    def _listed_runs(self, index: IndexFile) -> list[list[Row]]:
        """What the index lists as wanted, in the order of the log; what stands close together in one run."""
        rows: list[Row] = []
        for (topic, partition), entries in index.rows.items():
            if self._wanted.partition(topic.decode("ascii", "replace"), partition):
                for base, newest, relative, size, count, _ in ENTRY.iter_unpack(entries):
                    position = self.stretch.segment_start + relative
                    if self._wanted.batch(base, count, newest) and self.stretch.start <= position < self.stretch.end:
                        rows.append((position, size, topic, partition, base))
        rows.sort()
        runs: list[list[Row]] = []
        for row in rows:
            last = runs[-1][-1] if runs else None
            near = last and row[0] - last[0] - last[1] <= GAP_BYTES
            if near and row[0] + row[1] - runs[-1][0][0] <= WINDOW_BYTES:
                runs[-1].append(row)
            else:
                runs.append([row])
        return runs

    def _listed(self, runs: list[list[Row]]) -> Iterator[Found]:
        read_to = self.stretch.start  # a frame's end: everything wanted before it is done
        for run in runs:
            first = run[0][0]
            window = self._read(first, run[-1][0] + run[-1][1] - first)
            for position, _, topic, partition, base in run:
                at = position - first
                frame = frame_at(window, at, position)
                stands = frame and (frame.position, frame.topic, frame.partition, frame.base_offset)
                if frame is None or stands != (position, topic, partition, base):
                    yield from self._all(read_to)  # the index lies, or there is damage: the frames will tell
                    return
                yield Found(frame, window[at + OVERHEAD + len(frame.topic) : at + frame.size])
                read_to = position + frame.size

    def _damage(self, position: int) -> CorruptLog:
        path = self.stretch.path
        return CorruptLog(
            f"{path}: no good frame stands at position {position}. `chronik wal verify` tells more; nothing is skipped",
            file=path,
            start=Position(position),
        )
