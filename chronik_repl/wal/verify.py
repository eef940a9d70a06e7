"""Is this log what was written? Every frame, the chain, the segments' continuity, the offsets and the indexes.

In: a node's data directory, also of a node that runs. Out: `Verified`: what is there, and each damage by file,
position, topic, partition and offset. Independent of recovery and of the fold: it counts offsets itself and compares
them with what the snapshots say.

Bad bytes are damage below the durable mark, and anywhere in a segment that has a successor (a segment is durable
before the next one begins). Above the mark they are a tail that was being written: a note, because opening the log
cuts it.

The node may go on meanwhile: roll, seal, remove and truncate. What it had when the folder was listed is what is judged:
the last segment then has no index that counts, and where retention took a listed one the log's new start may stand in a
segment that was not there yet.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from chronik_repl.errors import CorruptLog, ProtocolError
from chronik_repl.positions import Checksum, Position
from chronik_repl.wal.changes import Change, LogStartMoved, SnapshotPart, TopicMade, decode_change
from chronik_repl.wal.frame import BadFrame, Frame, Kind
from chronik_repl.wal.index import ENTRY, HEADER_BYTES, PARTITION, ActiveIndex, BadIndex, Entry, SealedIndex
from chronik_repl.wal.records import BadBatch, read_head
from chronik_repl.wal.segment import FRAMES_AT
from chronik_repl.wal.state import State, kind_of
from chronik_repl.wal.survey import Bad, CannotRead, SegmentFile, segment_paths
from chronik_repl.wal.values import Damage

Progress = Callable[[int], None]
Key = tuple[str, int]


class Verified(msgspec.Struct):
    cluster_id: str = ""
    start: int = 0
    end: int = 0  # of the last good frame
    end_checksum: int = 0
    durable_end: int = 0  # as the last mark says
    high_watermark: int = 0
    segments: int = 0
    frames: int = 0
    records: int = 0
    bytes: int = 0
    indexes: int = 0
    damage: list[Damage] = []
    notes: list[str] = []

    @property
    def ok(self) -> bool:
        return not self.damage


def verify(directory: Path, progress: Progress | None = None) -> Verified:
    """Raises CannotRead or FormatTooNew; everything else that is wrong stands in the result."""
    return _Verifier(directory, progress).run()


def bytes_to_read(directory: Path) -> int:
    """For a progress bar."""
    total = 0
    for _, path in segment_paths(directory):
        try:
            total += max(0, path.stat().st_size - FRAMES_AT)
        except FileNotFoundError:
            continue
    return total


class _Verifier:
    def __init__(self, directory: Path, progress: Progress | None) -> None:
        self._directory, self._progress = directory, progress
        self._result = Verified()
        self._next: dict[Key, int] = {}  # each partition's next offset, as far as it is known
        self._doubtful: set[Key] = set()  # a damaged range may hold frames of these
        self._told: set[tuple[str, int, int]] = set()  # damage that could name itself
        self._chain: Checksum | None = None
        self._end: Position | None = None  # of the frames so far
        self._epoch = 0
        self._timestamp_ms = 0
        self._log_start = 0
        self._removed = False  # a segment that was listed, before it could be opened
        self._pieces: list[bytes] = []
        self._file = ""
        self._index = ActiveIndex(Position(0), Checksum(0))

    def run(self) -> Verified:
        result = self._result
        paths = segment_paths(self._directory)
        for number, (start, path) in enumerate(paths):
            following = paths[number + 1][0] if number + 1 < len(paths) else None
            self._file = path.name
            try:
                file = SegmentFile(path, start)
            except FileNotFoundError:
                self._note(f"{path.name} was removed meanwhile: retention")
                self._removed = True
                self._forget()
                continue
            except CorruptLog as error:
                self._damage(start, following or start, str(error))
                self._forget()
                continue
            with file:
                self._segment(file, following)
        if result.segments:
            self._check_start(paths[0][1].name)
        return result

    def _check_start(self, first: str) -> None:
        start = self._result.start
        if self._log_start < start and not self._removed:
            self._file = first
            self._damage(
                self._log_start,
                start,
                f"the log starts at {self._log_start}; the segments from there to {start} are missing",
            )

    def _segment(self, file: SegmentFile, following: Position | None) -> None:
        result = self._result
        start, header = file.start, file.header
        if header.start != start:
            self._damage(start, start, f"the header is of the segment that starts at {header.start}")
        if not result.segments:
            result.cluster_id, result.start, result.end = header.cluster_id, start, start
        elif header.cluster_id != result.cluster_id:
            self._damage(start, start, f"of cluster {header.cluster_id!r}, the others of {result.cluster_id!r}")
        if self._end is not None and start != self._end:
            if start > self._end:
                self._damage(self._end, start, f"nothing holds the positions from {self._end} to {start}")
            else:
                self._damage(start, self._end, f"the segment before it ends at {self._end}")
            self._forget()
        elif self._chain is not None and header.chain != self._chain:
            self._damage(start, start, "it follows another frame than the last one of the segment before it")
        result.segments += 1
        self._log_start = max(self._log_start, header.log_start)
        self._end, self._chain = start, header.chain
        self._pieces = []
        self._index = ActiveIndex(start, header.chain)
        sound = self._frames(file, following)
        if sound and following is not None:
            self._check_index(file)
        mark = file.mark
        if mark is not None:
            result.durable_end, result.high_watermark = mark.durable_end, mark.high_watermark

    def _frames(self, file: SegmentFile, following: Position | None) -> bool:
        """True if all of the segment is good."""
        result = self._result
        sound = True
        first = True
        for piece in file.walk(file.header.chain, self._progress):
            if isinstance(piece, Frame):
                if first and not (piece.kind == Kind.SEGMENT_START and piece.position == file.start):
                    self._damage(file.start, file.start, "the segment does not begin with a snapshot")
                first = False
                sound = self._frame(piece) and sound
                result.frames += 1
                result.bytes += piece.size
                self._end = Position(piece.position + piece.size)
                self._chain = piece.checksum
            elif self._bad(file, piece, following):
                break
            else:
                sound = False
        assert self._end is not None
        if sound and following is None and self._end < (durable_end := file.durable_end(None)):
            sound = self._damage(self._end, durable_end, "the file ends before its durable mark")
        result.end, result.end_checksum = self._end, self._chain or 0
        return sound

    def _bad(self, file: SegmentFile, bad: Bad, following: Position | None) -> bool:
        """True if these bytes are none that anyone counts on."""
        durable_end = file.durable_end(following)
        if bad.start >= durable_end:
            if not bad.zeros:
                self._note(
                    f"{self._file}: from position {bad.start} on stand bytes that are no frame: being written now, or "
                    "a tail that was not finished; opening the log cuts it"
                )
            return True
        end = Position(min(bad.end, durable_end) if bad.last else bad.end)
        named = self._named_by_index(file, bad.start, end, following)
        for topic, partition, entry in named:
            position = Position(file.start + entry.relative)
            self._damage(position, Position(position + entry.size), bad.why, topic, partition, entry.base_offset)
            self._next[topic, partition] = entry.base_offset + entry.record_count
        if not named:
            self._damage(bad.start, end, bad.why, bad.topic, bad.partition, bad.offset)
            self._doubtful.update(self._next)
            self._told.add((bad.topic, bad.partition, bad.offset))
        self._pieces = []
        if bad.last:
            self._end = end if following is not None else bad.start
            self._chain = None if following is not None else self._chain
        return False

    def _frame(self, frame: Frame) -> bool:
        """True if what it says fits into what came before."""
        good = True
        if frame.epoch < self._epoch or frame.timestamp_ms < self._timestamp_ms:
            what = "epoch" if frame.epoch < self._epoch else "time"
            good = self._damage(frame.position, frame.position + frame.size, f"the {what} goes back in this frame")
        self._epoch, self._timestamp_ms = frame.epoch, frame.timestamp_ms
        index = self._index
        if frame.kind == Kind.DATA:
            good = self._data(frame) and good
        else:
            try:
                change = decode_change(frame.data)
                if kind_of(change) != frame.kind:
                    raise BadFrame(f"{type(change).__name__} in a frame of kind {frame.kind}")
                self._change(change, frame)
            except ProtocolError as error:
                good = self._damage(frame.position, frame.position + frame.size, str(error))
        index.ends.append(frame.position + frame.size)
        index.checksums.append(frame.checksum)
        return good

    def _data(self, frame: Frame) -> bool:
        topic, partition, base = frame.topic.decode("latin-1"), frame.partition, frame.base_offset
        key = (topic, partition)
        end = frame.position + frame.size
        self._result.records += frame.record_count
        try:
            head = read_head(frame.data)
        except BadBatch as error:
            return self._damage(frame.position, end, str(error), topic, partition, base)
        self._index.add(key, base, head.max_timestamp_ms, frame.position, frame.size, frame.record_count)
        if head.base_offset != base or head.last_offset_delta + 1 != frame.record_count:
            return self._damage(frame.position, end, "the frame and the batch in it disagree", topic, partition, base)
        known = self._next.get(key)
        self._next[key] = base + frame.record_count
        doubtful = key in self._doubtful
        self._doubtful.discard(key)
        if known is None or known == base:
            return True
        what = f"offset {base} follows where {known} should"
        if doubtful and known < base:
            if (topic, partition, known) in self._told:
                return True
            what = f"the records {known} to {base - 1} stood in the damaged range before this frame"
        return self._damage(frame.position, end, what, topic, partition, min(known, base))

    def _change(self, change: Change, frame: Frame) -> None:
        match change:
            case TopicMade():
                for partition in range(min(change.partitions, 100_000)):
                    self._next.setdefault((change.topic, partition), 0)
            case LogStartMoved():
                self._log_start = max(self._log_start, change.start)
            case SnapshotPart():
                if change.part != len(self._pieces):
                    raise BadFrame(f"snapshot part {change.part} after {len(self._pieces)} parts")
                self._pieces.append(change.piece)
                if len(self._pieces) == change.parts:
                    state = State.restore(b"".join(self._pieces))
                    self._pieces = []
                    self._snapshot(state, frame)

    def _snapshot(self, state: State, frame: Frame) -> None:
        """What the leader counted must be what was counted here."""
        end = Position(frame.position + frame.size)
        self._log_start = max(self._log_start, state.log_start)
        for name, topic in state.topics.items():
            for partition in topic.partitions + topic.retired:
                number = partition.partition
                key = (name, number)
                known = self._next.get(key)
                if known is not None and known != partition.next_offset and key not in self._doubtful:
                    what = f"the snapshot says that offset {partition.next_offset} is next; the frames say {known}"
                    self._damage(frame.position, end, what, name, number, min(known, partition.next_offset))
                self._next[key] = partition.next_offset
        self._doubtful.clear()

    # Indexes

    def _check_index(self, file: SegmentFile) -> None:
        path = file.path.with_suffix(".idx")
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            if file.sealed:
                self._note(f"{path.name} is missing; opening the log makes it again")
            return
        except OSError as error:
            raise CannotRead(f"{path}: {error.strerror}. Run this as the user that runs the node") from error
        self._result.indexes += 1
        assert self._end is not None
        try:
            stored = SealedIndex(data, file.start, self._end)
        except BadIndex as error:
            self._index_damage(path.name, file.start, f"not this segment's index: {error}")
            return
        if stored.end_chain != self._chain:
            self._index_damage(path.name, file.start, "its checksum of the segment's end is another one")
        seen: dict[Key, bytearray] = {}
        for topic, partition, entries, next_offset in _partitions(data):
            seen[topic, partition] = entries
            expected = self._index.rows.get((topic, partition), bytearray())
            known = self._index.next_offset(topic, partition)
            if entries != expected or (known is not None and known != next_offset):
                at = next((n for n, (a, b) in enumerate(zip(entries, expected, strict=False)) if a != b), len(entries))
                row = (entries if len(entries) > len(expected) else expected)[at // 32 * 32 :][:32]
                offset = ENTRY.unpack(row)[0] if len(row) == 32 else next_offset
                self._index_damage(path.name, file.start, "the entry is not its frame's", topic, partition, offset)
        for topic, partition in self._index.rows.keys() - seen.keys():
            offset = ENTRY.unpack_from(self._index.rows[topic, partition])[0]
            self._index_damage(path.name, file.start, "its entries are missing", topic, partition, offset)

    def _named_by_index(
        self, file: SegmentFile, start: Position, end: Position, following: Position | None
    ) -> list[tuple[str, int, Entry]]:
        """The batches that stood in a damaged range, as the index tells, if there is one that can be believed."""
        if following is None:
            return []
        try:
            data = file.path.with_suffix(".idx").read_bytes()
            SealedIndex(data, file.start, following)
        except (OSError, BadIndex):
            return []
        found = []
        for topic, partition, entries, _ in _partitions(data):
            for base, newest, relative, size, records, _ in ENTRY.iter_unpack(entries):
                if start <= file.start + relative < end:
                    found.append((topic, partition, Entry(base, newest, relative, size, records)))
        return sorted(found, key=lambda one: one[2].relative)

    # Findings

    def _forget(self) -> None:
        """What comes next is not known to follow what came before."""
        self._end = self._chain = None
        self._doubtful.update(self._next)

    def _note(self, text: str) -> None:
        self._result.notes.append(text)

    def _damage(self, start: int, end: int, what: str, topic: str = "", partition: int = -1, offset: int = -1) -> bool:
        self._result.damage.append(Damage(self._file, start, end, what, topic, partition, offset))
        return False

    def _index_damage(
        self, name: str, start: int, what: str, topic: str = "", partition: int = -1, offset: int = -1
    ) -> None:
        what += "; the log makes it again"
        self._result.damage.append(Damage(name, start, start, what, topic, partition, offset))


def _partitions(data: bytes) -> list[tuple[str, int, bytearray, int]]:
    """Every partition of an index file whose checksums were right: its entries' bytes and next offset."""
    counts = memoryview(data)[:HEADER_BYTES]
    partitions, entries, landmarks = (int.from_bytes(counts[at : at + 4], "big") for at in (32, 36, 40))
    entries_at = HEADER_BYTES + partitions * PARTITION.size
    names_at = entries_at + entries * ENTRY.size + landmarks * 8
    found = []
    for number in range(partitions):
        name_at, name_len, _, partition, first, count, next_offset, _ = PARTITION.unpack_from(
            data, HEADER_BYTES + number * PARTITION.size
        )
        topic = data[names_at + name_at : names_at + name_at + name_len].decode("latin-1")
        begin = entries_at + first * ENTRY.size
        found.append((topic, partition, bytearray(data[begin : begin + count * ENTRY.size]), next_offset))
    return found
