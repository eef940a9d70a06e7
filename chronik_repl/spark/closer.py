"""A second look at one segment whose copies differ. Runs in the tasks; what comes back is bounded, whatever the damage.

The copies are given in groups of equal bytes, so each distinct content is read once more, from the first block that
differs. Which of them is right: one without fault, of the latest epoch, that most copies have. The others are
compared with it, frame by frame (compare.py). Bytes that have become equal in the meantime are no difference: a node
that runs may have been caught in the middle of a write.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from itertools import islice

import msgspec

from chronik_repl.spark.compare import Difference, Kind, Rechained, find_differences, ranges_of
from chronik_repl.spark.layout import Piece, pieces, wrong_in_batch
from chronik_repl.spark.storage import Bytes, open_local
from chronik_repl.wal.frame import OVERHEAD
from chronik_repl.wal.segment import FRAMES_AT

DIFFERENCES_MAX = 1000  # a copy and segment: beyond that they are counted, not listed
READ_AHEAD_BYTES = 1 << 20


class Group(msgspec.Struct, frozen=True):
    """Copies whose bytes of this segment are the same, and the file of one of them."""

    copies: tuple[str, ...]
    path: str
    upto: int  # how far they should hold it
    sealed: bool
    durable_end: int


class CloserTask(msgspec.Struct, frozen=True):
    start: int  # of the segment
    end: int
    groups: tuple[Group, ...]


class Closer(msgspec.Struct):
    start: int
    differences: list[Difference] = []
    more: int = 0  # differences beyond those that are listed
    rechained: dict[str, Rechained] = {}  # by copy: what only follows from an earlier difference
    reference: tuple[str, ...] = ()  # the copies that were taken to be right
    gone: bool = False  # a file was removed meanwhile


def look_closer_local(task: CloserTask) -> Closer:
    with ExitStack() as stack:
        files: list[Bytes] = []
        for group in task.groups:
            file = open_local(group.path)
            if file is None:
                return Closer(task.start, gone=True)
            stack.callback(file.close)
            files.append(file)
        return look_closer(task, files)


class _Source:
    """A group's bytes by position, read ahead so that frame after frame costs little."""

    def __init__(self, task: CloserTask, group: Group, file: Bytes) -> None:
        self.group, self._file, self._start = group, file, task.start
        self.file_end = task.start + max(0, file.size - FRAMES_AT)
        self.held_end = self.file_end if group.sealed else min(self.file_end, group.upto)
        self._window, self._window_at = b"", task.start

    def read(self, position: int, size: int) -> bytes:
        size = min(size, self.file_end - position)
        if size <= 0:
            return b""
        at = position - self._window_at
        if at < 0 or at + size > len(self._window):
            self._window = self._file.read(FRAMES_AT + position - self._start, max(size, READ_AHEAD_BYTES))
            self._window_at, at = position, 0
        return self._window[at : at + size]

    def whole_end(self, upto: int) -> int:
        """Where the last frame ends that ends by `upto`: a cut may fall into the middle of one, which is then not
        compared.
        """
        last = next(iter(deque(pieces(self.read, self._start, upto), maxlen=1)), None)
        if last is None or last.key is None or last.place + last.size <= upto:
            return upto
        return last.place


def look_closer(task: CloserTask, files: Iterable[Bytes]) -> Closer:
    sources = [_Source(task, group, file) for group, file in zip(task.groups, files, strict=True)]
    end = min(s.group.upto for s in sources)
    first = _first_difference(sources, task.start, end)
    result = Closer(task.start, differences=[], rechained={})
    right = max(sources, key=lambda s: _standing(s, task.start, first, s.group.upto))
    result.reference = right.group.copies
    faults = list(islice(_faults(right, task.start), DIFFERENCES_MAX + 1))
    for copy in right.group.copies:
        _take(result, copy, faults)
    for source in sources:
        if source is right:
            continue
        upto = right.whole_end(min(source.group.upto, right.group.upto))
        found = list(_between(source, right, task.start, upto))
        if not found:
            found = list(_unnamed(source, right, task.start, upto))
        for copy in source.group.copies:
            _take(result, copy, found)
    return result


def _take(result: Closer, copy: str, found: Iterable[Difference | Rechained]) -> None:
    taken = 0
    for difference in found:
        if isinstance(difference, Rechained):
            result.rechained[copy] = difference
        elif taken < DIFFERENCES_MAX:
            result.differences.append(msgspec.structs.replace(difference, copy=copy))
            taken += 1
        else:
            result.more += 1


def _between(source: _Source, right: _Source, start: int, upto: int) -> Iterator[Difference | Rechained]:
    """Every difference of `source` from `right` below `upto`."""

    def holds(position: int, checksum: int) -> bool:
        if not start <= position < right.held_end:
            return False
        piece = next(pieces(right.read, position, position + 1), None)
        return piece is not None and piece.checksum == checksum and piece.position == position

    reference = (p for p in pieces(right.read, start, upto) if p.place < upto)
    limit = max(upto, source.held_end) if source.group.sealed else upto
    theirs = _with_shifted_tail(source, start, upto)
    for difference in find_differences("", reference, theirs, upto, min(source.held_end, upto), limit, holds):
        if isinstance(difference, Difference) and difference.kind == "missing":
            difference = msgspec.structs.replace(difference, detail=_why_missing(source, difference))
        yield difference


def _unnamed(source: _Source, right: _Source, start: int, upto: int) -> Iterator[Difference]:
    """No frame differs: then no byte may, and the first reading caught a write in the middle."""
    first = _first_difference([source, right], start, upto)
    if first < upto:
        yield Difference(first, upto, "", "changed", "the bytes differ, though every frame in them looks the same")


def _with_shifted_tail(source: _Source, start: int, upto: int) -> Iterator[Piece]:
    """The copy's pieces below `upto`; and, if its bytes are shifted, the frames that were pushed beyond it."""
    place = start
    shifted = False
    for piece in pieces(source.read, start, max(upto, source.held_end) if source.group.sealed else upto):
        if piece.key is None and piece.place >= upto and (piece.zeros or not source.group.sealed):
            return
        yield piece
        place = piece.place + piece.size
        shifted = piece.key is not None and piece.position != piece.place
    if shifted and not source.group.sealed:
        for piece in pieces(source.read, place, place + READ_AHEAD_BYTES):
            if piece.key is None or piece.position >= upto:
                return
            yield piece


def _why_missing(source: _Source, difference: Difference) -> str:
    if difference.detail == "":
        return ""
    if source.group.sealed:
        return "the file ends before the segment does"
    if difference.start < source.group.durable_end:
        return "below the copy's own durable mark"
    return difference.detail


def _first_difference(sources: list[_Source], start: int, end: int) -> int:
    """The first position where two of the sources differ."""
    at = start
    while at < end:
        size = min(READ_AHEAD_BYTES, end - at)
        windows = [s.read(at, size) for s in sources]
        if any(w != windows[0] for w in windows[1:]):
            shortest = min(len(w) for w in windows)
            low, high = 0, shortest
            while low < high:  # the length of the common beginning
                middle = (low + high + 1) // 2
                if all(w[:middle] == windows[0][:middle] for w in windows[1:]):
                    low = middle
                else:
                    high = middle - 1
            return at + low
        at += size
    return end


def _standing(source: _Source, start: int, first: int, upto: int) -> tuple[bool, int, int, int]:
    """How much a content may be believed: without fault, the epoch where they part, how many have it, its length."""
    epoch, clean = 0, True
    for piece, fault in _checked(source, start, upto):
        clean = clean and not fault
        if piece.key is not None and piece.place + piece.size > first and not epoch:
            epoch = piece.epoch
        if not clean and epoch:
            break
    return clean and source.held_end >= upto, epoch, len(source.group.copies), source.held_end


def _checked(source: _Source, start: int, upto: int) -> Iterator[tuple[Piece, str]]:
    """Each piece and what is wrong with it by itself: the second opinion on what the strict walk said."""
    before: Piece | None = None
    offsets: dict[tuple[bytes, int], int] = {}
    for piece in pieces(source.read, start, upto):
        if piece.key is not None and piece.place + piece.size > upto and not source.group.sealed:
            return  # the comparison ends inside this one
        fault = ""
        if piece.key is None:
            fault = "zeros" if piece.zeros else "no good frame stands here"
            offsets.clear()  # what should follow is not known after that
        elif piece.position != piece.place:
            fault = f"the frame of position {piece.position}"
        elif before is not None and before.key is not None and piece.previous != before.checksum:
            fault = "chained to another frame than the one before it"
        elif before is not None and (
            piece.epoch < before.epoch or (piece.time_ms < before.time_ms and before.key is not None)
        ):
            fault = f"epoch {piece.epoch} and time {piece.time_ms} after epoch {before.epoch} and time {before.time_ms}"
        elif piece.kind == 0:
            expected = offsets.get((piece.topic, piece.partition), piece.base_offset)
            if piece.base_offset != expected:
                fault = f"offset {piece.base_offset} where {expected} should follow"
            else:
                data = memoryview(source.read(piece.place, piece.size))[OVERHEAD + len(piece.topic) :]
                fault = wrong_in_batch(data, piece.base_offset, piece.record_count, piece.epoch)
            offsets[piece.topic, piece.partition] = piece.base_offset + piece.record_count
        yield piece, fault
        before = piece


def _faults(source: _Source, start: int) -> Iterator[Difference]:
    """What is wrong with the content that was believed most: nothing, unless no copy is good."""
    place = start
    for piece, fault in _checked(source, start, source.group.upto):
        place = piece.place + piece.size
        if fault:
            ranges, more = ranges_of([piece])
            kind: Kind = "damaged" if piece.key is None else "wrong log"
            yield Difference(
                piece.place, place, "", kind, fault, int(piece.key is not None), piece.record_count, ranges, more
            )
    if place < source.whole_end(source.group.upto):
        yield Difference(place, source.group.upto, "", "missing", "the bytes end here")
