"""A scripted life of a log on a recorded disk: appends, rolls, truncation, retention, idle marks, indexes, a stop.

Between the disk's own events the recording holds notes: what was appended, what was acked, when a truncation began
and ended. `Truth` reads them: at any point of the recording it knows which bytes a recovered log may hold and which
it must.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Awaitable, Callable, Sequence

import pytest
import trio
import trio.testing
from crc32c import crc32c

from chronik_repl.positions import Epoch, Position
from chronik_repl.wal import committer
from chronik_repl.wal.changes import EpochStart, LogStartMoved, TopicMade
from chronik_repl.wal.log import Log
from chronik_repl.wal.values import LogSettings
from tests.simulation.disk import SimDisk
from tests.simulation.medium import Event, Medium

SETTINGS = LogSettings(segment_bytes=8192, min_free_bytes=0, scrub_mb_per_s=0)
CLUSTER = "crash-test"
BATCH = struct.Struct(">qiibIhiqqqhii")


def batch(records: int, size: int, fill: int = 120) -> bytes:
    """A record batch (v2) whose records are not meant to be read: the log never looks."""
    tail = BATCH.pack(0, 0, 0, 0, 0, 0, records - 1, 1_000, 2_000, -1, -1, -1, records)[21:] + bytes([fill]) * size
    return BATCH.pack(0, len(tail) + 9, 0, 2, crc32c(tail), 0, 0, 0, 0, 0, 0, 0, 0)[:21] + tail


async def scripted_life(disk: SimDisk) -> None:
    """Deterministic for a seed; about 40 groups in 10 segments."""
    rng = disk.rng
    medium = disk.medium
    disk.lock()
    log = await Log.open(disk, SETTINGS, CLUSTER, clock_ms=lambda: 1_000_000 + int(trio.current_time() * 1000))
    log.listeners.append(lambda position, frame, _: medium.note("appended", position, bytes(frame)))

    advance = log.durable.advance

    def note_ack(to: Position) -> None:
        advance(to)
        medium.note("acked", log.durable.value)

    log.durable.advance = note_ack  # type: ignore[method-assign]
    async with trio.open_nursery() as nursery:
        await nursery.start(log.run)
        log.found(CLUSTER)
        log.begin_epoch(Epoch(1), EpochStart(1, "directory"))
        log.append_change(TopicMade("t", 2))
        await append_some(log, rng, 12)
        log.commit_to(log.durable.value)
        await trio.sleep(0.2)  # an idle mark
        await append_some(log, rng, 12)
        kept = log.durable.value
        for n in range(4):
            log.append_batch("t", 0, batch(2, 300, n), record_count=2)
        await log.durable.wait(log.end)
        medium.note("truncating", kept)
        await log.truncate(kept)
        medium.note("truncated", kept)
        log.begin_epoch(Epoch(2), EpochStart(1, "directory"))
        await append_some(log, rng, 10)
        log.commit_to(log.durable.value)
        appended = log.append_change(LogStartMoved(await segment_start(log, log.durable.value - 25_000)))
        await log.durable.wait(appended.end)
        log.commit_to(log.durable.value)  # old segments go
        await append_some(log, rng, 8)
        # Truncation over a segment's start: whole files go.
        start, _, _ = await log.segment_bounds(log.durable.value)
        target = Position(start)
        if target > log.committed.value:
            medium.note("truncating", target)
            await log.truncate(target)
            medium.note("truncated", target)
            log.begin_epoch(Epoch(3), EpochStart(1, "directory"))
        await append_some(log, rng, 8)
        log.commit_to(log.durable.value)
        await trio.sleep(0.5)  # seals and indexes
        await log.close()
        nursery.cancel_scope.cancel()
    disk.close()


async def append_some(log: Log, rng: random.Random, groups: int) -> None:
    for _ in range(groups):
        for _ in range(rng.choice((1, 1, 2, 5))):
            size = rng.choice((10, 100, 700, 1500))
            log.append_batch("t", rng.randrange(2), batch(3, size, rng.randrange(256)), record_count=3)
        if rng.random() < 0.7:
            await log.durable.wait(log.end)
        else:
            await trio.sleep(0.0003)
    await log.durable.wait(log.end)


async def segment_start(log: Log, near: int) -> int:
    start, _, _ = await log.segment_bounds(Position(max(near, log.start)))
    return start


def record_life(seed: int, disk_type: type[SimDisk] = SimDisk) -> list[Event]:
    """The events of one life."""
    events: list[Event] = []

    async def main() -> None:
        disk = disk_type(random.Random(seed))
        recorded = disk.record()
        await scripted_life(disk)
        events.extend(recorded)

    run_deterministically(main, seed)
    return events


def run_deterministically(main: Callable[[], Awaitable[None]], seed: int) -> None:
    """One seed, one story: simulated time, and trio's own dice thrown by the seed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trio._core._run, "_ALLOW_DETERMINISTIC_SCHEDULING", True)
        patch.setattr(committer, "EARLY_BYTES", 500)  # the groups here are small, and two shall be under way
        trio._core._run._r.seed(seed)
        trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


class Truth:
    """What a recovered log must and may be, by the notes so far."""

    def __init__(self) -> None:
        self.stream = bytearray()  # what was appended, from position 0
        self.before: bytes | None = None  # while a truncation runs: what it was before
        self.acked = 0

    def hear(self, event: Event) -> None:
        name, what = event
        if name != "note":
            return
        match what:
            case ("appended", int(position), bytes(frame)):
                del self.stream[position:]
                self.stream += frame
            case ("acked", int(end)):
                self.acked = max(self.acked, end)
            case ("truncating", int(to)):
                self.before = bytes(self.stream)
                del self.stream[to:]
                self.acked = to
            case ("truncated", int()):
                self.before = None

    def complaint(self, start: int, data: bytes) -> str:
        """What is wrong with a log that holds these bytes from `start` on; "" if nothing is."""
        end = start + len(data)
        if end < self.acked:
            return f"acked up to {self.acked}, recovered only to {end}"
        for stream in (self.stream, self.before):
            if stream is not None and end <= len(stream) and stream[start:end] == data:
                return ""
        return f"the bytes from {start} to {end} are not those that were appended"


async def recovered(medium: Medium) -> tuple[int, bytes]:
    """Open the log that this medium holds; all that it says it has."""
    disk = SimDisk(random.Random(0), medium)
    log = await Log.open(disk, SETTINGS, CLUSTER, clock_ms=lambda: 1_000_000 + int(trio.current_time() * 1000))
    pieces = []
    position = log.start
    while position < log.end:
        piece = await log.read(position, 1 << 20)
        assert piece, f"no bytes at {position} of a log that ends at {log.end}"
        pieces.append(piece)
        position = Position(position + len(piece))
    assert log.durable.value == log.end, "what a log shows after opening is durable"
    return log.start, b"".join(pieces)


def appended_total(events: Sequence[Event]) -> int:
    return sum(1 for name, what in events if name == "note" and what[0] == "appended")
