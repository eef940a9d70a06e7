"""What changes files other than by appending: the end of recovery, truncation, setting aside, replacing a damaged
segment.

Each is a series of steps, in an order in which a crash between any two of them leaves a log that opens: either as if
nothing had been begun, or as if it had been finished.
"""

from __future__ import annotations

from collections.abc import AsyncIterable

import trio

from chronik_repl.errors import CorruptLog, OutOfRange
from chronik_repl.positions import ORIGIN, Checksum, Position
from chronik_repl.wal.committer import Committer
from chronik_repl.wal.disk import Disk, File, Write
from chronik_repl.wal.recovery import scan
from chronik_repl.wal.segment import (
    FOLDER,
    FRAMES_AT,
    Header,
    Mark,
    best_mark,
    encode_header,
    encode_mark,
    mark_offset,
)
from chronik_repl.wal.segments import Segment, Store

LOST = "lost"  # what an operator's decision cut off below the high watermark
DAMAGED = "damaged"  # segments whose bytes are not what was written
REPAIR = f"{FOLDER}/repair"
IMPAIRED = "impaired"  # while what was lost to damage is not known to be here again: how far it was durable, at least
ZEROS_STEP = 256 * 1024
PIECE_BYTES = 16 * 1024 * 1024


async def settle_tail(disk: Disk, store: Store, end: Position, durable_end: Position, file_end: Position) -> None:
    """Recovery found good frames up to `end`. What stands above the mark may be in the page cache only (after kill -9,
    or a failed sync that left pages clean): write it again, so that the sync means something. What stands after is
    gone."""
    last = store.list[-1]
    async with store.pinned(last) as file:
        if end > durable_end:
            at = last.file_offset(durable_end)
            await disk.commit(file, (Write(at, (await disk.read(file, at, end - durable_end),)),))
        if not await _all_zeros(disk, file, last.file_offset(end), last.file_offset(file_end)):
            await disk.zero(file, last.file_offset(end), last.file_offset(file_end))


async def _all_zeros(disk: Disk, file: File, start: int, end: int) -> bool:
    zeros, found = bytes(ZEROS_STEP), bytearray(ZEROS_STEP)
    window = memoryview(found)
    while start < end:
        size = await disk.read_into(file, start, window[: end - start])
        if not size or (found != zeros if size == ZEROS_STEP else any(window[:size])):
            return False
        start += size
        await trio.lowlevel.checkpoint()
    return True


async def forget_from(disk: Disk, store: Store, committer: Committer, position: Position) -> None:
    """Remove every segment that starts at or after `position`, the last one first, so that what is left has no gap. The
    index of the one before goes first: it says that a segment follows."""
    for segment in [s for s in reversed(store.list) if s.start >= position]:
        for before in [s for s in store.list if s.end == segment.start and s is not segment]:
            await disk.remove(before.index_name)
            store.drop_index(before)
            await disk.sync_dir(FOLDER)
        if segment is committer.current:
            committer.start_at(None, segment.start, None)
        if segment in committer.finished:
            committer.finished.remove(segment)
        await store.forget(segment)
        await disk.sync_dir(FOLDER)


async def cut(disk: Disk, store: Store, committer: Committer, to: Position, segment_bytes: int) -> None:
    """Truncate to `to`, inside or at the end of a segment that stays: the marks first, so that what goes is no
    damage."""
    segment = store.holding(Position(to - 1))
    async with store.pinned(segment) as file:
        await committer.lower_marks(segment, to)
        await forget_from(disk, store, committer, Position(segment.start + 1))
        await disk.remove(segment.index_name)
        store.drop_index(segment)
        end = max(segment.start + segment_bytes, segment.end)
        await disk.zero(file, segment.file_offset(to), segment.file_offset(end))
        await disk.sync_dir(FOLDER)
        if segment in committer.finished:
            committer.finished.remove(segment)
        segment.end, segment.sealed = to, False
        committer.start_at(segment, to, None)


async def keep_lost(disk: Disk, store: Store, start: Position, end: Position) -> None:
    """Copy the stream's bytes from `start` to `end` into lost/, before they are cut."""
    await disk.make_folder(LOST)
    position = start
    while position < end:
        segment = store.holding(position)
        size = min(PIECE_BYTES, segment.end - position)
        async with store.pinned(segment) as file:
            data = await disk.read(file, segment.file_offset(position), size)
        await disk.replace(f"{LOST}/{position:020d}-{position + len(data):020d}", data)
        position = Position(position + len(data))


async def set_aside(disk: Disk, damage: CorruptLog) -> None:
    """Move the damaged segment, and all after it, into damaged/. That is remembered in `impaired`, durably and first:
    this node's log is shorter than it once said, so it must neither lead nor let anyone lead by its word."""
    if not damage.file.startswith(FOLDER + "/"):
        raise damage
    names = sorted(name for name in await disk.list(FOLDER) if name.endswith(".wal"))
    first = damage.file.rpartition("/")[2]
    last = Position(int(names[-1][:-4]))
    known = await read_impaired(disk)
    until = max(known or 0, last, damage.end or 0, await _marked(disk, names[-1]))  # for people: no bound can be proved
    await disk.replace(IMPAIRED, b"%d\n" % until)
    await disk.make_folder(DAMAGED)
    for name in reversed(names):
        if name >= first:
            await disk.rename(f"{FOLDER}/{name}", f"{DAMAGED}/{name}")
            await disk.sync_dir(FOLDER)
    await disk.sync_dir(DAMAGED)


async def _marked(disk: Disk, name: str) -> Position:
    """What the marks in this file say, if one of them can be read."""
    file = await disk.open(f"{FOLDER}/{name}")
    try:
        mark = best_mark(await disk.read(file, 0, FRAMES_AT))
    finally:
        file.close()
    return mark.durable_end if mark is not None else ORIGIN


async def read_impaired(disk: Disk) -> Position | None:
    """None where the log is whole. What cannot be read says that it is not, and no more."""
    try:
        file = await disk.open(IMPAIRED)
    except FileNotFoundError:
        return None
    try:
        text = await disk.read(file, 0, 64)
    finally:
        file.close()
    return Position(int(text)) if text.strip().isdigit() else ORIGIN


class Impairment:
    """While this node's log lacks what it once acked: when is it whole again?

    How far it was durable cannot be read from a damaged file: marks lag a group behind, headers and marks rot too. But
    whatever was committed with an ack of this node stands in the log of every leader that it follows afterwards, below
    the end that this log has when they meet. So this node is what it was once it is durable as far as that.
    """

    def __init__(self) -> None:
        self.whole = trio.Event()
        self._whole_at: Position | None = None

    def whole_at(self, position: Position, durable_end: Position) -> None:
        """Of the last leader that was met."""
        self._whole_at = position
        self.passed(durable_end)

    def passed(self, durable_end: Position) -> None:
        if self._whole_at is not None and durable_end >= self._whole_at:
            self.whole.set()

    def failed(self, error: BaseException) -> None:
        """Whoever runs the log ends this process, or it led until now."""


async def clear_impaired(disk: Disk) -> None:
    await disk.remove(IMPAIRED)
    await disk.sync_dir("")


class Replacement:
    """A damaged segment's bytes, fetched again: checked as they come, written aside, and put in its place when
    whole."""

    def __init__(self, disk: Disk, store: Store, segment: Segment, cluster_id: str) -> None:
        if segment.active is not None or segment.gone:
            raise OutOfRange(f"{segment.name} is not sealed: it cannot be replaced")
        self._disk, self._store, self._segment, self._cluster_id = disk, store, segment, cluster_id

    async def take(self, pieces: AsyncIterable[bytes]) -> None:
        """`pieces` together are the stream from the segment's start to its end. Raises CorruptLog if they are not."""
        segment, disk = self._segment, self._disk
        self._store.pin(segment)
        try:
            await disk.remove(REPAIR)
            file = await disk.open(REPAIR, create=True)
            try:
                header = Header(segment.start, segment.chain, self._cluster_id, self._store.list[0].start)
                marks = [Mark(n, segment.end, segment.start) for n in (0, 1)]
                blocks = [Write(mark_offset(mark.sequence), (encode_mark(mark),)) for mark in marks]
                await disk.commit(file, (Write(0, (encode_header(header),)), *blocks))
                position, chain = segment.start, segment.chain
                rest = b""
                async for piece in pieces:
                    rest += piece
                    start = position
                    scanned = scan(memoryview(rest), start, chain, self._store.frame_bytes_max, lambda frame: None)
                    if scanned.why or scanned.end > segment.end:
                        raise CorruptLog(
                            f"{segment.name}: what was sent for it is not whole at {scanned.end}: {scanned.why}",
                            file=segment.name,
                            start=scanned.end,
                            end=segment.end,
                        )
                    position, chain = scanned.end, scanned.chain
                    good, rest = rest[: position - start], rest[position - start :]
                    if good:
                        await disk.commit(file, (Write(FRAMES_AT + start - segment.start, (good,)),))
                    if position == segment.end:
                        break
                self._check_end(position, chain)
                await disk.rename(REPAIR, segment.name)
                await disk.sync_dir(FOLDER)
            finally:
                file.close()
        finally:
            self._store.unpin(segment)
        self._store.close_file_when_unpinned(segment)
        self._store.drop_index(segment)
        await disk.remove(segment.index_name)

    def _check_end(self, position: Position, chain: Checksum) -> None:
        segment = self._segment
        number = self._store.list.index(segment)
        following = self._store.list[number + 1]
        if (position, chain) != (following.start, following.chain):
            raise CorruptLog(
                f"{segment.name}: what was sent for it ends at {position} with chain value {chain:#x}; "
                f"the next segment begins at {following.start} with {following.chain:#x}",
                file=segment.name,
                start=position,
                end=segment.end,
            )
