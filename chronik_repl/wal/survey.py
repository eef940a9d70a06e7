"""A log read from outside: files, headers, marks, frames. Its owner may be writing; no lock is taken, nothing changed.

Independent of `Log.open`: nothing here repairs, cuts or trusts an index. `walk` gives every frame of a segment and,
where bytes are no frame, a `Bad` with the reason; then it looks for the next good frame, so that one flipped bit hides
one frame and not the rest of the file. A frame found that way vouches for itself: its own position stands in it, under
its own checksum.

What a live log does meanwhile is harmless: the mark is read before the frames, so what stood below it then was durable
before it was looked at. A segment that retention removes in between is skipped by the callers; one that a truncation
cuts in between is durable as far as its marks say now, and no longer to where the one after it began.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from chronik_repl.errors import ChronikError
from chronik_repl.positions import Checksum, Position
from chronik_repl.wal.frame import (
    FIELDS,
    HEAD,
    MAGIC,
    OVERHEAD,
    TOPIC_BYTES_MAX,
    TOPIC_LEN,
    TOPIC_PATTERN,
    VERSION,
    BadFrame,
    Frame,
    decode,
    frame_size,
)
from chronik_repl.wal.segment import (
    FOLDER,
    FRAMES_AT,
    NAME,
    Header,
    Mark,
    best_mark,
    decode_header,
    segment_name,
)

READ_BYTES = 1024 * 1024
FRAME_BYTES_MAX = 256 * 1024 * 1024  # whatever a node was configured for; a file's own size is the limit too
_HEAD_BYTES = HEAD.pack(MAGIC, VERSION, 0)[:4]


class CannotRead(ChronikError):
    """There is no log here, or not for this user."""


class Bad(NamedTuple):
    """No frame that belongs there stands from `start` on; the next good one, if any, at `end`. With `end` == `start` it
    is a whole frame of another chain, which comes next."""

    start: Position
    end: Position
    why: str
    topic: str = ""  # what the bad frame says of itself, if it can still be read
    partition: int = -1
    offset: int = -1
    zeros: bool = False  # nothing but zeros to the end of the file: room for more frames
    last: bool = False  # no good frame follows


def segment_paths(directory: Path) -> list[tuple[Position, Path]]:
    """The segments by their names, in order. Raises CannotRead."""
    folder = directory / FOLDER
    try:
        names = sorted(os.listdir(folder))
    except FileNotFoundError:
        if not directory.is_dir():
            raise CannotRead(f"{directory}: no such directory. Give a node's data directory") from None
        raise CannotRead(
            f"{directory} has no folder {FOLDER!r}: not a node's data directory, or one that was never started. Give "
            "what CHRONIK_DATA_DIR names"
        ) from None
    except OSError as error:
        raise CannotRead(f"{folder}: {error.strerror}. {_what_to_do(error)}") from error
    return [(Position(int(match[1])), folder / name) for name in names if (match := NAME.match(name))]


def _what_to_do(error: OSError) -> str:
    if isinstance(error, PermissionError):
        return "Run this as the user that runs the node"
    return "Give a node's data directory"


class SegmentFile:
    """One segment, open for reading. Raises FileNotFoundError, CannotRead, CorruptLog or FormatTooNew."""

    def __init__(self, path: Path, start: Position) -> None:
        self.path, self.start = path, start
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise CannotRead(f"{path}: {error.strerror}. {_what_to_do(error)}") from error
        try:
            blocks = self._read(0, FRAMES_AT)
            self.header: Header = decode_header(blocks, path.name)
            self.mark: Mark | None = best_mark(blocks)
        except BaseException:
            os.close(self._fd)
            raise

    def __enter__(self) -> SegmentFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def durable_end(self, following: Position | None) -> Position:
        """Below it everything was durable when this file was opened, and still is meant to be. A segment with one
        `following` it is durable as a whole, unless a truncation has taken that one away since."""
        if following is not None and (self.removed or self.path.with_name(segment_name(following)).exists()):
            return following
        marks = (self.mark, self.mark_now())  # the later one may be lower: a truncation
        return min((mark.durable_end for mark in marks if mark is not None), default=self.start)

    def mark_now(self) -> Mark | None:
        return best_mark(self._read(0, FRAMES_AT))

    @property
    def size(self) -> int:
        return os.fstat(self._fd).st_size

    @property
    def removed(self) -> bool:
        """It has no name any more: retention, or a truncation to somewhere before it."""
        return os.fstat(self._fd).st_nlink == 0

    @property
    def sealed(self) -> bool:
        """Cut to size and read-only."""
        return not os.fstat(self._fd).st_mode & 0o222

    def _read(self, at: int, size: int) -> bytes:
        pieces = []
        while size > 0:
            try:
                piece = os.pread(self._fd, size, at)
            except OSError as error:
                raise CannotRead(
                    f"{self.path}: cannot be read at byte {at}: {error.strerror}. Look at the disk "
                    "(`dmesg`, `smartctl`), and go on with a copy of this log on another one"
                ) from error
            if not piece:
                break
            pieces.append(piece)
            at += len(piece)
            size -= len(piece)
        return b"".join(pieces)

    def walk(self, chain: Checksum | None, progress: Callable[[int], None] | None = None) -> Iterator[Frame | Bad]:
        """Every frame in order; `chain` is the checksum before the first (None: not known). A frame's data is good
        until the next one is asked for."""
        base, data = FRAMES_AT, memoryview(b"")  # where in the file `data` stands
        at = 0
        position = self.start
        size_max = min(FRAME_BYTES_MAX, self.size)
        while True:
            if len(data) - at < READ_BYTES // 2:
                base, data, at = self._more(base, data, at, READ_BYTES)
            if at == len(data):
                return
            frame, bad = self._one(data, at, position, chain, size_max)
            if frame is None and bad is None:  # cut off by the end of `data`
                want = frame_size(data, at, size_max) if len(data) - at >= HEAD.size else HEAD.size
                base, data, at = self._more(base, data, at, want)
                frame, bad = self._one(data, at, position, chain, size_max)
                if frame is None and bad is None:
                    left = len(data) - at
                    bad = Bad(position, position, f"a frame of {want} bytes has only {left}: the file ends in it")
            if bad is not None:
                topic, partition, offset = _says_of_itself(data, at, position)
                bad = bad._replace(topic=topic, partition=partition, offset=offset)
            if bad is not None and frame is None:
                found = self._next_good(base + at, size_max)
                end = self.start + (found or max(self.size, base + at)) - FRAMES_AT
                zeros = found is None and not any(self._pieces_from(base + at))
                yield bad._replace(end=Position(end), zeros=zeros, last=found is None)
                if found is None:
                    return
                base, data, at = found, memoryview(b""), 0
                position, chain = Position(end), None
                continue
            if bad is not None:
                yield bad
            assert frame is not None
            yield frame
            if progress is not None:
                progress(frame.size)
            at += frame.size
            position = Position(position + frame.size)
            chain = frame.checksum

    def _one(
        self, data: memoryview, at: int, position: Position, chain: Checksum | None, size_max: int
    ) -> tuple[Frame | None, Bad | None]:
        try:
            return decode(data, at, position, chain, size_max), None
        except BadFrame as error:
            bad = Bad(position, position, str(error))
        try:  # whole, but of another chain?
            return decode(data, at, position, None, size_max), bad
        except BadFrame:
            return None, bad

    def _more(self, base: int, data: memoryview, at: int, want: int) -> tuple[int, memoryview, int]:
        """Data from `at` on, and as much more as makes `want` bytes, with some to spare."""
        left = bytes(data[at:])
        fresh = self._read(base + len(data), max(want - len(left), READ_BYTES))
        return base + at, memoryview(left + fresh), 0

    def _pieces_from(self, at: int) -> Iterator[bool]:
        while piece := self._read(at, READ_BYTES):
            yield any(piece)
            at += len(piece)

    def _next_good(self, after: int, size_max: int) -> int | None:
        """The byte of the file where the next frame stands that vouches for itself."""
        at = after + 1
        overlap = OVERHEAD + TOPIC_BYTES_MAX
        while len(piece := self._read(at, READ_BYTES + overlap)) >= OVERHEAD:
            found = piece.find(_HEAD_BYTES)
            while 0 <= found < READ_BYTES and len(piece) - found >= OVERHEAD:
                if self._vouches(at + found, piece[found : found + overlap], size_max):
                    return at + found
                found = piece.find(_HEAD_BYTES, found + 1)
            at += READ_BYTES
        return None

    def _vouches(self, at: int, head: bytes, size_max: int) -> bool:
        position = self.start + at - FRAMES_AT
        try:
            size = frame_size(head, 0, size_max)
            (topic_len,) = TOPIC_LEN.unpack_from(head, HEAD.size)
            fields_at = HEAD.size + TOPIC_LEN.size + topic_len
            if len(head) < fields_at + FIELDS.size or FIELDS.unpack_from(head, fields_at)[6] != position:
                return False
            return decode(memoryview(self._read(at, size)), 0, position, None, size_max) is not None
        except BadFrame:
            return False


def _says_of_itself(data: memoryview, at: int, position: Position) -> tuple[str, int, int]:
    """The topic, partition and base offset in a damaged frame's header, as far as they can be believed."""
    if len(data) - at < OVERHEAD:
        return "", -1, -1
    (topic_len,) = TOPIC_LEN.unpack_from(data, at + HEAD.size)
    fields_at = at + HEAD.size + TOPIC_LEN.size + topic_len
    if not 0 < topic_len <= TOPIC_BYTES_MAX or fields_at + FIELDS.size > len(data):
        return "", -1, -1
    partition, offset, _, _, _, _, stands_at, _ = FIELDS.unpack_from(data, fields_at)
    topic = bytes(data[at + HEAD.size + TOPIC_LEN.size : fields_at]).decode("latin-1")
    if stands_at != position or not TOPIC_PATTERN.match(topic) or partition < 0 or offset < 0:
        return "", -1, -1
    return topic, partition, offset
