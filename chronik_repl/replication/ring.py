"""One follower's ring: the newest frames of the log in memory, so that a follower that keeps up never costs a read.

The append path pushes, one session's sender takes. Fixed slots; each frame has a sequence number, and slot = sequence
modulo slots. The two sides share no counter: the producer moves `_head` and `_oldest`, the consumer moves `_next`. When
the ring is full, by frames or by bytes, the producer drops the oldest, whether or not it was taken; so a push never
waits and never asks. A consumer whose next sequence is no longer there has been lapped: `take` says so, and it reads on
from the log's files (*catch-up*) until `join` finds its position in the window again. Nothing is lost by that but time.

A frame that was taken is let go at once: a follower that keeps up holds next to nothing.
"""

from __future__ import annotations

from typing import NamedTuple

from chronik_repl.positions import Position
from chronik_repl.wal.disk import Buffer


class Run(NamedTuple):
    """Consecutive frames, as they go on the wire."""

    position: Position
    end: Position
    frames: list[Buffer]
    records: int


class Lapped:
    """The consumer was too slow: what it wants is only in the log's files now."""


LAPPED = Lapped()
_Slot = tuple[Position, Buffer, int]


class Ring:
    def __init__(self, frames_max: int, bytes_max: int, end: Position) -> None:
        """`end`: where the log ends now, and the next push will stand."""
        assert frames_max > 0
        assert bytes_max > 0
        self._slots: list[_Slot | None] = [None] * frames_max
        self._frames_max = frames_max
        self._bytes_max = bytes_max
        self._head = 0  # the producer's: the sequence of the next push
        self._oldest = 0  # the producer's: the lowest sequence it has not dropped
        self._held_bytes = 0
        self._end = end  # the producer's: of the last frame pushed
        self._next = 0  # the consumer's
        self._attached = False  # the consumer's: streaming from here, not catching up
        self.laps = 0  # times that a streaming consumer was overtaken
        self.dropped_frames = 0  # dropped before they were taken

    @property
    def frames(self) -> int:
        """Held and not yet taken."""
        return self._head - max(self._oldest, self._next)

    @property
    def held_bytes(self) -> int:
        return self._held_bytes

    @property
    def attached(self) -> bool:
        return self._attached

    def push(self, position: Position, frame: Buffer, records: int) -> None:
        """The producer's whole part. Never waits, never fails; a frame larger than the ring passes it by."""
        head = self._head
        size = len(frame)
        self._end = Position(position + size)
        if head - self._oldest >= self._frames_max or self._held_bytes + size > self._bytes_max:
            self._drop(size)
            if size > self._bytes_max:
                self._head = self._oldest = head + 1  # a gap in the window: whoever stood before it is lapped
                self.dropped_frames += 1
                return
        self._slots[head % self._frames_max] = (position, frame, records)
        self._held_bytes += size
        self._head = head + 1

    def _drop(self, size: int) -> None:
        slots, frames_max = self._slots, self._frames_max
        while self._oldest < self._head and (
            self._head - self._oldest >= frames_max or self._held_bytes + size > self._bytes_max
        ):
            at = self._oldest % frames_max
            slot = slots[at]
            if slot is not None:  # not taken yet
                self._held_bytes -= len(slot[1])
                self.dropped_frames += 1
                slots[at] = None
            self._oldest += 1

    def join(self, position: Position) -> bool:
        """Stream from `position` on. False when no frame of the window starts there and it is not the window's end:
        go on reading the files."""
        low, high = max(self._oldest, self._next), self._head
        self._attached = False
        if position == self._end:
            low = high
        while low < high:
            middle = (low + high) // 2
            if self._at(middle)[0] < position:
                low = middle + 1
            else:
                high = middle
        if position != self._end and (low == self._head or self._at(low)[0] != position):
            return False
        self._let_go(low)
        self._attached = True
        return True

    def _at(self, sequence: int) -> _Slot:
        slot = self._slots[sequence % self._frames_max]
        assert slot is not None
        return slot

    def take(self, bytes_max: int) -> Run | Lapped | None:
        """The next frames, at least one, for one send. None: nothing new. LAPPED: go to catch-up."""
        assert self._attached
        first, head = self._next, self._head
        if first < self._oldest:
            self._attached = False
            self.laps += 1
            return LAPPED
        if first == head:
            return None
        slots, frames_max = self._slots, self._frames_max
        pieces: list[Buffer] = []
        size = records = 0
        at = first
        start = self._at(first)[0]
        while at < head:
            slot = slots[at % frames_max]
            assert slot is not None
            _, frame, records_in = slot
            if size + len(frame) > bytes_max and pieces:
                break
            slots[at % frames_max] = None
            pieces.append(frame)
            size += len(frame)
            records += records_in
            at += 1
        self._held_bytes -= size
        self._next = at
        return Run(start, Position(start + size), pieces, records)

    def detach(self) -> None:
        """The session is over. What is held stays within its bounds until the next one joins."""
        self._attached = False

    def _let_go(self, upto: int) -> None:
        """Forget what stands before the sequence `upto`: it was taken, or is known to be held elsewhere."""
        slots, frames_max = self._slots, self._frames_max
        for at in range(max(self._oldest, self._next), upto):
            self._held_bytes -= len(self._at(at)[1])
            slots[at % frames_max] = None
        self._next = upto
