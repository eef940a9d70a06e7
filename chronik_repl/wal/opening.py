"""Opening a log: what is in the folder, which of it counts, what the state is. Reads only; changes nothing.

Of sealed segments the headers are read; the state comes from the last whole snapshot at or below the high watermark, and
the frames after it. What stands in the folder that is not ours, is missing, or is of another cluster is an error that names it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from chronik_repl.errors import CorruptLog, ForeignLog
from chronik_repl.positions import CHAIN_SEED, ORIGIN, Checksum, Position
from chronik_repl.wal.disk import Disk
from chronik_repl.wal.frame import FIELDS, HEAD, OVERHEAD, TOPIC_LEN, BadFrame, Frame, Kind, decode, frame_size
from chronik_repl.wal.index import ActiveIndex
from chronik_repl.wal.recovery import Damaged, judge
from chronik_repl.wal.segment import FOLDER, FRAMES_AT, NAME, Header, Mark, best_mark, decode_header, segment_name
from chronik_repl.wal.segments import Segment, Store
from chronik_repl.wal.snapshot import PART_BYTES, last_part_at, read_part
from chronik_repl.wal.state import PartitionState, State

OPEN_STEP = 4 * 1024 * 1024
LEFTOVERS = ("spare", "next")  # files that were to become segments
NO_MARK = Mark(0, ORIGIN, ORIGIN)


class Pending(NamedTuple):
    """A batch above the high watermark: once that passes `end` the partition's committed offset is `next_offset`."""

    end: Position
    partition: PartitionState
    next_offset: int


class Loaded(NamedTuple):
    cluster_id: str | None
    segments: list[Segment]
    mark: Mark  # the last segment's
    state: State
    end: Position
    chain: Checksum
    pending: list[Pending]
    leftovers: list[str]
    file_end: Position  # how far the last segment's file reaches


class Folded(NamedTuple):
    state: State
    end: Position
    chain: Checksum
    why: str  # why the frames end there; "" at the position that was asked for


async def load(disk: Disk, store: Store, cluster_id: str | None) -> Loaded:
    """Raises CorruptLog, ForeignLog, FormatTooNew."""
    sizes, leftovers = _sort_out(await disk.list(FOLDER))
    if not sizes:
        return Loaded(cluster_id, [], NO_MARK, State(), ORIGIN, CHAIN_SEED, [], leftovers, ORIGIN)
    headers: list[Header] = []
    mark: Mark | None = None
    for start, size in sizes:
        segment = Segment(start, CHAIN_SEED)
        blocks = await _read_blocks(disk, store, segment, size)
        header = decode_header(blocks, segment.name)
        if header.start != start:
            raise CorruptLog(
                f"{segment.name} holds the segment of position {header.start}: it was copied or renamed. Move it away",
                file=segment.name,
            )
        if cluster_id is not None and header.cluster_id != cluster_id:
            raise ForeignLog(
                f"{segment.name} is of cluster {header.cluster_id!r}, this node is of {cluster_id!r}. "
                f"Set CHRONIK_CLUSTER_ID, or give this node another data directory"
            )
        cluster_id = header.cluster_id
        segment.chain = header.chain
        segment.made = True
        headers.append(header)
        mark = best_mark(blocks)
        store.list.append(segment)
    _bound(store.list, sizes)
    if mark is None:
        mark = Mark(0, store.list[-1].start, ORIGIN)
    last = store.list[-1]
    for segment in store.list:
        await look_at_head(disk, store, segment)
    return await _load_tail(store, mark, headers, cluster_id, leftovers, last)


async def _load_tail(
    store: Store, mark: Mark, headers: list[Header], cluster_id: str | None, leftovers: list[str], last: Segment
) -> Loaded:
    pending: list[Pending] = []
    passed = False
    high_watermark = mark.high_watermark
    file_end = last.end
    index = ActiveIndex(last.start, last.chain)

    def each(state: State, frame: Frame, touched: object) -> None:
        nonlocal passed
        if frame.position + frame.size > high_watermark:
            if isinstance(touched, PartitionState):
                if not passed:
                    settle(state, touched, frame)
                pending.append(Pending(Position(frame.position + frame.size), touched, touched.next_offset))
            elif not passed:
                settle(state, None, frame)
            passed = True
        if frame.position >= last.start:
            index.add_frame(frame, touched.topic if isinstance(touched, PartitionState) else "")

    def settle(state: State, touched: PartitionState | None, frame: Frame) -> None:
        for partition in state.partitions():
            partition.committed_offset = partition.next_offset
        if touched is not None:
            touched.committed_offset = frame.base_offset

    folded = await fold(store, last.end, each, below=high_watermark, step=OPEN_STEP)
    if not passed:
        for partition in folded.state.partitions():
            partition.committed_offset = partition.next_offset
    if folded.end < last.start:
        raise CorruptLog(
            f"{store.holding(folded.end).name}: damaged at position {folded.end}: {folded.why}",
            file=store.holding(folded.end).name,
            start=folded.end,
            end=last.start,
        )
    verdict = judge(folded.end, mark.durable_end)
    if isinstance(verdict, Damaged):
        raise CorruptLog(
            f"{last.name}: damaged from position {verdict.start}; it was durable to {verdict.end}: "
            f"{folded.why or 'the file ends here'}. Start this node as a follower, or restore the file",
            file=last.name,
            start=verdict.start,
            end=verdict.end,
        )
    first = store.list[0]
    expected = max(folded.state.log_start, headers[-1].log_start)
    if first.start > expected:
        raise CorruptLog(
            f"{FOLDER}/: the log begins at {first.start}, but should at {expected}: its first segments are missing",
            file=first.name,
            start=Position(expected),
            end=first.start,
        )
    last.end = folded.end
    last.active = index
    return Loaded(cluster_id, store.list, mark, folded.state, folded.end, folded.chain, pending, leftovers, file_end)


def _sort_out(files: dict[str, int]) -> tuple[list[tuple[Position, int]], list[str]]:
    """Segments by position with their sizes, and what a crash left behind. Raises ForeignLog for anything else."""
    segments, leftovers = [], []
    for name, size in sorted(files.items()):
        if found := NAME.match(name):
            segments.append((Position(int(found[1])), size))
        elif name in LEFTOVERS or name.endswith(".new"):
            leftovers.append(name)
        elif not (name.endswith(".idx") and NAME.match(name[:-4] + ".wal")):
            raise ForeignLog(f"{FOLDER}/{name} is no file of this program. Move it away; nothing was changed")
    known = {segment_name(start) for start, _ in segments}
    leftovers += [name for name in files if name.endswith(".idx") and name[:-4] + ".wal" not in known]
    return segments, leftovers


async def _read_blocks(disk: Disk, store: Store, segment: Segment, size: int) -> bytes:
    if size < FRAMES_AT:
        raise CorruptLog(f"{segment.name}: {size} bytes are too few for a segment", file=segment.name)
    async with store.pinned(segment) as file:
        return await disk.read(file, 0, FRAMES_AT)


def _bound(segments: Sequence[Segment], sizes: Sequence[tuple[Position, int]]) -> None:
    """Each segment ends where the next begins; the last one where its file does. Raises CorruptLog for a gap."""
    for number, segment in enumerate(segments):
        file_end = Position(segment.start + sizes[number][1] - FRAMES_AT)
        if number + 1 == len(segments):
            segment.end = file_end
            return
        segment.end = segments[number + 1].start
        if file_end < segment.end:
            raise CorruptLog(
                f"{segment.name} ends at position {file_end} and the next segment begins at {segment.end}: "
                f"what is between them is missing",
                file=segment.name,
                start=file_end,
                end=segment.end,
            )


async def look_at_head(disk: Disk, store: Store, segment: Segment) -> None:
    """Of its first frame: the time, and whether the snapshot there is whole. Bad bytes leave both at nothing."""
    segment.first_timestamp_ms, segment.snapshot_whole = 0, False
    available = segment.end - segment.start
    async with store.pinned(segment) as file:
        head = await disk.read(file, FRAMES_AT, OVERHEAD)
        if len(head) < OVERHEAD:
            return
        try:
            size = frame_size(head, 0, store.frame_bytes_max)
        except BadFrame:
            return
        fields = FIELDS.unpack_from(head, HEAD.size + TOPIC_LEN.size)
        segment.first_timestamp_ms = fields[3]
        if size > available or fields[4] != Kind.SEGMENT_START:
            return
        if size < PART_BYTES:  # a part that is not full is the last
            segment.snapshot_whole = True
            return
        data = memoryview(await disk.read(file, FRAMES_AT, size))
        try:
            frame = decode(data, 0, segment.start, segment.chain, store.frame_bytes_max)
            if frame is None:
                return
            at = last_part_at(read_part(frame.data).parts)
            head = await disk.read(file, FRAMES_AT + at, OVERHEAD)
            if len(head) < OVERHEAD:
                return
            fields = FIELDS.unpack_from(head, HEAD.size + TOPIC_LEN.size)
            size = frame_size(head, 0, store.frame_bytes_max)
            segment.snapshot_whole = fields[4] == Kind.SEGMENT_START and at + size <= available
        except BadFrame:
            return


async def fold(
    store: Store,
    upto: Position,
    each: Callable[[State, Frame, object], None],
    *,
    below: Position,
    step: int,
) -> Folded:
    """The state at `upto`, from the last whole snapshot at or below both it and `below`; `each` sees every frame on the way.

    Stops early at bytes that are no frame; the answer says where.
    """
    upper = min(upto, below)
    base = 0
    for number, segment in enumerate(store.list):
        if number and segment.start > upper:
            break
        if segment.snapshot_whole and segment.start < upto:
            base = number
    state = State()
    end, chain = store.list[base].start, store.list[base].chain
    for segment in store.list[base:]:
        if segment.start >= upto:
            break
        if (end, chain) != (segment.start, segment.chain):
            raise CorruptLog(
                f"{segment.name} does not follow on what stands before it: that ends at {end} with chain value {chain:#x}",
                file=segment.name,
                start=end,
                end=segment.start,
            )

        def take(frame: Frame) -> None:
            each(state, frame, state.apply(frame))

        scanned = await store.walk(segment, min(upto, segment.end), take, step=step)
        end, chain = scanned.end, scanned.chain
        if scanned.why:
            return Folded(state, end, chain, scanned.why)
    return Folded(state, end, chain, "")
