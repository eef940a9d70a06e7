"""Runs of frames from the log's files on their way to a follower: cut at whole frames, checked where asked."""

from __future__ import annotations

from chronik_repl.errors import CorruptLog
from chronik_repl.positions import Checksum, Position
from chronik_repl.wal.frame import HEAD, BadFrame, decode, frame_size
from chronik_repl.wal.log import Log

PIECE_BYTES = 1024 * 1024


def whole_frames(data: bytes, frame_bytes_max: int) -> tuple[int, int]:
    """(bytes of whole frames at the start, bytes that the first one needs)."""
    at = needed = 0
    while len(data) - at >= HEAD.size:
        size = frame_size(data, at, frame_bytes_max)
        needed = needed or size
        if len(data) - at < size:
            break
        at += size
    return at, needed


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
