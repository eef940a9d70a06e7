"""What the log promises to those who append and read, on both disks."""

from __future__ import annotations

import contextlib
import random

import pytest
import trio
import trio.testing

from chronik_repl.errors import DiskFull, NotLeader, OutOfRange
from chronik_repl.positions import CHAIN_SEED, ORIGIN, Epoch, Position
from chronik_repl.wal.changes import (
    CommittedOffset,
    EpochStart,
    OffsetsCommitted,
    ProducerIdGiven,
    TopicMade,
    TopicRemoved,
)
from chronik_repl.wal.committer import SPARE
from chronik_repl.wal.disk import File
from chronik_repl.wal.frame import BadFrame, Kind
from chronik_repl.wal.log import Log, LogSettings
from chronik_repl.wal.segment import BLOCK, best_mark
from tests.simulation.disk import SimDisk
from tests.wal.workbench import (
    CLUSTER,
    SETTINGS,
    Place,
    SimPlace,
    all_sealed,
    batch,
    fetch_all,
    frames_of,
    lead,
    opened,
    segment_names,
    settle,
    stream_of,
    write_segments,
    write_some,
)


async def test_an_empty_directory_is_an_empty_log(place: Place) -> None:
    async with opened(place) as log:
        assert (log.start, log.end, log.end_checksum, log.segments) == (0, 0, CHAIN_SEED, 0)
        assert log.durable.value == log.committed.value == 0
    assert segment_names(place) == []


async def test_append_gives_a_place_at_once_and_durable_says_when_it_survived(place: Place) -> None:
    async with opened(place) as log:
        lead(log)
        first = log.append_batch("t", 1, batch(3), record_count=3)
        second = log.append_batch("t", 1, batch(2), record_count=2)
        assert (first.base_offset, second.base_offset) == (0, 3)
        assert second.position == first.end
        assert log.end == second.end
        assert log.durable.value == 0
        await log.durable.wait(second.end)
        assert log.durable_checksum == log.end_checksum
        assert log.committed.value == 0, "only the role commits"
        assert (await log.fetch("t", 1, 0, 1000)).batches == []
        log.commit_to(first.end)
        fetched = await log.fetch("t", 1, 0, 1000)
        assert (fetched.next_offset, fetched.high_watermark_offset, fetched.log_start_offset) == (3, 3, 0)
        log.commit_to(second.end)
        assert (await log.fetch("t", 1, 3, 1000)).next_offset == 5


async def test_the_batch_is_the_producers_but_for_base_offset_and_epoch(place: Place) -> None:
    async with opened(place) as log:
        lead(log, 7)
        log.append_batch("t", 0, batch(3), record_count=3)
        sent = batch(4, fill=65)
        log.append_batch("t", 0, sent, record_count=4)
        await settle(log)
        (got,) = (await log.fetch("t", 0, 3, 1)).batches
        assert got[:8] == (3).to_bytes(8, "big")
        assert got[12:16] == (7).to_bytes(4, "big")
        assert got[8:12] == sent[8:12]
        assert got[16:] == sent[16:]


async def test_everything_is_there_again_after_a_clean_stop(place: Place) -> None:
    async with opened(place) as log:
        lead(log)
        await write_segments(log, 3)
        log.append_change(ProducerIdGiven(41))
        await settle(log)
        before = (log.start, log.end, log.end_checksum, log.committed.value, log.state.snapshot())
        stream = await stream_of(log)
        records = [await fetch_all(log, "t", p) for p in (0, 1)]
    async with opened(place) as log:
        assert (log.start, log.end, log.end_checksum, log.committed.value, log.state.snapshot()) == before
        assert log.durable.value == log.end
        assert log.cluster_id == CLUSTER
        assert await stream_of(log) == stream
        assert [await fetch_all(log, "t", p) for p in (0, 1)] == records
        assert log.state.next_producer_id == 42


async def test_the_stream_is_one_chain_of_frames_with_a_snapshot_at_each_segments_start(place: Place) -> None:
    async with opened(place) as log:
        lead(log)
        await write_segments(log, 3)
        frames = frames_of(await stream_of(log), 0, CHAIN_SEED)
        starts = [frame.position for frame in frames if frame.kind == Kind.SEGMENT_START]
        assert [f"wal/{start:020d}.wal" for start in starts] == segment_names(place)
        assert [frame.kind for frame in frames[:3]] == [Kind.SEGMENT_START, Kind.EPOCH_START, Kind.STATE_CHANGE]
        times = [frame.timestamp_ms for frame in frames]
        assert times == sorted(times)
        for start in starts:
            assert await log.segment_bounds(Position(start)) == (
                start,
                min([s for s in starts if s > start], default=log.end),
                next(frame.previous for frame in frames if frame.position == start),
            )


async def test_the_clock_may_jump_back_and_the_logs_time_does_not(place: Place) -> None:
    now = [1000]
    disk = place.disk()
    log = await Log.open(disk, SETTINGS, CLUSTER, clock_ms=lambda: now[0])
    lead(log)
    now[0] = 5000
    assert log.append_batch("t", 0, batch(), record_count=1).timestamp_ms == 5000
    now[0] = 10
    assert log.append_batch("t", 0, batch(), record_count=1).timestamp_ms == 5000
    assert log.append_change(ProducerIdGiven(1)).timestamp_ms == 5000
    await log.close()
    disk.close()


async def test_close_makes_the_rest_durable_without_run(place: Place) -> None:
    async with opened(place, run=False) as log:
        lead(log)
        for _ in range(100):
            log.append_batch("t", 0, batch(3), record_count=3)
        end = log.end
        assert log.segments > 1
    async with opened(place) as log:
        assert log.end == end
        assert log.end_offset("t", 0) == 300


async def test_a_cancelled_run_loses_nothing_that_close_cannot_write(place: Place) -> None:
    disk = place.disk()
    log = await Log.open(disk, SETTINGS, CLUSTER)
    async with trio.open_nursery() as nursery:
        await nursery.start(log.run)
        lead(log)
        for _ in range(50):
            log.append_batch("t", 0, batch(3), record_count=3)
            await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()
    await log.close()
    disk.close()
    async with opened(place) as again:
        assert again.end == log.end
        assert again.end_checksum == log.end_checksum


async def test_offsets_and_the_high_watermark_go_by_partition(place: Place) -> None:
    async with opened(place) as log:
        lead(log)
        ends = [log.append_batch("t", p, batch(3), record_count=3).end for p in (0, 1, 0, 1)]
        await log.durable.wait(log.end)
        for end, shown in zip(ends, [(3, 0), (3, 3), (6, 3), (6, 6)], strict=True):
            log.commit_to(end)
            assert (log.committed_offset("t", 0), log.committed_offset("t", 1)) == shown
        log.commit_to(ends[0])
        assert log.committed.value == ends[-1], "never back"


async def test_what_is_committed_elsewhere_is_shown_here_once_it_is_durable_here(place: Place) -> None:
    async with opened(place) as log:
        lead(log)
        await settle(log)
        before = log.committed.value
        end = log.append_batch("t", 0, batch(3), record_count=3).end
        log.commit_to(Position(end + 1000))
        assert log.committed.value == before
        await log.committed.wait(end)
        assert log.committed.value == end
        assert log.committed_offset("t", 0) == 3


async def test_the_high_watermark_survives(place: Place) -> None:
    async with opened(place) as log:
        lead(log)
        await write_some(log, 4)
        shown = log.committed.value
        log.append_batch("t", 0, batch(3), record_count=3)
        await log.durable.wait(log.end)
    async with opened(place) as log:
        assert log.committed.value == shown < log.end
        assert (log.committed_offset("t", 0), log.end_offset("t", 0)) == (6, 9)
        log.commit_to(log.end)
        assert log.committed_offset("t", 0) == 9


async def test_a_high_watermark_segments_behind_is_found_again(place: Place) -> None:
    async with opened(place) as log:
        lead(log)
        await write_some(log, 4)
        shown = log.committed.value
        for _ in range(200):
            log.append_batch("t", 0, batch(3), record_count=3)
        await log.durable.wait(log.end)
        assert log.segments > 3
    async with opened(place) as log:
        assert log.committed.value == shown
        assert (log.committed_offset("t", 0), log.committed_offset("t", 1)) == (6, 6)
        log.commit_to(log.end)
        assert log.committed_offset("t", 0) == log.end_offset("t", 0) == 606


async def test_fetch_limits(place: Place) -> None:
    async with opened(place) as log:
        lead(log)
        for _ in range(10):
            log.append_batch("t", 0, batch(3, 300), record_count=3)
        await settle(log)
        assert len((await log.fetch("t", 0, 0, 1)).batches) == 1, "at least one, however large"
        assert len((await log.fetch("t", 0, 0, 1000)).batches) == 2
        assert len((await log.fetch("t", 0, 0, 1 << 20)).batches) == 10
        middle = await log.fetch("t", 0, 4, 1)
        assert middle.batches[0][:8] == (3).to_bytes(8, "big"), "the batch that holds the offset"
        upto = await log.fetch("t", 0, 0, 1 << 20, upto=Position(log.end - 1))
        assert (len(upto.batches), upto.next_offset) == (9, 27)
        assert (await log.fetch("t", 0, 30, 100)).batches == []
        for wrong in (("t", 0, 31), ("t", 0, -1), ("t", 2, 0), ("t", -1, 0), ("u", 0, 0)):
            with pytest.raises(OutOfRange):
                await log.fetch(*wrong, 100)


async def test_fetch_goes_over_segments(place: Place) -> None:
    async with opened(place) as log:
        lead(log)
        await write_segments(log, 4)
        for partition in (0, 1):
            small = await fetch_all(log, "t", partition, bytes_max=1)
            assert small == await fetch_all(log, "t", partition, bytes_max=1 << 20)
            assert len(small) * 3 == log.end_offset("t", partition)
            assert [int.from_bytes(one[:8], "big") for one in small] == list(range(0, 3 * len(small), 3))


async def test_reading_while_it_is_written(place: Place) -> None:
    async with opened(place) as log:
        lead(log)
        await settle(log)
        read: list[bytes] = []

        async def consume() -> None:
            offset = 0
            while offset < 600:
                await log.committed.wait_beyond(log.committed.value) if offset >= log.committed_offset("t", 0) else None
                fetched = await log.fetch("t", 0, offset, 2000)
                read.extend(bytes(one) for one in fetched.batches)
                offset = fetched.next_offset

        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(consume)
                await write_some(log, 200, partitions=1)
        assert read == await fetch_all(log, "t", 0)


async def test_offset_for_time(place: Place) -> None:
    async with opened(place) as log:
        lead(log)
        for newest in (10, 30, 20, 40):
            for _ in range(20):
                log.append_batch("t", 0, batch(3, newest=newest), record_count=3)
        await settle(log)
        assert log.segments > 1
        await all_sealed(log)
        assert await log.offset_for_time("t", 0, 5) == (0, 10)
        assert await log.offset_for_time("t", 0, 11) == (60, 30)
        assert await log.offset_for_time("t", 0, 31) == (180, 40)
        assert await log.offset_for_time("t", 0, 41) is None
        assert await log.offset_for_time("t", 1, 0) is None


async def test_checksum_at_is_known_at_every_frame_end_and_nowhere_else(place: Place) -> None:
    async with opened(place) as log:
        lead(log)
        await write_segments(log, 3)
        frames = frames_of(await stream_of(log))
        for frame in frames:
            assert await log.checksum_at(frame.position) == frame.previous
        assert await log.checksum_at(log.end) == log.end_checksum
        for frame in frames[::7]:
            assert await log.checksum_at(Position(frame.position + 1)) is None
        with pytest.raises(OutOfRange):
            await log.checksum_at(Position(log.end + 1))


async def test_nobody_appends_without_an_epoch(place: Place) -> None:
    async with opened(place) as log:
        with pytest.raises(NotLeader):
            log.append_change(TopicMade("t", 1))
        lead(log, 3)
        with pytest.raises(NotLeader):
            log.begin_epoch(Epoch(3), EpochStart(1, "directory"))
        error = NotLeader("deposed")
        end = log.append_batch("t", 0, batch(), record_count=1).end
        failures: list[BaseException] = []

        async def waits() -> None:
            try:
                await log.committed.wait(end)
            except NotLeader as error:
                failures.append(error)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(waits)
            await log.durable.wait(end)
            log.stop_accepting(error)
        assert [str(one) for one in failures] == ["deposed"]
        with pytest.raises(NotLeader, match="deposed"):
            log.append_batch("t", 0, batch(), record_count=1)
        log.accept()
        await log.durable.wait(log.append_batch("t", 0, batch(), record_count=1).end)


async def test_what_cannot_be_appended(place: Place) -> None:
    async with opened(place) as log:
        lead(log)
        end = log.end
        for topic, partition in (("u", 0), ("t", 2), ("t", -1)):
            with pytest.raises(OutOfRange):
                log.append_batch(topic, partition, batch(), record_count=1)
        with pytest.raises(BadFrame):
            log.append_batch("t", 0, batch(size=SETTINGS.frame_bytes_max), record_count=1)
        for change in (TopicMade("../etc", 1), TopicMade("", 1), TopicMade("u", 0), TopicMade("u", 10**9)):
            with pytest.raises(BadFrame):
                log.append_change(change)
        assert log.end == end


async def test_a_frame_larger_than_a_segment_has_one_to_itself(place: Place) -> None:
    async with opened(place) as log:
        lead(log)
        for size in (100, 20_000, 100, 30_000, 100):
            log.append_batch("t", 0, batch(3, size), record_count=3)
        await settle(log)
        batches = await fetch_all(log, "t", 0)
    async with opened(place) as log:
        assert await fetch_all(log, "t", 0) == batches
        assert [len(one) > 20_000 for one in batches] == [False, True, False, True, False]


async def test_a_topic_made_again_goes_on_at_its_old_next_offset(place: Place) -> None:
    async with opened(place) as log:
        lead(log)
        await write_some(log, 10)
        log.append_change(TopicRemoved("t"))
        with pytest.raises(OutOfRange):
            log.append_batch("t", 0, batch(), record_count=1)
        with pytest.raises(OutOfRange):
            await log.fetch("t", 0, 0, 100)
        log.append_change(TopicMade("t", 1))
        assert log.append_batch("t", 0, batch(), record_count=1).base_offset == 15
        await settle(log)
        assert log.log_start_offset("t", 0) == 15
        with pytest.raises(OutOfRange):
            await log.fetch("t", 0, 3, 100)
        with pytest.raises(OutOfRange):
            log.end_offset("t", 1)
        log.append_change(TopicMade("t", 3))
        assert [log.end_offset("t", p) for p in (0, 1, 2)] == [16, 15, 0]
        await settle(log)
        state = log.state.snapshot()
    async with opened(place) as log:
        assert log.state.snapshot() == state
        assert len(await fetch_all(log, "t", 0)) == 1


async def test_below_the_floor_of_free_space_appends_are_refused_and_reads_go_on() -> None:
    place = SimPlace()
    disk = place.disk()
    disk.capacity_bytes = 200_000
    log = await Log.open(disk, LogSettings(segment_bytes=8192, min_free_bytes=100_000, scrub_mb_per_s=0), CLUSTER)
    async with trio.open_nursery() as nursery:
        await nursery.start(log.run)
        lead(log)
        with trio.fail_after(60), contextlib.suppress(DiskFull):
            while not log.full:
                await write_some(log, 20)
        with pytest.raises(DiskFull, match="CHRONIK_MIN_FREE_BYTES"):
            log.append_batch("t", 0, batch(), record_count=1)
        assert disk.free_bytes() > 50_000
        await settle(log)
        assert len(await fetch_all(log, "t", 0)) > 10
        with pytest.raises(DiskFull):
            log.append_change(OffsetsCommitted("g", (CommittedOffset("t", 0, 1),)))
        disk.capacity_bytes = 1 << 30
        with trio.fail_after(60):
            while log.full:
                await trio.sleep(0.5)
        await write_some(log, 20)
        nursery.cancel_scope.cancel()
    await log.close()


async def test_a_small_load_batches_by_itself(autojump_clock: trio.testing.MockClock) -> None:
    """64 who wait for their own record: at least 20 frames a sync."""
    place = SimPlace()
    disk = place.disk()
    log = await Log.open(disk, LogSettings(min_free_bytes=0, segment_bytes=1 << 20, scrub_mb_per_s=0), CLUSTER)
    async with trio.open_nursery() as nursery:
        await nursery.start(log.run)
        await log.durable.wait(lead(log).end)
        before = log.stats.groups_committed

        async def produce() -> None:
            for _ in range(20):
                await log.durable.wait(log.append_batch("t", 0, batch(), record_count=1).end)

        async with trio.open_nursery() as producers:
            for _ in range(64):
                producers.start_soon(produce)
        assert 64 * 20 / (log.stats.groups_committed - before) >= 20
        nursery.cancel_scope.cancel()


async def test_founded_and_cut_off_before_the_first_epoch_is_as_new(place: Place) -> None:
    async with opened(place) as log:
        lead(log)
        await settle(log)
        first = frames_of(await stream_of(log))[0].size
    name = segment_names(place)[0]
    data = place.read(name)
    marks_gone = data[:4096] + bytes(8192) + data[12288 : 12288 + first] + bytes(1000)
    place.write(name, marks_gone)
    async with opened(place) as log:
        assert (log.start, log.end, log.segments) == (ORIGIN, ORIGIN, 0)
        lead(log)
        await settle(log)


async def test_a_finished_segment_is_marked_durable_to_its_end(place: Place) -> None:
    async with opened(place) as log:
        lead(log)
        await write_segments(log, 4)
        ends = [segment.end for segment in log._store.list[:-1]]
        marks = [best_mark(place.read(name)[: 3 * BLOCK]) for name in segment_names(place)[:-1]]
        assert [mark.durable_end for mark in marks if mark is not None] == ends


class WatchesTheSpare(SimDisk):
    """Fails when a file is filled that is on its way to become a segment."""

    taken = False
    filled = 0

    async def open(self, name: str, *, create: bool = False) -> File:
        self.taken = self.taken or name == SPARE
        return await super().open(name, create=create)

    async def rename(self, old: str, new: str) -> None:
        await super().rename(old, new)
        self.taken = False

    async def preallocate(self, name: str, size: int, *, enough: trio.Event | None = None) -> None:
        assert not self.taken, "it has been taken"
        self.filled += 1
        await super().preallocate(name, size, enough=enough)
        assert not self.taken, "it was taken before it was ready"


async def test_the_spare_is_not_filled_again_while_a_segment_is_made_of_it(
    autojump_clock: trio.testing.MockClock,
) -> None:
    for seed in range(10):
        disk = WatchesTheSpare(random.Random(seed))
        log = await Log.open(disk, SETTINGS, CLUSTER)
        async with trio.open_nursery() as nursery:
            await nursery.start(log.run)
            lead(log)
            for _ in range(20):
                await write_some(log, 15)
            nursery.cancel_scope.cancel()
        await log.close()
        assert disk.filled >= log.segments
