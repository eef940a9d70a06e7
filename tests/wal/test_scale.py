"""Large logs: opening one reads little, a quiet partition costs its own bytes, memory does not grow with records."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest
import trio

from chronik_repl.positions import Position
from chronik_repl.wal.changes import TopicMade
from chronik_repl.wal.disk import File, RealDisk
from chronik_repl.wal.log import Log, LogSettings
from tests.wal.workbench import RealPlace, SimPlace, all_sealed, batch, fetch_all, lead, opened, settle

WIDE = LogSettings(segment_bytes=1 << 18, min_free_bytes=0, scrub_mb_per_s=0)


async def make_wide(place: RealPlace, partitions: int, segments: int) -> None:
    async with opened(place, WIDE) as log:
        lead(log, topics={})
        for name in range(partitions // 100):
            log.append_change(TopicMade(f"topic-{name}", 100))
        number = 0
        while log.segments < segments:
            topic, partition = f"topic-{number // 100 % (partitions // 100)}", number % 100
            log.append_batch(topic, partition, batch(3, 30_000), record_count=3)
            number += 1
            if number % 50 == 0:
                await settle(log)
        await settle(log)
        await all_sealed(log)


async def test_opening_10_000_partitions_and_100_segments_takes_under_2_s(tmp_path: Path) -> None:
    place = RealPlace(tmp_path)
    await make_wide(place, 10_000, 100)
    took = []
    for _ in range(3):
        disk = place.disk()
        started = trio.current_time()
        log = await Log.open(disk, WIDE, None)
        took.append(trio.current_time() - started)
        assert log.segments == 100
        assert sum(1 for _ in log.state.partitions()) == 10_000
        assert (await log.fetch("topic-0", 42, 0, 100)).batches
        await log.close()
        disk.close()
    assert min(took) < 2.0, took  # the machine may be busy with what was just written


async def test_a_quiet_partition_among_1000_reads_at_most_twice_its_own_bytes(tmp_path: Path) -> None:
    place = RealPlace(tmp_path)
    async with opened(place, WIDE) as log:
        lead(log, topics={"busy": 999, "quiet": 1})
        for number in range(4000):
            log.append_batch("busy", number % 999, batch(3, 1000), record_count=3)
            if number % 300 == 0:
                log.append_batch("quiet", 0, batch(3, 1000), record_count=3)
            if number % 100 == 0:
                await settle(log)
        await settle(log)
        await all_sealed(log)
        assert log.segments > 3
    async with opened(place, WIDE, run=False) as log:
        before = log.stats.read_bytes
        batches = await fetch_all(log, "quiet", 0, bytes_max=1 << 20)
        own = sum(len(one) for one in batches)
        assert len(batches) == 14
        assert log.stats.read_bytes - before <= 2 * own


async def test_memory_does_not_grow_with_records_while_the_high_watermark_stands_still(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("chronik_repl.wal.visibility.PENDING_MAX", 1000)
    place = SimPlace()
    settings = LogSettings(segment_bytes=100_000, min_free_bytes=0, scrub_mb_per_s=0)
    async with opened(place, settings) as log:
        lead(log)
        for number in range(20_000):
            log.append_batch("t", number % 2, batch(3, 100), record_count=3)
            if number % 500 == 0:
                await log.durable.wait(log.end)
        await log.durable.wait(log.end)
        assert len(log._visibility._pending) < 3000
        middle = Position(log.end // 2)
        log.commit_to(middle)
        shown = log.committed_offset("t", 0)
        assert 0 < shown <= 15_100, "never ahead of the high watermark"
        log.commit_to(log.end)
        assert log.committed_offset("t", 0) == log.end_offset("t", 0) == 30_000
        assert len(log._visibility._pending) == 0


async def test_what_is_kept_of_sealed_segments_is_small(tmp_path: Path) -> None:
    place = RealPlace(tmp_path)
    await make_wide(place, 1000, 30)
    tracemalloc.start()
    try:
        disk = place.disk()
        log = await Log.open(disk, WIDE, None)
        current, _ = tracemalloc.get_traced_memory()
        await log.close()
        disk.close()
    finally:
        tracemalloc.stop()
    assert current < 3_000_000, f"{current} bytes for 30 segments of log"


class CountsReads(RealDisk):
    """How many bytes of segments were read."""

    read_bytes = 0

    async def read(self, file: File, at: int, size: int) -> bytes:
        self.read_bytes += size
        return await super().read(file, at, size)

    async def read_into(self, file: File, at: int, buffer: memoryview) -> int:
        self.read_bytes += len(buffer)
        return await super().read_into(file, at, buffer)


async def test_a_high_watermark_far_behind_does_not_make_opening_read_what_is_between(tmp_path: Path) -> None:
    place = RealPlace(tmp_path)
    settings = LogSettings(segment_bytes=100_000, min_free_bytes=0, scrub_mb_per_s=0)
    async with opened(place, settings) as log:
        lead(log, topics={"t": 2, "late": 1})
        for _ in range(10):
            log.append_batch("t", 0, batch(3, 1000), record_count=3)
        await settle(log)
        shown = log.committed.value
        for number in range(3000):
            topic = "late" if number == 1500 else "t"
            partition = 0 if topic == "late" else number % 2
            log.append_batch(topic, partition, batch(3, 1000), record_count=3)
            if number % 100 == 0:
                await log.durable.wait(log.end)
        await log.durable.wait(log.end)
        await all_sealed(log)
        assert log.segments > 25
        ends = [(p.topic, p.partition, p.next_offset) for p in log.state.partitions()]
        bounds = [segment.end for segment in log._store.list]
    disk = CountsReads(tmp_path)
    log = await Log.open(disk, settings, None)
    assert disk.read_bytes < 800_000, f"{disk.read_bytes} of {log.end}"
    assert log.committed.value == shown
    assert [(p.topic, p.partition, p.next_offset) for p in log.state.partitions()] == ends
    assert (log.committed_offset("t", 0), log.committed_offset("t", 1), log.committed_offset("late", 0)) == (30, 0, 0)
    before = (0, 0)
    for end in bounds:
        log.commit_to(Position(end - 1))
        offsets = (log.committed_offset("t", 0), log.committed_offset("t", 1))
        assert offsets >= before
        before = offsets
        log.commit_to(end)
    assert [(p.topic, p.partition, p.committed_offset) for p in log.state.partitions()] == ends
    await log.close()
    disk.close()
    for name in place.names():
        if name.endswith(".idx"):
            place.remove(name)
    async with opened(place, settings, run=False) as log:
        assert log.committed_offset("t", 0) == ends[0][2]
