"""What each copy holds, before its frames are looked at: segments, headers, durable marks, and where it ends.

A copy *ends* at its durable mark, or where its good frames end beyond that mark: a node that runs writes the mark of a
group only under the next one. Bytes missing below the mark are damage; everything after the end is not there yet.
"""

from __future__ import annotations

from typing import Any

import msgspec

from chronik_repl.errors import CorruptLog, FormatTooNew
from chronik_repl.spark.layout import frame_at, frame_bytes_at
from chronik_repl.spark.storage import Hadoop, Local, Storage, StorageError, absolute, is_local, segments_folder
from chronik_repl.wal import segment

INDEX_SUFFIX = ".idx"


class SegmentFile(msgspec.Struct, frozen=True):
    """One file of a copy."""

    start: int
    path: str
    size: int
    modified_ns: int
    chain: int | None = None  # as its header says; None if that is unreadable
    cluster_id: str = ""
    wrong: str = ""  # what is wrong with the header
    index_path: str = ""  # of the index beside it, if there is one

    @property
    def stream_end(self) -> int:
        """Where its bytes end, zeros included."""
        return self.start + max(0, self.size - segment.FRAMES_AT)


class Copy(msgspec.Struct, frozen=True):
    name: str
    path: str
    segments: tuple[SegmentFile, ...] = ()
    durable_end: int = 0  # by its own mark
    end: int = 0
    unreadable: str = ""  # why nothing of it can be compared

    @property
    def local(self) -> bool:
        return is_local(self.path)

    @property
    def start(self) -> int:
        return self.segments[0].start if self.segments else 0

    @property
    def cluster_id(self) -> str:
        return next((s.cluster_id for s in self.segments if s.cluster_id), "")


def storage_for(path: str, spark_context: Any) -> Storage:
    return Local() if is_local(path) else Hadoop(spark_context)


def survey(name: str, path: str, storage: Storage, upto: int | None) -> Copy:
    """Read the listing, every header and the last mark. Frames beyond the mark are walked, but not beyond `upto`."""
    path = absolute(path)
    try:
        listing = segments_folder(storage, path, segment.FOLDER)
        if listing is None:
            return Copy(name, path, unreadable=f"{path}: no such directory")
        indexes = {e.name: e.path for e in listing if e.name.endswith(INDEX_SUFFIX)}
        files = []
        for entry in sorted(listing):
            match = segment.NAME.match(entry.name)
            blocks = storage.read(entry.path, 0, segment.FRAMES_AT) if match else None
            if match and blocks is not None:  # None: retention has just removed it
                index = indexes.get(entry.name[: -len(".wal")] + INDEX_SUFFIX, "")
                files.append(
                    (
                        _segment_file(int(match.group(1)), entry.path, entry.size, entry.modified_ns, blocks, index),
                        blocks,
                    )
                )
    except StorageError as error:
        return Copy(name, path, unreadable=str(error))
    except FormatTooNew as error:
        return Copy(name, path, unreadable=str(error))
    if not files:
        return Copy(name, path)
    last, blocks = files[-1]
    mark = segment.best_mark(blocks)
    durable_end = max(last.start, mark.durable_end) if mark else last.start
    end = _good_end(storage, last, durable_end, upto)
    return Copy(name, path, tuple(f for f, _ in files), durable_end, end)


def _segment_file(start: int, path: str, size: int, modified_ns: int, blocks: bytes, index: str) -> SegmentFile:
    try:
        header = segment.decode_header(blocks[: segment.BLOCK], path)
    except CorruptLog as error:
        return SegmentFile(start, path, size, modified_ns, wrong=str(error), index_path=index)
    wrong = "" if header.start == start else f"{path}: the header is of the segment at {header.start}"
    return SegmentFile(start, path, size, modified_ns, header.chain, header.cluster_id, wrong, index)


def _good_end(storage: Storage, last: SegmentFile, durable_end: int, upto: int | None) -> int:
    """Good frames beyond the mark count as held: they are only not yet marked."""
    end, window, window_at = durable_end, memoryview(b""), durable_end
    while upto is None or end < upto:
        at = end - window_at
        size = frame_bytes_at(window, at)
        if size == 0 or len(window) - at < size:
            raw = storage.read(last.path, segment.FRAMES_AT + end - last.start, max(size, 4 << 20))
            window, window_at, at = memoryview(raw or b""), end, 0
            size = frame_bytes_at(window, 0)
        frame = frame_at(window, at, end) if size else None
        if frame is None or frame.position != end:
            break
        end += size
    return end


def high_watermark_of(copy: Copy, storage: Storage) -> int:
    """The highest that the copy's own marks know of; what it does not hold durably does not count."""
    for file in reversed(copy.segments):
        blocks = storage.read(file.path, 0, segment.FRAMES_AT)
        mark = segment.best_mark(blocks) if blocks else None
        if mark is not None:
            return min(mark.high_watermark, copy.durable_end)
    return copy.start
