"""Group commit: what was appended becomes durable, in groups, in order.

Appending puts frames into the open group. Two workers hand groups to the disk, which commits them one after another,
each with one fdatasync. The next group is handed over as soon as the last one ended; while one is being synced a
second goes ahead only when it is large, so that the device never waits for the event loop under load and small loads
batch by themselves.

Each group carries a mark with the end of the group before it, which is durable when this one is written. When nothing
was committed for 50 ms, or on a clean stop, a mark for the last group follows by itself.

A group never spans segments. To go over to the next one: the last group and a final mark of the old, the new file
under a name that is no segment's with its header, its rename, the folder's sync; only then is anything in it durable.

A failed commit is final: DiskFailed ends the worker, and with it the log.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple

import trio

from chronik_repl.errors import DiskFull
from chronik_repl.positions import Checksum, Position
from chronik_repl.wal.disk import Buffer, Disk, File, Write
from chronik_repl.wal.segment import FOLDER, FRAMES_AT, Header, Mark, encode_header, encode_mark, mark_offset
from chronik_repl.wal.segments import Segment, Store
from chronik_repl.wal.values import LogSettings, LogStats

EARLY_BYTES = 48 * 1024  # a second group goes ahead when it has this much
GROUP_BYTES_MAX = 8 * 1024 * 1024
MARK_QUIET_S = 0.05
SPACE_CHECK_S = 0.1  # while groups are committed
SPACE_RECHECK_S = 1.0  # while none are
SPARE = f"{FOLDER}/spare"  # the next segment's file, filled ahead of need
NEXT = f"{FOLDER}/next"  # the same, made in a hurry


class Group:
    __slots__ = ("chain", "end", "frames", "segment", "size", "start")

    def __init__(self, segment: Segment, start: Position) -> None:
        self.segment = segment
        self.start = start
        self.end = start
        self.chain = Checksum(0)
        self.frames: list[Buffer] = []
        self.size = 0


class _Begun(NamedTuple):
    """A group that is with the disk."""

    group: Group
    previous_end: Position
    started_s: float
    ended: Callable[[], Awaitable[None]]


class Committer:
    def __init__(
        self,
        disk: Disk,
        store: Store,
        settings: LogSettings,
        stats: LogStats,
        done: Callable[[Position, Checksum], None],
        high_watermark: Callable[[], Position],
    ) -> None:
        self._disk, self._store, self._settings, self._stats = disk, store, settings, stats
        self._done = done  # called with the durable end and the chain value there
        self._high_watermark = high_watermark
        self.cluster_id = ""
        self.queue: deque[Group] = deque()
        self.pending_bytes = 0  # appended and not yet handed to the disk
        self.full = False  # below the floor of free space
        self.current: Segment | None = None  # the one that groups go to; pinned, its file open
        self.finished: deque[Segment] = deque()  # have their last group and their final mark; to be sealed
        self.to_seal = trio.Event()
        self.sealing = trio.Lock()  # held by the one who seals or unseals: an index says that a segment follows
        self._written_end = Position(0)  # the end of the last group that was handed to the disk
        self._sequence = 0  # of the last mark
        self._marked = (Position(0), Position(0))  # what it says
        self._outstanding = 0  # groups that are with the disk
        self._marking = 0
        self._begun: _Begun | None = None  # is with the disk already; whichever worker comes next waits for it
        self._busy = False  # rolling, truncating, closing: no group is handed over
        self._workers = trio.lowlevel.ParkingLot()
        self._others = trio.lowlevel.ParkingLot()  # wait for their time alone
        self._stale = trio.Event()
        self._spare_wanted = trio.Event()
        self._spare_ready: trio.Event | None = None
        self._spare_enough = trio.Event()  # it is needed now, as it is
        self._spare_exists = False
        self._making = False
        self._space_checked_s = -1.0
        self._unchecked_bytes = 0  # committed since then

    def start_at(self, segment: Segment | None, end: Position, mark: Mark | None) -> None:
        """After opening or truncating: everything up to `end` is durable and stands in `segment`, whose file is
        open."""
        if self.current is not None:
            self._store.unpin(self.current)
        if segment is not None:
            self._store.pin(segment)
        self.current, self._written_end = segment, end
        if mark is not None:
            self._sequence = max(self._sequence, mark.sequence)
            self._marked = (mark.durable_end, mark.high_watermark)

    def add(
        self, segment: Segment, frames: Buffer, end: Position, chain: Checksum, *, all_there_is: bool = False
    ) -> None:
        """Whole frames that end at `end` of the stream. `all_there_is`: nothing more comes in this step, so that a disk
        which has nothing to do may begin at once."""
        queue = self.queue
        size = len(frames)
        if not queue or (group := queue[-1]).segment is not segment or group.size >= GROUP_BYTES_MAX:
            group = Group(segment, Position(end - size))
            queue.append(group)
        group.frames.append(frames)
        group.size += size
        group.end = end
        group.chain = chain
        self.pending_bytes += size
        if self._workers and (self._outstanding == 0 or self.pending_bytes >= EARLY_BYTES):
            self._workers.unpark()
            if all_there_is and self._may_begin():
                self._begun = self._begin(queue.popleft())

    def _may_begin(self) -> bool:
        """In the step in which frames are added, before a worker comes to it?"""
        return (
            self._outstanding == 0
            and self._may_hand_over()
            and self.queue[0].segment is self.current
            and not self._settings.linger_s
        )

    def _may_hand_over(self) -> bool:
        if not self.queue or self._busy:
            return False
        if self._outstanding == 0:
            return True
        return self._outstanding == 1 and self.pending_bytes >= EARLY_BYTES and self.queue[0].segment is self.current

    async def work(self) -> None:
        """One of the two workers."""
        linger_s = self._settings.linger_s
        while True:
            while self._begun is None and not self._may_hand_over():
                await self._workers.park()
            if self._begun is not None:
                begun, self._begun = self._begun, None
                await self._complete(begun)
                del begun  # and with it the group's frames, while this waits for the next one
                continue
            if linger_s and self._outstanding == 0 and self.pending_bytes < EARLY_BYTES:
                await trio.sleep(linger_s)
                if not self._may_hand_over():
                    continue
            if self.queue[0].segment is self.current:
                begun = self._begin(self.queue.popleft())
                if self._workers and self._may_hand_over():
                    self._workers.unpark()
                await self._complete(begun)
                del begun
            else:
                async with self.alone():
                    if self.queue and self.queue[0].segment is not self.current:
                        await self._roll(self.queue[0].segment)

    def _begin(self, group: Group) -> _Begun:
        segment = group.segment
        previous_end, self._written_end = self._written_end, group.end
        self.pending_bytes -= group.size
        self._outstanding += 1
        frames, mark = Write(segment.file_offset(group.start), group.frames), self._next_mark(previous_end)
        ended = self._disk.begin(self._store.opened(segment), frames, mark)
        return _Begun(group, previous_end, trio.current_time(), ended)

    async def _complete(self, begun: _Begun) -> None:
        group, previous_end, started, ended = begun
        try:
            await ended()
        except trio.Cancelled:
            # It may be written or not; `close` writes the same bytes to the same place again.
            self.queue = deque(sorted([group, *self.queue], key=lambda group: group.start))
            self.pending_bytes += group.size
            self._written_end = min(previous_end, self._written_end)
            raise
        finally:
            self._outstanding -= 1
            self._others.unpark_all()
        self._done(group.end, group.chain)
        self._stale.set()
        now = trio.current_time()
        stats = self._stats
        stats.groups_committed += 1
        stats.group_bytes, stats.group_frames = group.size, len(group.frames)
        stats.commit_s += now - started
        stats.commit_last_s = now - started
        stats.commit_longest_s = max(stats.commit_longest_s, now - started)
        stats.commit_seconds.observe(now - started)
        stats.committed_bytes.observe(group.size)
        self._unchecked_bytes += group.size
        if now - self._space_checked_s > SPACE_CHECK_S or self._unchecked_bytes * 16 > self._settings.min_free_bytes:
            self._check_space(now)

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """While this is held nothing is with the disk and no group is handed over."""
        while self._busy:
            await self._others.park()
        self._busy = True
        try:
            while self._outstanding or self._marking:
                await self._others.park()
            yield
        finally:
            self._busy = False
            self._others.unpark_all()
            self._workers.unpark_all()

    async def _roll(self, segment: Segment) -> None:
        old = self.current
        if old is not None:
            await self._disk.commit(self._store.opened(old), (self._next_mark(old.end),))
        file = await self._make(segment)
        segment.made = True
        self._store.adopt(segment, file)
        self._store.pin(segment)
        self.current = segment
        self._check_space(trio.current_time())
        if old is not None:
            self._store.unpin(old)
            self.finished.append(old)
            self.to_seal.set()
            self._stats.segments_rolled += 1

    async def _make(self, segment: Segment) -> File:
        if self._spare_ready is not None and self.current is not None:
            # A load that is faster than the filling does better without it: the device has half the work then. Only
            # small groups lose by it, and those are slow enough for the filling.
            self._spare_enough.set()
            await self._spare_ready.wait()
        self._making = True  # from here on the spare is this segment's, until it has another name
        try:
            aside, file = await self._take_file()
            header = encode_header(Header(segment.start, segment.chain, self.cluster_id, self._store.list[0].start))
            marks = (self._next_mark(segment.start), self._next_mark(segment.start))
            # The last byte before the frames too: a file that was not filled ahead must not be too short for a segment.
            await self._disk.commit(file, (Write(0, (header,)), *marks, Write(FRAMES_AT - 1, (b"\0",))))
            await self._disk.rename(aside, segment.name)
            await self._disk.sync_dir(FOLDER)
        finally:
            self._making = False
            self._spare_wanted.set()
        return file

    async def _take_file(self) -> tuple[str, File]:
        """The spare, or a new one where there is none: not yet, or not any more, because someone tidied up."""
        if self._spare_exists:
            self._spare_exists = False
            try:
                return SPARE, await self._disk.open(SPARE)
            except FileNotFoundError:
                pass
        await self._disk.remove(NEXT)
        return NEXT, await self._disk.open(NEXT, create=True)

    def _next_mark(self, durable_end: Position) -> Write:
        self._sequence += 1
        high_watermark = self._high_watermark()
        self._marked = (durable_end, high_watermark)
        self._stats.marks_written += 1
        mark = encode_mark(Mark(self._sequence, durable_end, high_watermark))
        return Write(mark_offset(self._sequence), (mark,))

    # Beside the groups

    def high_watermark_moved(self) -> None:
        self._stale.set()

    async def keep_marks_fresh(self) -> None:
        while True:
            await self._stale.wait()
            groups = self._stats.groups_committed
            await trio.sleep(MARK_QUIET_S)
            if groups == self._stats.groups_committed and not (self._outstanding or self._busy or self.queue):
                self._stale = trio.Event()
                await self.mark()

    async def mark(self) -> None:
        """Everything that was handed over is durable: write that down, unless it stands there already."""
        assert self._outstanding == 0
        segment = self.current
        if segment is None or self._marked == (self._written_end, self._high_watermark()):
            return
        self._store.pin(segment)
        self._marking += 1
        try:
            await self._disk.commit(self._store.opened(segment), (self._next_mark(self._written_end),))
        finally:
            self._marking -= 1
            self._store.unpin(segment)
            self._others.unpark_all()

    async def lower_marks(self, segment: Segment, to: Position) -> None:
        """Truncation: neither slot may speak of more than `to`. One after the other, so that one of them is always
        whole."""
        for _ in range(2):
            await self._disk.commit(self._store.opened(segment), (self._next_mark(to),))

    async def finish(self) -> None:
        """A clean stop, when no worker runs any more: the rest, and a mark that says so."""
        assert self._begun is None  # the worker that was woken for it has taken it, cancelled or not
        async with self.alone():
            while self.queue:
                if self.queue[0].segment is self.current:
                    await self._complete(self._begin(self.queue.popleft()))
                else:
                    await self._roll(self.queue[0].segment)
            await self.mark()

    def discard(self) -> None:
        """Truncation: what was not handed over yet is forgotten."""
        self.queue.clear()
        self.pending_bytes = 0

    async def keep_spare(self) -> None:
        """Have the next segment's file ready, zero-filled, before it is needed."""
        size = FRAMES_AT + self._settings.segment_bytes
        await self._disk.remove(SPARE)  # of the last life: how far it is filled and synced nobody knows
        while True:
            self._spare_wanted = trio.Event()
            room = self._disk.free_bytes() - size >= self._settings.min_free_bytes
            if room and not self._spare_exists and not self._making:
                ready = self._spare_ready = trio.Event()
                self._spare_enough = trio.Event()
                try:
                    await self._disk.preallocate(SPARE, size, enough=self._spare_enough)
                    self._spare_exists = True
                except DiskFull:
                    self.full = True
                finally:
                    self._spare_ready = None
                    ready.set()
            await self._spare_wanted.wait()

    async def watch_space(self) -> None:
        while True:
            self._check_space(trio.current_time())
            await trio.sleep(SPACE_RECHECK_S)

    def _check_space(self, now_s: float) -> None:
        self._space_checked_s, self._unchecked_bytes = now_s, 0
        self.full = self._disk.free_bytes() < self._settings.min_free_bytes
