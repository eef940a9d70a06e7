"""A disk that fails under the log: everybody who waits hears of it, nobody gets an ack, a restart tells the truth."""

from __future__ import annotations

import random

import pytest
import trio

from chronik_repl.errors import DiskFailed, DiskFull
from chronik_repl.positions import Epoch, Position
from chronik_repl.wal.changes import EpochStart, TopicMade
from chronik_repl.wal.log import Log
from chronik_repl.wal.values import LogSettings
from tests.crash.scenario import CLUSTER, batch
from tests.simulation.disk import SimDisk

SETTINGS = LogSettings(segment_bytes=64 * 1024, min_free_bytes=0, scrub_mb_per_s=0)


async def opened(disk: SimDisk, settings: LogSettings = SETTINGS) -> Log:
    return await Log.open(disk, settings, CLUSTER)


async def lead(log: Log, nursery: trio.Nursery) -> None:
    await nursery.start(run_until_it_fails, log)
    if not log.state.history:
        log.found(CLUSTER)
    log.begin_epoch(Epoch(len(log.state.history) + 1), EpochStart(1, "directory"))
    if "t" not in log.state.topics:
        log.append_change(TopicMade("t", 1))
    await log.durable.wait(log.end)


async def run_until_it_fails(log: Log, task_status: trio.TaskStatus[None]) -> None:
    try:
        await log.run(task_status=task_status)
    except* DiskFailed:
        pass


async def append_until_refused(log: Log) -> None:
    for n in range(1000):
        await log.durable.wait(log.append_batch("t", 0, batch(1, 1500, n % 256), record_count=1).end)
        await trio.sleep(0.1)  # the floor is looked at about once a second


async def test_kf16_all_who_wait_for_one_group_fail(autojump_clock: trio.testing.MockClock) -> None:
    """Several producers, one group, one failed sync: no one gets an ack, now or later."""
    disk = SimDisk(random.Random(1))
    log = await opened(disk)
    outcomes: list[str] = []

    async def produce(n: int) -> None:
        end = log.append_batch("t", 0, batch(1, 100, n), record_count=1).end
        try:
            await log.durable.wait(end)
            outcomes.append("acked")
        except DiskFailed:
            outcomes.append("failed")

    async with trio.open_nursery() as nursery:
        await lead(log, nursery)
        acked = log.durable.value
        disk.fail_sync_in(1)
        for n in range(10):
            nursery.start_soon(produce, n)
    assert outcomes == ["failed"] * 10
    assert log.durable.value == acked
    with pytest.raises(DiskFailed):
        log.append_batch("t", 0, batch(1, 100), record_count=1)
    with pytest.raises(DiskFailed):
        await log.durable.wait(Position(acked + 1))


async def test_kf15_after_a_failed_sync_nothing_is_acked_and_the_restart_tells(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """The failed group's pages are clean: they look written and may vanish. Recovery writes them again or cuts them,
    and what it shows survives the next power cut."""
    for seed in range(30):
        disk = SimDisk(random.Random(seed))
        log = await opened(disk)
        async with trio.open_nursery() as nursery:
            await lead(log, nursery)
            disk.fail_sync_in(seed % 3 + 1)
            try:
                for n in range(10):
                    await log.durable.wait(log.append_batch("t", 0, batch(1, 900, n), record_count=1).end)
            except DiskFailed:
                pass
            nursery.cancel_scope.cancel()
        acked = log.durable.value
        if seed % 2:
            disk.crash()
        else:
            disk.power_cut()
        disk = disk.reopen()
        again = await opened(disk)
        assert again.end >= acked
        end, checksum = again.end, again.end_checksum
        disk.crash()
        disk.medium.cut(lambda *_: False)
        third = await opened(disk.reopen())
        assert (third.end, third.end_checksum) == (end, checksum)


async def test_kf17_no_space_in_mid_frame_and_the_restart_once_there_is_space(
    autojump_clock: trio.testing.MockClock,
) -> None:
    disk = SimDisk(random.Random(1))
    disk.capacity_bytes = 60_000
    log = await opened(disk)
    async with trio.open_nursery() as nursery:
        await lead(log, nursery)
        with pytest.raises((DiskFailed, DiskFull), match="pace"):
            await append_until_refused(log)
        nursery.cancel_scope.cancel()
    acked = log.durable.value
    assert acked > 10_000
    disk.crash()
    disk = disk.reopen()
    disk.capacity_bytes = 10_000_000
    log = await opened(disk)
    assert log.end >= acked
    async with trio.open_nursery() as nursery:
        await lead(log, nursery)
        await log.durable.wait(log.append_batch("t", 0, batch(1, 1500), record_count=1).end)
        nursery.cancel_scope.cancel()


async def test_below_the_floor_appends_are_refused_and_reads_go_on(autojump_clock: trio.testing.MockClock) -> None:
    disk = SimDisk(random.Random(1))
    settings = LogSettings(segment_bytes=16 * 1024, min_free_bytes=100_000, scrub_mb_per_s=0)
    disk.capacity_bytes = 300_000
    log = await opened(disk, settings)
    async with trio.open_nursery() as nursery:
        await lead(log, nursery)
        with pytest.raises(DiskFull):
            await append_until_refused(log)
        assert disk.free_bytes() > 0, "refused by the floor, not by the device"
        log.commit_to(log.durable.value)
        fetched = await log.fetch("t", 0, log.end_offset("t", 0) - 1, 1)
        assert len(fetched.batches) == 1
        disk.capacity_bytes = 10_000_000
        with trio.fail_after(60):
            while True:
                await trio.sleep(0.5)
                try:
                    await log.durable.wait(log.append_batch("t", 0, batch(1, 1500), record_count=1).end)
                    break
                except DiskFull:
                    continue
        nursery.cancel_scope.cancel()
