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
) -> Scanned:
    """Walk the frames of `view`, the first of which stands at `position` after a frame with checksum `chain`
    (None: any).

    `each` may raise BadFrame too, for a frame that is whole and cannot stand there.
    """
    at = 0
    start = position
    last = Checksum(0) if chain is None else chain
    try:
        while True:
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
