"""Which of a segment's bytes count: pure functions over bytes, without a disk.

`scan` walks frames as long as each is whole, unchanged, in its place and in the chain. `judge` then says what the first
bytes that are no frame mean: at or above the durable mark they are a torn tail and are cut; below it they are damage
and are never cut. Zeros are no frame.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from chronik_repl.positions import Checksum, Position
from chronik_repl.wal.frame import HEAD, BadFrame, Frame, decode, frame_size

Batches = Callable[[memoryview, int, Position, Checksum], tuple[int, Position, Checksum]]


class Scanned(NamedTuple):
    end: Position  # of the last good frame
    chain: Checksum  # the checksum there
    why: str  # why the next bytes are no frame; "" if they merely ended
    want: int  # how many bytes the frame that was cut off has in all; 0 if that is not known


def scan(
    view: memoryview,
    position: Position,
    chain: Checksum | None,
    frame_bytes_max: int,
    each: Callable[[Frame], object],
    batches: Batches | None = None,
) -> Scanned:
    """Walk the frames of `view`, the first of which stands at `position` after a frame with checksum `chain`
    (None: any).

    `each` may raise BadFrame too, for a frame that is whole and cannot stand there. `batches` may take as many as it
    likes before each of them, and returns where it stopped.
    """
    at = 0
    start = position
    last = Checksum(0) if chain is None else chain
    try:
        while True:
            if batches is not None and chain is not None:
                at, position, chain = batches(view, at, position, chain)
                last = chain
            frame = decode(view, at, position, chain, frame_bytes_max)
            if frame is None:
                break
            each(frame)
            at += frame.size
            position = Position(start + at)
            chain = last = frame.checksum
    except BadFrame as error:
        return Scanned(position, last, str(error), 0)
    want = frame_size(view, at, frame_bytes_max) if len(view) - at >= HEAD.size else 0
    return Scanned(position, last, "", want)


class Walk:
    """The same over bytes that come in windows: what one left over stands at the beginning of the next."""

    def __init__(
        self,
        position: Position,
        chain: Checksum,
        frame_bytes_max: int,
        each: Callable[[Frame], object],
        batches: Batches | None = None,
    ) -> None:
        self.end = position
        self.chain = chain
        self.why = ""
        self.want = 0  # how many bytes the frame that was cut off has in all, as far as that is known
        self._frame_bytes_max = frame_bytes_max
        self._each = each
        self._batches = batches

    def take(self, window: memoryview) -> int:
        """All whole frames at its start; returns how many bytes they are. No more are taken once `why` says why not,
        and nothing of `window` is kept."""
        if self.why:
            return 0
        start = self.end
        self.end, self.chain, self.why, self.want = scan(
            window, start, self.chain, self._frame_bytes_max, self._each, self._batches
        )
        return self.end - start


class Torn(NamedTuple):
    """The last group was not finished: everything from `end` on is cut."""

    end: Position


class Damaged(NamedTuple):
    """Bytes that were durable are not there any more."""

    start: Position
    end: Position


def judge(end: Position, durable_end: Position) -> Torn | Damaged:
    """The good frames end at `end`, the mark says `durable_end`."""
    return Torn(end) if end >= durable_end else Damaged(end, durable_end)
