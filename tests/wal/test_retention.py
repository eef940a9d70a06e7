"""Which segments go, and when; the decision alone, and the log that follows it."""

from __future__ import annotations

import pytest
import trio

from chronik_repl.errors import NotLeader, OutOfRange
from chronik_repl.positions import Position
from chronik_repl.wal.changes import LogStartMoved
from chronik_repl.wal.log import Log, LogSettings
from chronik_repl.wal.retention import HOUR_MS, Held, retention_due, roll_due
from tests.wal.workbench import (
    SETTINGS,
    Place,
    all_sealed,
    batch,
    fetch_all,
    lead,
    opened,
    segment_names,
    settle,
    write_segments,
    write_some,
)

END = Position(1000)
SEGMENTS = [Held(Position(start), start * 1000, True) for start in range(0, 1000, 100)]
EVERYONE = [END, END]


def due(
    *,
    segments: list[Held] = SEGMENTS,
    committed: int = 1000,
    members: list[Position] = EVERYONE,
    now_ms: int = 0,
    retention_bytes: int = 0,
    hours: float = 0,
    keep_bytes: int = 10**9,
) -> int | None:
    settings = LogSettings(retention_bytes=retention_bytes, retention_hours=hours, keep_bytes=keep_bytes)
    return retention_due(segments, END, Position(committed), members, now_ms, settings)


def test_by_size() -> None:
    assert due(retention_bytes=0) is None
    assert due(retention_bytes=300) == 700
    assert due(retention_bytes=301) == 600, "at least as much as asked for stays"
    assert due(retention_bytes=1) == 900, "the active segment stays"
    assert due(retention_bytes=5000) is None


def test_by_age() -> None:
    assert due(hours=1, now_ms=HOUR_MS + 500_000) == 400
    assert due(hours=1, now_ms=HOUR_MS + 500_001) == 500
    assert due(hours=1, now_ms=HOUR_MS) is None
    assert due(hours=0, now_ms=10**15) is None


def test_never_what_a_member_needs_but_within_bounds() -> None:
    slow = [END, Position(250)]
    assert due(retention_bytes=300, members=slow) == 200
    assert due(retention_bytes=300, members=slow, keep_bytes=500) == 500
    assert due(retention_bytes=300, members=slow, keep_bytes=100) == 700
    assert due(retention_bytes=300, members=[Position(0)]) is None
    assert due(retention_bytes=300, members=[]) == 700


def test_never_above_the_high_watermark() -> None:
    assert due(retention_bytes=300, committed=450) == 400


def test_only_where_a_log_may_begin() -> None:
    torn = [held._replace(may_begin=held.start != 700) for held in SEGMENTS]
    assert due(segments=torn, retention_bytes=300) == 600
    assert due(segments=[]) is None


def test_a_segment_ends_an_eighth_of_the_retention_time_after_its_first_batch() -> None:
    week, month, never = (LogSettings(retention_hours=hours) for hours in (168, 720, 0))
    assert not roll_due(0, 21 * HOUR_MS, week)
    assert roll_due(0, 21 * HOUR_MS + 1, week)
    assert not roll_due(0, 24 * HOUR_MS, month)
    assert roll_due(0, 24 * HOUR_MS + 1, month), "a day at most"
    assert not roll_due(None, 10**15, week), "nothing in it is to go"
    assert not roll_due(0, 10**15, never)


async def test_what_an_idle_log_holds_goes_in_time(place: Place) -> None:
    """A batch, and then nothing for days: it stood in the active segment and never went."""
    settings = LogSettings(segment_bytes=8192, min_free_bytes=0, retention_hours=80, scrub_mb_per_s=0)
    hour = 0
    disk = place.disk()
    log = await Log.open(disk, settings, "workbench", clock_ms=lambda: hour * HOUR_MS)
    gone_at: int | None = None
    async with trio.open_nursery() as nursery:
        await nursery.start(log.run)
        lead(log)
        log.append_batch("t", 0, batch(3), record_count=3)
        await settle(log)
        for hour in range(1, 500):
            log.roll_aged(hour * HOUR_MS)
            due = log.retention_due(hour * HOUR_MS, [log.end])
            if due is not None:
                log.append_change(LogStartMoved(due))
                gone_at = hour
            await settle(log)
        assert gone_at == 11 + 80 + 1, "rolled after ten hours, gone eighty later"
        await removed(log, 1)
        assert log.segments == 1, "and without batches no segment ends by its age"
        assert log.log_start_offset("t", 0) == log.end_offset("t", 0) == 3
        nursery.cancel_scope.cancel()
    await log.close()
    disk.close()


async def test_the_age_of_the_active_segment_is_known_after_a_restart(place: Place) -> None:
    settings = LogSettings(segment_bytes=8192, min_free_bytes=0, retention_hours=80, scrub_mb_per_s=0)
    async with opened(place, settings) as log:
        lead(log)
        first = log.append_batch("t", 0, batch(3), record_count=3).timestamp_ms
        await settle(log)
    async with opened(place, settings) as log:
        with pytest.raises(NotLeader):
            log.roll_aged(first)
        lead(log, 2)
        assert not log.roll_aged(first + 10 * HOUR_MS)
        assert log.roll_aged(first + 10 * HOUR_MS + 1)
        assert not log.roll_aged(first + 100 * HOUR_MS)
        await settle(log)
        assert log.segments == 2


async def removed(log: Log, count: int) -> None:
    with trio.fail_after(10):
        while log.stats.segments_removed < count:
            await trio.sleep(0.001)


async def test_segments_go_once_the_new_start_is_committed(place: Place) -> None:
    settings = LogSettings(segment_bytes=8192, min_free_bytes=0, retention_bytes=20_000, scrub_mb_per_s=0)
    async with opened(place, settings) as log:
        lead(log)
        await write_segments(log, 6)
        everything = await fetch_all(log, "t", 0)
        start = log.retention_due(0, [log.end])
        assert start is not None
        assert log.end - start >= 20_000
        appended = log.append_change(LogStartMoved(start))
        assert log.retention_due(0, [log.end]) is None, "it is decided"
        await log.durable.wait(appended.end)
        assert log.start == 0, "not committed yet"
        log.commit_to(appended.end)
        gone = sum(int(name[4:24]) < start for name in segment_names(place))
        await removed(log, gone)
        assert log.start == start
        first = log.log_start_offset("t", 0)
        assert await fetch_all(log, "t", 0) == everything[first // 3 :]
        with pytest.raises(OutOfRange):
            await log.fetch("t", 0, first - 1, 100)
        with pytest.raises(OutOfRange):
            await log.read(Position(0), 100)
    assert int(segment_names(place)[0][4:24]) == start
    assert not [name for name in place.names() if name.endswith(".idx") and int(name[4:24]) < start]
    async with opened(place, settings) as log:
        assert log.start == start
        assert log.log_start_offset("t", 0) == first
        assert await fetch_all(log, "t", 0) == everything[first // 3 :]


async def test_a_start_that_was_committed_before_a_crash_is_done_after_it(place: Place) -> None:
    async with opened(place, run=False) as log:
        lead(log)
        for _ in range(200):
            log.append_batch("t", 0, batch(3), record_count=3)
        start = log._store.list[2].start
        log.append_change(LogStartMoved(start))
        end = log.end
    async with opened(place) as log:
        assert log.start == 0
        log.commit_to(end)
        await removed(log, 2)
        assert log.start == start


async def test_kf28_a_segment_that_is_read_stays_until_it_was_read(place: Place) -> None:
    async with opened(place) as log:
        lead(log)
        await write_segments(log, 4)
        first = log._store.list[0]
        async with log._store.pinned(first) as file:
            log.append_change(LogStartMoved(log._store.list[2].start))
            await settle(log)
            await trio.testing.wait_all_tasks_blocked(0.05)
            assert first.name in place.names()
            assert await log._disk.read(file, first.file_offset(first.start), 10)
        await removed(log, 2)
        assert first.name not in place.names()


async def test_a_partition_that_is_quiet_since_before_the_start_is_empty(place: Place) -> None:
    async with opened(place) as log:
        lead(log)
        log.append_batch("t", 1, batch(3), record_count=3)
        await settle(log)
        while log.segments < 4:
            await write_some(log, 10, partitions=1)
        await all_sealed(log)
        log.append_change(LogStartMoved(log._store.list[2].start))
        await settle(log)
        await removed(log, 2)
        assert (log.log_start_offset("t", 1), log.end_offset("t", 1)) == (3, 3)
        assert (await log.fetch("t", 1, 3, 100)).batches == []
        with pytest.raises(OutOfRange):
            await log.fetch("t", 1, 2, 100)
        log.append_batch("t", 1, batch(3), record_count=3)
        await settle(log)
        assert (await log.fetch("t", 1, 3, 100)).next_offset == 6


def test_segments_larger_than_an_index_can_say_are_refused() -> None:
    with pytest.raises(ValueError, match="segment_bytes"):
        LogSettings(segment_bytes=1 << 33)
    assert SETTINGS.segment_bytes == 8192
