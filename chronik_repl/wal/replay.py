"""Frames read back from files: the state at a position, and what the log keeps in memory beside it.

The state comes from the last whole snapshot at or below the high watermark and the frames after it, so that the
committed offset of every partition is known too: it is the next offset at the high watermark.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from chronik_repl.errors import CorruptLog
from chronik_repl.positions import Checksum, Position
from chronik_repl.wal.entities import Pending
from chronik_repl.wal.frame import FIELDS, HEAD, OVERHEAD, TOPIC_LEN, BadFrame, Kind, decode, frame_size
from chronik_repl.wal.index import ActiveIndex, BadIndex, SealedIndex
from chronik_repl.wal.intake import Intake
from chronik_repl.wal.segment import FRAMES_AT
from chronik_repl.wal.segments import Segment, Store
from chronik_repl.wal.snapshot import PART_BYTES, last_part_at, read_part
from chronik_repl.wal.state import State

LAG_SEGMENTS = 4  # fewer than that are simply read


class Replayed(NamedTuple):
    state: State
    active: ActiveIndex  # the last segment's index
    pending: list[Pending]
    end: Position
    chain: Checksum
    why: str  # why the frames end there; "" at the position that was asked for


async def replay(store: Store, upto: Position, high_watermark: Position) -> Replayed:
    """The log at `upto`, or where its good frames end before that. Committed offsets are set as of `high_watermark`."""
    lagging = await _replay_lagging(store, upto, high_watermark)
    if lagging is not None:
        return lagging
    pending: list[Pending] = []
    intake = Intake(State(), store.frame_bytes_max, pending.append, high_watermark)
    folded = await fold(store, upto, intake, below=high_watermark, alone=True)
    if folded.end <= high_watermark:
        intake.show()
    return Replayed(intake.state, folded.active, pending, folded.end, folded.chain, folded.why)


async def _replay_lagging(store: Store, upto: Position, high_watermark: Position) -> Replayed | None:
    """The same for a high watermark that is many segments behind: what is between is not read. For the segments between
    the indexes say what each partition had at their ends, and it becomes visible a segment at a time. None where that
    does not apply, or an index is not there."""
    held = [s for s in store.list if s.start < upto]
    behind = max((n for n, s in enumerate(held) if s.start <= high_watermark), default=0)
    newest = max((n for n, s in enumerate(held) if s.snapshot_whole), default=0)
    if newest - behind <= LAG_SEGMENTS:
        return None
    exact: list[Pending] = []
    then = Intake(State(), store.frame_bytes_max, exact.append, high_watermark)
    folded = await fold(store, held[behind].end, then, below=high_watermark, alone=True)
    if folded.end != held[behind].end:
        return None  # damaged: the long way says so
    if folded.end <= high_watermark:
        then.show()
    seen = {(p.topic, p.partition): p.next_offset for p in then.state.partitions()}
    waiting = [(end, (p.topic, p.partition), next_offset) for end, p, next_offset in exact]
    for segment in held[behind + 1 : newest]:
        try:
            index = SealedIndex(await store.disk.map(segment.index_name), segment.start, segment.end)
        except (FileNotFoundError, BadIndex):
            return None
        for key, next_offset in index.next_offsets():
            if next_offset > seen.get(key, 0):
                seen[key] = next_offset
                waiting.append((segment.end, key, next_offset))
    newer: list[Pending] = []
    now = Intake(State(), store.frame_bytes_max, newer.append)
    folded = await fold(store, upto, now, below=upto, alone=True)
    for shown in then.state.partitions():
        partition = now.state.find(shown.topic, shown.partition)
        if partition is not None:
            partition.committed_offset = shown.committed_offset
    pending: list[Pending] = [
        (end, partition, next_offset)
        for end, key, next_offset in waiting
        if (partition := now.state.find(*key)) is not None
    ]
    return Replayed(now.state, folded.active, pending + newer, folded.end, folded.chain, folded.why)


def coarsen(pending: Iterable[Pending], end: Position) -> list[Pending]:
    """One entry a partition instead of one a batch: they become visible together, once `end` is committed.

    For a high watermark that stands still while the log grows: what is kept of that must not grow with the records.
    """
    newest = {partition: next_offset for _, partition, next_offset in pending}
    return [(end, partition, next_offset) for partition, next_offset in newest.items()]


class Folded(NamedTuple):
    active: ActiveIndex  # of the last segment that was walked
    end: Position
    chain: Checksum
    why: str


async def fold(store: Store, upto: Position, intake: Intake, *, below: Position, alone: bool = False) -> Folded:
    """The log at `upto`, from the last whole snapshot at or below both it and `below`, into a fresh `intake`.

    Stops early at bytes that are no frame; the answer says where. Raises CorruptLog for segments that do not join.
    """
    upper = min(upto, below)
    base = 0
    for number, segment in enumerate(store.list):
        if number and segment.start > upper:
            break
        if segment.snapshot_whole and segment.start < upto:
            base = number
    end, chain = store.list[base].start, store.list[base].chain
    index = ActiveIndex(end, chain)
    for segment in store.list[base:]:
        if segment.start >= upto and segment is not store.list[base]:
            break
        if (end, chain) != (segment.start, segment.chain):
            raise CorruptLog(
                f"{segment.name} does not follow on what stands before it: that ends at {end} with {chain:#x}",
                file=segment.name,
                start=segment.start,
                end=segment.end,
            )
        index = intake.index = ActiveIndex(end, chain)
        walk = await store.walk(segment, min(upto, segment.end), intake.take, batches=intake.take_batches, alone=alone)
        end, chain = walk.end, walk.chain
        if walk.why:
            return Folded(index, end, chain, walk.why)
    return Folded(index, end, chain, "")


async def look_at_head(store: Store, segment: Segment) -> None:
    """Of its first frame: the time, and whether the snapshot there is whole. Bad bytes leave both at nothing."""
    segment.first_timestamp_ms, segment.snapshot_whole = 0, False
    read = store.disk.read
    async with store.pinned(segment) as file:
        try:
            head = await read(file, FRAMES_AT, OVERHEAD)
            if len(head) < OVERHEAD:
                return
            size = frame_size(head, 0, store.frame_bytes_max)
            segment.first_timestamp_ms, kind = _time_and_kind(head)
            if size > segment.end - segment.start or kind != Kind.SEGMENT_START:
                return
            if size < PART_BYTES:  # a part that is not full is the last
                segment.snapshot_whole = True
                return
            data = memoryview(await read(file, FRAMES_AT, size))
            frame = decode(data, 0, segment.start, segment.chain, store.frame_bytes_max)
            if frame is None:
                return
            last_at = last_part_at(read_part(frame.data).parts)
            head = await read(file, FRAMES_AT + last_at, OVERHEAD)
            if len(head) == OVERHEAD:
                ends_at = last_at + frame_size(head, 0, store.frame_bytes_max)
                there = _time_and_kind(head)[1] == Kind.SEGMENT_START
                segment.snapshot_whole = there and ends_at <= segment.end - segment.start
        except BadFrame:
            return


def _time_and_kind(head: bytes) -> tuple[int, int]:
    """Of a frame without a topic."""
    fields = FIELDS.unpack_from(head, HEAD.size + TOPIC_LEN.size)
    return fields[3], fields[4]
