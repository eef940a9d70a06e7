"""The log: append and get a place at once, wait until it is durable, read it back, recover.

One log a node, for all topics. `append_*` gives frames their positions and offsets, folds them into the state and puts
them into the open group and to the listeners (the rings); nothing there waits. The committer (committer.py) makes
groups durable and moves `durable`. The role decides what is committed and says so by `commit_to`; readers see what is
below `committed`, which never exceeds what is durable here.

Everything runs on the event loop's thread. `run` must run for anything to become durable. A failed write or sync is
final: everyone who waits gets DiskFailed, nothing more is accepted, `run` raises it.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterable, Callable, Sequence

import msgspec
import structlog
import trio

from chronik_repl.errors import ChronikError, CorruptLog, DiskFailed, OutOfRange, first_of
from chronik_repl.positions import ORIGIN, Checksum, Epoch, Offset, Position
from chronik_repl.wal.ages import AgeClock
from chronik_repl.wal.changes import Change, EpochStart
from chronik_repl.wal.committer import SPARE, Committer
from chronik_repl.wal.disk import Buffer, Disk
from chronik_repl.wal.housekeeping import Housekeeper
from chronik_repl.wal.mending import (
    Impairment,
    Replacement,
    clear_impaired,
    cut,
    forget_from,
    keep_lost,
    read_impaired,
    set_aside,
    settle_tail,
)
from chronik_repl.wal.opening import Loaded, load
from chronik_repl.wal.reader import Reader, require
from chronik_repl.wal.replay import Replayed, look_at_head, replay
from chronik_repl.wal.retention import Held, retention_due
from chronik_repl.wal.scrub import Scrubber
from chronik_repl.wal.segment import FOLDER
from chronik_repl.wal.segments import Store
from chronik_repl.wal.state import BATCH, State
from chronik_repl.wal.values import Appended, Damage, Fetched, LogSettings, LogStats
from chronik_repl.wal.visibility import Visibility
from chronik_repl.wal.watermark import Watermark
from chronik_repl.wal.writer import Writer

_logger = structlog.get_logger()


def wall_clock_ms() -> int:
    return time.time_ns() // 1_000_000


class Log:
    def __init__(self, disk: Disk, settings: LogSettings, clock_ms: Callable[[], int]) -> None:
        """Use `open`."""
        self.settings = settings
        self.stats = LogStats()
        self.damage: list[Damage] = []
        self.cluster_id: str | None = None
        self.impaired_until: Position | None = None  # durable here once, at least; lost to damage: do not vote by it
        self._impairment = Impairment()
        self._disk = disk
        self._store = Store(disk, settings.frame_bytes_max)
        self._committer = Committer(
            disk,
            self._store,
            settings,
            self.stats,
            lambda end, chain: self._visibility.became_durable(end, chain),
            lambda: self.committed.value,
        )
        self._reader = Reader(disk, self._store, self.stats, lambda: self.durable.value, self._note_damage)
        self._housekeeper = Housekeeper(
            disk, self._store, self._committer, self._reader, self.stats, lambda: self.state
        )
        self._visibility = Visibility(self._committer.high_watermark_moved, self._housekeeper.start_at)
        self.ages = AgeClock(clock_ms, trio.current_time)
        self._writer = Writer(self._store, self._committer, self._visibility, settings, self.stats, clock_ms, self.ages)
        self._scrubber = Scrubber(self._store, self._reader, self.stats, settings.scrub_mb_per_s, self._note_damage)
        self.durable = self._visibility.durable
        self.committed = self._visibility.committed
        self.listeners = self._writer.listeners

    # Opening and closing

    @classmethod
    async def open(
        cls,
        disk: Disk,
        settings: LogSettings,
        cluster_id: str | None,
        *,
        clock_ms: Callable[[], int] = wall_clock_ms,
        set_aside_damage: bool = False,
    ) -> Log:
        """Recover what is there. Raises CorruptLog, ForeignLog, FormatTooNew, having changed nothing.

        `cluster_id` None: take what is there. `set_aside_damage`, for a follower: move a damaged tail into damaged/
        and open with what stands before it; `impaired_until` is then not None until this node is what it was.
        """
        log = cls(disk, settings, clock_ms)
        try:
            loaded = None
            while loaded is None:
                try:
                    loaded = await load(disk, log._store, cluster_id)
                except CorruptLog as damage:
                    if not set_aside_damage:
                        raise
                    log._store.reset()
                    await set_aside(disk, damage)
            log.impaired_until = await read_impaired(disk)
            await log._recover(loaded)
        except BaseException:
            log._store.close()
            raise
        return log

    async def _recover(self, loaded: Loaded) -> None:
        """What counts is known: make it durable, and the rest gone."""
        if not self._store.list:  # where a segment stands its folder was made and synced before it
            await self._disk.make_folder(FOLDER)
        for name in (f"{FOLDER}/{leftover}" for leftover in loaded.leftovers):
            if name != SPARE:  # that one may be large; the committer sees to it
                await self._disk.remove(name)
        self.cluster_id = loaded.cluster_id
        self._committer.cluster_id = loaded.cluster_id or ""
        if not self._store.list:
            return
        last, replayed = self._store.list[-1], loaded.replayed
        if replayed.state.blank and last.start == ORIGIN:
            # Founded, and cut off before its first epoch began: nothing was ever accepted.
            await forget_from(self._disk, self._store, self._committer, ORIGIN)
            return
        durable_end = max(loaded.mark.durable_end, last.start)
        last.end = replayed.end
        await settle_tail(self._disk, self._store, replayed.end, durable_end, loaded.file_end)
        await self._store.file(last)
        self._committer.start_at(last, replayed.end, loaded.mark)
        self._adopt(replayed, min(loaded.mark.high_watermark, replayed.end))
        await self._committer.mark()
        if last.end == last.start and len(self._store.list) > 1:
            # Its file was made, and nothing in it: then the segment before it goes on.
            await self._cut(last.start)
        await self._housekeeper.raise_starts(after=self.start)

    def _adopt(self, replayed: Replayed, high_watermark: Position) -> None:
        """This is the log, and all of it is durable."""
        last = self._store.list[-1]
        last.active = replayed.active
        state = replayed.state
        self._writer.continue_at(replayed.end, replayed.chain, state, last)
        self._visibility.reset(replayed.end, replayed.chain, high_watermark, replayed.pending, state.log_start)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Make what is appended durable, until cancelled. Raises DiskFailed."""
        try:
            async with trio.open_nursery() as nursery:
                for task in (
                    self._committer.work,
                    self._committer.work,
                    self._committer.keep_marks_fresh,
                    self._committer.keep_spare,
                    self._committer.watch_space,
                    self._housekeeper.keep_sealing,
                    self._housekeeper.keep_removing,
                    self._scrubber.run,
                    self._heal,
                ):
                    nursery.start_soon(task)
                task_status.started()
        except* DiskFailed as errors:
            failure = first_of(errors)
            self._fail(failure)
            raise failure from None

    async def _heal(self) -> None:
        """What was lost to damage is here again, and durable: this node is what it was."""
        if self.impaired_until is not None:
            self.durable.watchers.append(self._impairment)
            await self._impairment.whole.wait()
            await clear_impaired(self._disk)
            self.durable.watchers.remove(self._impairment)
            self.impaired_until = None
            _logger.info("caught up with a leader after the damage: this node votes again", position=self.durable.value)

    async def close(self) -> None:
        """After `run` has ended: the rest becomes durable, and a mark says so. After a failure it only closes."""
        try:
            if self._writer.failure is None:
                await self._committer.finish()
        finally:
            self._store.close()

    def _fail(self, error: DiskFailed) -> None:
        self._writer.failure = self._writer.refusal = error
        self._visibility.fail_forever(error)

    # Where it stands

    @property
    def state(self) -> State:
        """The fold up to `end`."""
        return self._writer.state

    @property
    def end(self) -> Position:
        """The appended end."""
        return self._writer.end

    @property
    def end_checksum(self) -> Checksum:
        """The chain value at `end`."""
        return self._writer.end_checksum

    @property
    def durable_checksum(self) -> Checksum:
        """The chain value at the durable end."""
        return self._visibility.durable_checksum

    @property
    def start(self) -> Position:
        """The first position that is held here."""
        return self._store.list[0].start if self._store.list else self.end

    @property
    def lasting(self) -> bool:
        """Is something durable here that the next start will find? A log is begun with its first epoch: what is less
        than that it takes for nothing."""
        history = self.state.history
        return bool(history) and self.durable.value > max(self.start, history[0].start)

    @property
    def segments(self) -> int:
        return len(self._store.list)

    @property
    def pending_bytes(self) -> int:
        """Appended and not yet with the disk."""
        return self._committer.pending_bytes

    @property
    def full(self) -> bool:
        """Below the floor of free space."""
        return self._committer.full

    def committed_offset(self, topic: str, partition: int) -> Offset:
        return require(self.state.find(topic, partition), topic, partition).committed_offset

    def end_offset(self, topic: str, partition: int) -> Offset:
        return require(self.state.find(topic, partition), topic, partition).next_offset

    def log_start_offset(self, topic: str, partition: int) -> Offset:
        return require(self.state.find(topic, partition), topic, partition).start_offset

    # Appending, as the leader

    def found(self, cluster_id: str) -> None:
        """The log is brand-new, and this node will write its first frame."""
        assert not self._store.list, "a log is founded once"
        self.cluster_id = self._committer.cluster_id = cluster_id

    def begin_epoch(self, epoch: Epoch, change: EpochStart) -> Appended:
        """From here on what is appended carries this epoch, and is accepted. Raises NotLeader for an epoch that is
        over."""
        assert self.cluster_id, "found() comes first"
        start = self._writer.begin_epoch(epoch, change)
        if change.accept_loss:  # what this log holds is the history from here on
            self._impairment.whole_at(start.end, self.durable.value)
        return start

    def append_batch(self, topic: str, partition: int, batch: Buffer, *, record_count: int) -> Appended:
        """Give one record batch (v2), which the caller has checked, its place. Returns at once; `durable` says when
        it survived. Raises DiskFull, NotLeader, OutOfRange, BadFrame (too large)."""
        return self._writer.append_batch(topic, partition, batch, record_count)

    def append_change(self, change: Change) -> Appended:
        """Give a change of state its place. Raises DiskFull, NotLeader, BadFrame."""
        return self._writer.append_change(change)

    def stop_accepting(self, error: ChronikError) -> None:
        """Deposed or draining: appends raise it, and those who wait now get it."""
        self._writer.refusal = self._writer.failure or error
        self._visibility.fail(error)

    def accept(self) -> None:
        self._writer.refusal = self._writer.failure

    # As a follower

    def append_received(self, data: memoryview) -> int:
        """Check and append all whole frames at the start of `data`; returns the bytes consumed. Raises BadFrame,
        DiskFull.

        A segment-start frame among them starts a new segment here too. Whoever gave the bytes does not change them
        as long as a view on them lives: the disk takes them from there.
        """
        return self._writer.append_received(data)

    def met_leader(self, end: Position) -> None:
        """This log is a part of a leader's now, whose log ended at `end` when it dialled. A log that was damaged is
        what it was once it is durable to there (mending.Impairment says why)."""
        self._impairment.whole_at(end, self.durable.value)

    async def begin_at(self, position: Position, chain: Checksum, cluster_id: str) -> None:
        """Forget everything and start anew at a segment start of the leader's."""
        async with self._committer.alone(), self._committer.sealing:
            self._committer.discard()
            self.cluster_id = self._committer.cluster_id = cluster_id
            await self._start_empty(position, chain)

    async def _start_empty(self, position: Position, chain: Checksum) -> None:
        await forget_from(self._disk, self._store, self._committer, ORIGIN)
        self._committer.start_at(None, position, None)
        self._writer.continue_at(position, chain, State(), None)
        self._visibility.reset(position, chain, position)

    async def truncate(self, to: Position, *, lost: bool = False) -> None:
        """Cut everything from `to` on. `lost`: it may be below the high watermark, and what is cut is kept in lost/.

        Nothing may be appended meanwhile. Raises OutOfRange if no frame ends there, or (without `lost`) if that is
        below the high watermark.
        """
        if to == self.end:
            return
        if not self.start <= to <= self.end or await self.checksum_at(to) is None:
            raise OutOfRange(
                f"cannot truncate to {to}: no frame ends there; the log is from {self.start} to {self.end}"
            )
        if to < self.committed.value and not lost:
            raise OutOfRange(f"cannot truncate to {to}: it is committed up to {self.committed.value}")
        await self.durable.wait(self.end)
        async with self._committer.alone(), self._committer.sealing:
            if lost:
                await keep_lost(self._disk, self._store, to, self.end)
            await self._cut(to)

    async def _cut(self, to: Position) -> None:
        if to == self.start:
            await self._start_empty(to, self._store.list[0].chain)
            return
        high_watermark = min(self.committed.value, to)
        self.committed.reset(high_watermark)
        await cut(self._disk, self._store, self._committer, to, self.settings.segment_bytes)
        replayed = await replay(self._store, to, high_watermark)
        if replayed.end != to:
            name = self._store.holding(replayed.end).name
            raise CorruptLog(
                f"{name}: damaged at position {replayed.end}: {replayed.why}", file=name, start=replayed.end
            )
        self._adopt(replayed, high_watermark)
        await look_at_head(self._store, self._store.list[-1])
        await self._housekeeper.raise_starts(after=self.start)

    async def replace_segment(self, start: Position, pieces: AsyncIterable[bytes]) -> None:
        """Repair: the sealed segment at `start` gets new bytes, the stream from its start to its end, in any pieces.

        They are checked before they take its place. Raises CorruptLog if they are not what should stand there,
        OutOfRange if there is no such segment. Readers that are in the old file finish with it.
        """
        segment = self._store.holding(start)
        if segment.start != start:
            raise OutOfRange(f"no segment starts at {start}")
        await Replacement(self._disk, self._store, segment, self.cluster_id or "").take(pieces)
        self.damage = [damage for damage in self.damage if damage.file != segment.name]

    def commit_to(self, position: Position) -> None:
        """The high watermark, as the role knows it. Never back; never shown above what is durable here."""
        self._visibility.commit_to(position)

    # Reading

    async def read(self, position: Position, size_max: int) -> bytes:
        """The stream's bytes from `position`, up to the end of its segment, as far as they are durable here."""
        return await self._reader.read(position, size_max, self.durable.value)

    async def read_into(self, position: Position, buffer: memoryview) -> int:
        """As `read`, into a buffer of the caller's."""
        return await self._reader.read_into(position, buffer, self.durable.value)

    async def segment_bounds(self, position: Position) -> tuple[Position, Position, Checksum]:
        """Of the segment that holds `position`: start, end, and the chain value at its start."""
        segment = self._store.holding(position)
        return segment.start, segment.end, segment.chain

    async def checksum_at(self, position: Position) -> Checksum | None:
        """The chain value at a frame boundary; None if no frame ends there. Raises OutOfRange."""
        if position == self.end:
            return self.end_checksum
        return await self._reader.checksum_at(position)

    async def fetch(
        self, topic: str, partition: int, offset: int, bytes_max: int, *, upto: Position | None = None
    ) -> Fetched:
        """Whole batches from the one that holds `offset` on, below the high watermark (and `upto`); at least one, even
        if it is larger than `bytes_max`. Empty from the high watermark to the next offset. Raises OutOfRange."""
        part = require(self.state.find(topic, partition), topic, partition)
        if not part.start_offset <= offset <= part.next_offset:
            raise OutOfRange(
                f"offset {offset} of {topic}/{partition}: the log has {part.start_offset} to {part.next_offset}"
            )
        committed = part.committed_offset
        limit = self.committed.value if upto is None else min(upto, self.committed.value)
        batches = await self._reader.fetch(part, Offset(offset), bytes_max, committed, limit)
        next_offset = Offset(offset)
        if batches:
            base, _, _, _, _, _, last_delta, _, _, _, _, _, _ = BATCH.unpack_from(batches[-1])
            next_offset = Offset(base + last_delta + 1)
        return Fetched(batches, next_offset, committed, part.start_offset)

    async def offset_for_time(self, topic: str, partition: int, timestamp_ms: int) -> tuple[Offset, int] | None:
        """The first committed batch with a record at or after this time: its base offset and its newest timestamp."""
        part = require(self.state.find(topic, partition), topic, partition)
        return await self._reader.offset_for_time(part, timestamp_ms, part.committed_offset)

    # Retention and damage

    def retention_due(self, now_ms: int, members_durable: Sequence[Position]) -> Position | None:
        """Where the log should start from now on, by the settings; None if nothing is to go. The leader then appends
        LogStartMoved, and every node removes the segments before it once that is committed."""
        held = [Held(s.start, s.first_timestamp_ms, s.snapshot_whole) for s in self._store.list]
        due = retention_due(held, self.end, self.committed.value, members_durable, now_ms, self.settings)
        return due if due is not None and due > self.state.log_start else None

    def roll_aged(self, now_ms: int) -> bool:
        """The leader's, now and then: end a segment whose first batch is so old that retention by age would come too
        late for it; True if so. Raises NotLeader."""
        return self._writer.roll_aged(now_ms)

    async def bytes_on_disk(self) -> int:
        """Of the log's own files."""
        return sum((await self._disk.list(FOLDER)).values())

    def _note_damage(self, damage: Damage) -> None:
        known = {(d.file, d.start) for d in self.damage}
        if (damage.file, damage.start) not in known:
            self.damage.append(damage)
            _logger.error("damage", **msgspec.structs.asdict(damage))


__all__ = ["Appended", "Damage", "Fetched", "Log", "LogSettings", "LogStats", "Watermark"]
