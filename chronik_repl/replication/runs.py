"""Runs of frames on their way to a follower: cut at whole frames, checked where asked, remembered until acked."""

from __future__ import annotations

from collections import deque

from chronik_repl.errors import CorruptLog
from chronik_repl.positions import Checksum, Position
from chronik_repl.wal.frame import CHECKSUM, FIELDS, HEAD, TOPIC_LEN, BadFrame, decode, frame_size
from chronik_repl.wal.log import Log

PIECE_BYTES = 1024 * 1024
SENT_BYTES_KEPT = 8 * 1024 * 1024  # of runs that are not acked yet


class Sent:
    """Runs that went out and are not acked yet, so that an ack's chain value is found without a read."""

    def __init__(self) -> None:
        self._runs: deque[tuple[Position, bytes]] = deque()
        self._bytes = 0
        self._at = 0  # in the first run: everything before was acked
        self._last: tuple[Position, Checksum] | None = None

    def add(self, position: Position, data: bytes) -> None:
        self._runs.append((position, data))
        self._bytes += len(data)
        while self._bytes > SENT_BYTES_KEPT and len(self._runs) > 1:
            self._drop()

    def _drop(self) -> None:
        _, data = self._runs.popleft()
        self._bytes -= len(data)
        self._at = 0

    def checksum_at(self, position: Position) -> Checksum | None:
        """Of the frame that ends there; None when it is not here."""
        if self._last is not None and self._last[0] == position:
            return self._last[1]
        while self._runs and self._runs[0][0] + len(self._runs[0][1]) < position:
            self._drop()
        if not self._runs or self._runs[0][0] >= position:
            return None
        start, data = self._runs[0]
        target, at = position - start, self._at
        if at >= target:
            at = 0
        while at < target:
            size = HEAD.size + HEAD.unpack_from(data, at)[2]
            if at + size == target:
                checksum = _checksum_of(data, at)
                self._at = target
                self._last = (position, checksum)
                return checksum
            at += size
        return None


def _checksum_of(data: bytes, at: int) -> Checksum:
    (topic_len,) = TOPIC_LEN.unpack_from(data, at + HEAD.size)
    (checksum,) = CHECKSUM.unpack_from(data, at + HEAD.size + TOPIC_LEN.size + topic_len + FIELDS.size)
    return Checksum(checksum)


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
