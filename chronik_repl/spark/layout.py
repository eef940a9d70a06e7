"""The log's bytes, read a second time. docs/protocol.md defines them; nothing of the log's own reader is used here.

Shared with the log are only the two layouts, `wal/frame.py` and `wal/segment.py`. What is here is a reader of its own,
so that a mistake in the log's reader cannot hide itself in the parity check.

Two ways to read a run of frames:

- `Walk` is strict and fast: it checks every frame's length, checksum, place, chain, epoch, time, offset and the head
  of its record batch, keeps a tally a partition, and stops at the first thing that is wrong, saying what and where.
- `pieces` is tolerant and slow, for bytes that are known to differ: it yields every good frame wherever it stands,
  and the stretches between them that are none.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec
from crc32c import crc32c

from chronik_repl.spark.index import ENTRY, IndexFile, Rows
from chronik_repl.wal.frame import FIELDS, HEAD, KIND_MAX, MAGIC, OVERHEAD, TOPIC_BYTES_MAX, VERSION, Kind

FRAME_BYTES_MAX = 1 << 30  # no frame is larger whatever the nodes' own limit was: a length beyond it is damage
FRAME_START = struct.pack(">HH", MAGIC, VERSION)
BATCH_HEAD = struct.Struct(">qiibIhi")  # base offset, length, leader epoch, magic, CRC, attributes, last offset delta
BATCH_MAX_TIME = struct.Struct(">q")
BATCH_MAX_TIME_AT = 35
BATCH_HEAD_BYTES = 61  # up to the first record
BATCH_LENGTH_AT = 12  # the batch's length counts what follows it
WINDOW_BYTES = 8 * 1024 * 1024
TRIES_MAX = 1000  # frames in a stretch of bad bytes that belong elsewhere: no more are checked

_HEADS: dict[int, struct.Struct] = {}  # topic length → the whole frame head, so that one unpack reads it


def head_of(topic_bytes: int) -> struct.Struct:
    """magic, version, length, topic length, topic, the eight fields, checksum: for topics of this length."""
    layout = _HEADS.get(topic_bytes)
    if layout is None:
        layout = struct.Struct(HEAD.format + "H" + f"{topic_bytes}s" + FIELDS.format.lstrip(">") + "I")
        _HEADS[topic_bytes] = layout
    return layout


class Tally(msgspec.Struct, array_like=True):
    """What stands of one partition in a run of frames. Offsets: first, and the one after the last."""

    topic: str
    partition: int
    first: int
    next: int
    records: int
    bytes: int


class Walked(msgspec.Struct, array_like=True):
    """What a strict walk saw in one run of frames."""

    start: int
    end: int  # how far it came: the run's end if nothing was wrong
    frames: int = 0
    records: int = 0
    first_previous: int = 0
    last_checksum: int = 0
    first_epoch: int = 0
    last_epoch: int = 0
    first_time_ms: int = 0
    last_time_ms: int = 0
    log_start: int = 0  # the highest that a frame of this run declares
    tallies: list[Tally] = []
    wrong: str = ""  # what stands at `end`, if it is not the next frame


class Walk:
    """Strict. Feed it the bytes of a segment in order; each `run` ends at a cut that the caller chose."""

    def __init__(
        self,
        start: int,
        previous: int | None,
        index: IndexFile | None = None,
        open_end: bool = False,
        segment_start: int | None = None,
    ) -> None:
        self.position = start
        self.open_end = open_end  # a frame may reach beyond the end: it is then simply not walked
        self.previous = previous  # None: unknown, the first frame's own word is taken
        self.wrong = ""
        self.segment_start = start if segment_start is None else segment_start
        self.index_rows: Rows | None = None if index is None else {}  # what an index of these frames would say
        self.landmarks_seen: set[int] = set()
        self._landmarks = dict(index.landmarks) if index else {}
        self._epoch = 0
        self._time_ms = -(1 << 62)
        self._open(start)

    def _open(self, start: int) -> None:
        self._start = start
        self._frames = 0
        self._first: tuple[int, int, int] = (self.previous or 0, self._epoch, 0)
        self._log_start = 0
        self._partitions: dict[tuple[bytes, int], list[int]] = {}

    def close_run(self) -> Walked:
        """The tally since the last call; the next run starts here."""
        tallies = [Tally(t.decode("ascii", "replace"), p, *numbers) for (t, p), numbers in self._partitions.items()]
        run = Walked(
            self._start,
            self.position,
            self._frames,
            sum(t.records for t in tallies),
            self._first[0],
            self.previous or 0,
            self._first[1],
            self._epoch,
            self._first[2],
            self._time_ms if self._frames else 0,
            self._log_start,
            tallies,
            self.wrong,
        )
        self._open(self.position)
        return run

    def feed(self, view: memoryview, end: int) -> int:
        """Walk the whole frames in `view`, which starts at this walk's position, none of them beyond position `end`.

        Returns the bytes used. With `wrong` set it will use no more.
        """
        at, size_all = 0, len(view)
        position, previous, epoch_before, time_before = self.position, self.previous, self._epoch, self._time_ms
        partitions, rows, landmarks = self._partitions, self.index_rows, self._landmarks
        while not self.wrong and size_all - at >= OVERHEAD:
            topic_bytes = (view[at + 8] << 8) | view[at + 9]
            if topic_bytes > TOPIC_BYTES_MAX:
                self.wrong = self._not_a_frame(view, at)
                break
            layout = _HEADS.get(topic_bytes) or head_of(topic_bytes)
            data_at = at + layout.size
            if data_at > size_all:
                break
            (
                magic,
                version,
                length,
                _,
                topic,
                partition,
                base,
                count,
                time_ms,
                kind,
                epoch,
                stands_at,
                chain,
                checksum,
            ) = layout.unpack_from(view, at)
            next_at = at + 8 + length
            if magic != MAGIC or version != VERSION or next_at < data_at:
                self.wrong = self._not_a_frame(view, at)
                break
            if position + 8 + length > end:
                if not self.open_end:
                    self.wrong = f"a frame of {8 + length} bytes does not end by {end}"
                break
            if next_at > size_all:
                break
            data = view[data_at:next_at]
            if crc32c(data, crc32c(view[at : data_at - 4])) != checksum:
                self.wrong = "the frame's checksum does not match"
            elif stands_at != position:
                self.wrong = f"the frame of position {stands_at} stands here"
            elif chain != previous and previous is not None:
                self.wrong = "the frame follows another one than the one before it"
            elif epoch < epoch_before:
                self.wrong = f"epoch {epoch} follows epoch {epoch_before}"
            elif time_ms < time_before:
                self.wrong = f"the log's time goes back from {time_before} to {time_ms}"
            elif kind == 0:
                key = (topic, partition)
                seen = partitions.get(key)
                if seen is None:
                    partitions[key] = [base, base + count, count, next_at - at]
                elif base == seen[1]:
                    seen[1] += count
                    seen[2] += count
                    seen[3] += next_at - at
                else:
                    self.wrong = (
                        f"offset {base} of {topic.decode('ascii', 'replace')}/{partition} follows {seen[1] - 1}"
                    )
                if not self.wrong:
                    self.wrong = wrong_in_batch(data, base, count, epoch)
                if rows is not None and not self.wrong:
                    (newest,) = BATCH_MAX_TIME.unpack_from(data, BATCH_MAX_TIME_AT)
                    row = ENTRY.pack(base, newest, position - self.segment_start, 8 + length, count, 0)
                    if key in rows:
                        rows[key] += row
                    else:
                        rows[key] = bytearray(row)
            elif kind > KIND_MAX:
                self.wrong = f"frame kind {kind}: a newer version wrote it"
            elif kind == Kind.STATE_CHANGE:
                self._log_start = max(self._log_start, log_start_in(data))
            if self.wrong:
                break
            if position in landmarks and landmarks[position] == chain:
                self.landmarks_seen.add(position)
            if self._frames == 0:
                self._first = (chain, epoch, time_ms)
            self._frames += 1
            at, position = next_at, position + 8 + length
            previous, epoch_before, time_before = checksum, epoch, time_ms
        self.position, self.previous, self._epoch, self._time_ms = position, previous, epoch_before, time_before
        return at

    def _not_a_frame(self, view: memoryview, at: int) -> str:
        head = bytes(view[at : at + OVERHEAD])
        return "zeros, where a frame should stand" if not any(head) else "no frame"


def wrong_in_batch(data: memoryview, base: int, count: int, epoch: int) -> str:
    """Does the batch say of itself what its frame says of it? '' if so. Records are not looked at."""
    if len(data) < BATCH_HEAD_BYTES:
        return "the record batch is too short"
    batch_base, batch_length, leader_epoch, magic, _, _, last_delta = BATCH_HEAD.unpack_from(data)
    if magic != 2:
        return f"a record batch of version {magic}"
    if batch_length + BATCH_LENGTH_AT != len(data):
        return "the record batch is not as long as it says"
    if batch_base != base:
        return f"the frame's offset is {base}, its record batch's {batch_base}"
    if last_delta + 1 != count:
        return f"the frame counts {count} records, its record batch {last_delta + 1}"
    if leader_epoch != epoch:
        return f"the frame's epoch is {epoch}, its record batch's {leader_epoch}"
    return ""


def log_start_in(data: bytes | memoryview) -> int:
    """The log start that a state change declares; 0 for any other change."""
    raw = bytes(data)
    if b"log-start" not in raw:
        return 0
    try:
        change = msgspec.msgpack.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return 0
    if isinstance(change, dict) and change.get("type") == "log-start" and isinstance(change.get("start"), int):
        return int(change["start"])
    return 0


class Piece(NamedTuple):
    """A good frame (key is not None), or a stretch of bytes that is none."""

    place: int  # where it stands
    size: int
    key: int | None  # what the frame says, without its place and its chain: equal keys are the same frame
    position: int = 0  # where it says that it stands
    previous: int = 0
    checksum: int = 0
    epoch: int = 0
    topic: bytes = b""
    partition: int = 0
    base_offset: int = 0
    record_count: int = 0
    time_ms: int = 0
    kind: int = 0
    zeros: bool = False


Read = Callable[[int, int], bytes]  # (place, size) → the bytes there, fewer at the end of the file


def frame_at(view: memoryview, at: int, place: int) -> Piece | None:
    """The frame whose first byte is view[at], if all of it is there and its checksum is right; wherever it belongs."""
    if len(view) - at < OVERHEAD or view[at : at + 4] != FRAME_START:
        return None
    topic_bytes = (view[at + 8] << 8) | view[at + 9]
    if topic_bytes > TOPIC_BYTES_MAX:
        return None
    layout = head_of(topic_bytes)
    data_at = at + layout.size
    if data_at > len(view):
        return None
    length, _, topic, *fields, checksum = layout.unpack_from(view, at)[2:]
    end = at + 8 + length
    if end < data_at or end > len(view):
        return None
    data = view[data_at:end]
    if crc32c(data, crc32c(view[at : data_at - 4])) != checksum:
        return None
    # All but position (8 bytes), previous and checksum (4 each), which stand last in the head.
    key = (crc32c(view[at : data_at - 16]) << 32) | crc32c(data)
    partition, base, count, time_ms, kind, epoch, position, previous = fields
    return Piece(
        place, 8 + length, key, position, previous, checksum, epoch, topic, partition, base, count, time_ms, kind
    )


def frame_bytes_at(view: memoryview, at: int) -> int:
    """How long the frame at view[at] says that it is; 0 if there is none."""
    if len(view) - at < HEAD.size:
        return 0
    magic, version, length = HEAD.unpack_from(view, at)
    size: int = HEAD.size + length
    return size if magic == MAGIC and version == VERSION and OVERHEAD <= size <= FRAME_BYTES_MAX else 0


def pieces(read: Read, start: int, end: int) -> Iterator[Piece]:
    """All that stands in [start, end), in order and without a gap. The last piece may reach beyond `end`."""
    place = start
    while place < end:
        piece = _next_piece(read, place, end)
        if piece is None:
            return
        yield piece
        place += piece.size


def _next_piece(read: Read, place: int, end: int) -> Piece | None:
    head = memoryview(read(place, OVERHEAD))
    if not head:
        return None
    size = frame_bytes_at(head, 0)
    if size:
        frame = frame_at(memoryview(read(place, size)), 0, place)
        if frame is not None:
            return frame
        # Its length may still be right: then the next frame stands after it, and this one alone is bad.
        if _frame_stands(read, place + size) or place + size == end:
            return Piece(place, size, None)
    return _stretch(read, place, end)


def _frame_stands(read: Read, place: int) -> bool:
    size = frame_bytes_at(memoryview(read(place, HEAD.size)), 0)
    return bool(size) and frame_at(memoryview(read(place, size)), 0, place) is not None


def _stretch(read: Read, place: int, end: int) -> Piece:
    """Bytes that are no frame, up to the next good frame, else to the end.

    A frame inside a record's value could stand in the way: one that says itself that it belongs where it stands is
    believed first, and any other only if there is none.
    """
    fallback, tries = 0, 0
    at, zeros = place, True
    while at < end:
        window = read(at, min(WINDOW_BYTES, end - at))
        if not window:
            break
        zeros = zeros and window.count(0) == len(window)
        found = window.find(FRAME_START, 1 if at == place else 0)
        while found >= 0:
            here = at + found
            belongs = _claimed_position(read, here) == here
            if belongs or (not fallback and tries < TRIES_MAX):
                tries += not belongs
                size = frame_bytes_at(memoryview(read(here, HEAD.size)), 0)
                good = size and frame_at(memoryview(read(here, size)), 0, here) is not None
                if good and belongs:
                    return Piece(place, here - place, None, zeros=_all_zero(read, place, here))
                if good:
                    fallback = here
            found = window.find(FRAME_START, found + 1)
        if len(window) < 4:
            at += len(window)
            break
        at += len(window) - 3 if at + len(window) < end else len(window)
    if fallback:
        return Piece(place, fallback - place, None, zeros=_all_zero(read, place, fallback))
    return Piece(place, at - place, None, zeros=zeros)


def _claimed_position(read: Read, place: int) -> int:
    """Where the frame at `place` says that it stands, whether or not it is one; -1 if its head is not all there."""
    head = memoryview(read(place, OVERHEAD + TOPIC_BYTES_MAX))
    if len(head) < OVERHEAD:
        return -1
    layout = head_of(min((head[8] << 8) | head[9], TOPIC_BYTES_MAX))
    return int(layout.unpack_from(head, 0)[11]) if len(head) >= layout.size else -1


def _all_zero(read: Read, start: int, end: int) -> bool:
    while start < end:
        window = read(start, min(WINDOW_BYTES, end - start))
        if not window or window.count(0) != len(window):
            return False
        start += len(window)
    return True
