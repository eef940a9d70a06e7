"""Runs of frames from the log's files on their way to a follower: cut at whole frames, checked where asked."""

from __future__ import annotations

from collections.abc import Callable

import trio

from chronik_repl.errors import CorruptLog
from chronik_repl.positions import Checksum, Position
from chronik_repl.wal.frame import HEAD, LENGTH_MIN, MAGIC, VERSION, BadFrame, decode, frame_size
from chronik_repl.wal.log import Log

PIECE_BYTES = 1024 * 1024
FILE_BYTES = 4 * 1024 * 1024  # read at once: a hop to a thread and back is little beside it


class Files:
    """The log's files as one follower needs them: each piece is read while the one before it is sent."""

    def __init__(self, log: Log, start: Callable[..., object]) -> None:
        """`start`: runs a task beside the session."""
        self._log = log
        self._start = start
        self._buffers: list[memoryview] = []  # free ones: fresh memory costs more than reading
        self._sent: memoryview | None = None  # what the last piece stands in
        self._ahead_at = Position(-1)
        self._ahead: tuple[memoryview, int] | None = None  # what was read from there, and how much of it is frames
        self._ahead_there: trio.Event | None = None  # once it is

    async def next(self, at: Position) -> memoryview:
        """Whole frames from `at` on, below the durable end; empty if there are none. Good until the next call."""
        if self._sent is not None:
            self._buffers.append(self._sent)
            self._sent = None
        if self._ahead_there is not None:
            await self._ahead_there.wait()
            self._ahead_there = None
        if self._ahead is not None and self._ahead_at != at:
            self._buffers.append(self._ahead[0])
            self._ahead = None
        if self._ahead is None:
            self._ahead = await self._read(at)
        buffer, size = self._ahead
        self._ahead, self._sent = None, buffer
        after = Position(at + size)
        if size and after < self._log.durable.value:
            self._ahead_at, self._ahead_there = after, trio.Event()
            self._start(self._read_ahead, after, self._ahead_there, ends_all=False)
        return buffer[:size]

    async def _read_ahead(self, at: Position, there: trio.Event) -> None:
        self._ahead = await self._read(at)
        there.set()

    async def _read(self, at: Position) -> tuple[memoryview, int]:
        log = self._log
        buffer = self._buffers.pop() if self._buffers else memoryview(bytearray(FILE_BYTES))
        while at < log.durable.value:
            size = await log.read_into(at, buffer)
            whole, needed = whole_frames(buffer[:size], log.settings.frame_bytes_max)
            if whole:
                return buffer, whole
            if needed <= len(buffer):
                raise CorruptLog(f"the log cannot be read at {at}: a frame is cut off")
            buffer = memoryview(bytearray(needed))
        return buffer, 0


def whole_frames(data: memoryview, frame_bytes_max: int) -> tuple[int, int]:
    """(bytes of whole frames at the start, bytes that the first one needs)."""
    at, length = 0, len(data)
    unpack = HEAD.unpack_from
    while length - at >= HEAD.size:
        magic, version, rest = unpack(data, at)
        size = HEAD.size + rest
        if magic != MAGIC or version != VERSION or rest < LENGTH_MIN or size > frame_bytes_max:
            frame_size(data, at, frame_bytes_max)  # says what is wrong
        if length - at < size:
            return at, 0 if at else size
        at += size
    return at, 0


async def check_frames(log: Log, at: Position, end: Position, chain: Checksum) -> None:
    """Are our own frames there good, as far as they stand before `end`? Raises CorruptLog."""
    frame_bytes_max = log.settings.frame_bytes_max
    while at < end:
        data = await log.read(at, min(PIECE_BYTES + frame_bytes_max, end - at))
        with memoryview(data) as view:
            done = 0
            try:
                while (frame := decode(view, done, at, chain, frame_bytes_max)) is not None:
                    done, at, chain = done + frame.size, Position(at + frame.size), frame.checksum
            except BadFrame as error:
                raise CorruptLog(f"this leader's own log is damaged at {at}: {error}", start=at) from error
        if not done:
            if end - at < frame_bytes_max and end < log.durable.value:
                return  # `end` stands inside a frame
            raise CorruptLog(f"this leader's own log is damaged at {at}: a frame is cut off", start=at)
