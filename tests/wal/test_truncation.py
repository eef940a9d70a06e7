"""Truncation: what is cut is gone, what is committed stays, and a crash in the middle of it leaves a log that opens."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import trio
import trio.testing

from chronik_repl.errors import OutOfRange
from chronik_repl.positions import Position
from chronik_repl.wal.disk import File, Write
from chronik_repl.wal.frame import Kind
from chronik_repl.wal.log import Log, LogSettings
from tests.simulation.disk import SimDisk
from tests.simulation.medium import Medium
from tests.wal.workbench import (
    CLUSTER,
    SETTINGS,
    Place,
    SimPlace,
    all_sealed,
    batch,
    fetch_all,
    frames_in,
    frames_of,
    lead,
    opened,
    segment_names,
    settle,
    stream_of,
    write_segments,
    write_some,
)


@pytest.mark.parametrize("reopen", [False, True])
async def test_truncation_to_every_frame(place: Place, reopen: bool) -> None:
    async with opened(place, LogSettings(segment_bytes=4096, min_free_bytes=0, scrub_mb_per_s=0)) as log:
        lead(log)
        for _ in range(40):
            log.append_batch("t", 0, batch(3), record_count=3)
        await log.durable.wait(log.end)
        await all_sealed(log)
        assert log.segments == 3
        frames = frames_of(await stream_of(log))
        stream = await stream_of(log)
    for frame in reversed(frames[3 :: 1 if isinstance(place, SimPlace) else 4]):
        async with opened(place, LogSettings(segment_bytes=4096, min_free_bytes=0, scrub_mb_per_s=0)) as log:
            await log.truncate(frame.position)
            if not reopen:
                assert (log.end, log.end_checksum) == (frame.position, frame.previous)
                assert await stream_of(log) == stream[: frame.position]
        async with opened(place, run=False) as log:
            assert (log.end, log.end_checksum, log.durable.value) == (frame.position, frame.previous, frame.position)
            count = sum(1 for f in frames if f.kind == Kind.DATA and f.position < frame.position)
            assert log.end_offset("t", 0) == 3 * count


async def test_truncation_then_another_history(place: Place) -> None:
    async with opened(place) as log:
        lead(log)
        await write_some(log, 10)
        keep = log.end
        for _ in range(150):
            log.append_batch("t", 0, batch(3, fill=1), record_count=3)
        await log.durable.wait(log.end)
        assert log.segments > 2
        await log.truncate(keep)
        assert log.committed.value == keep
        lead(log, 2)
        for _ in range(150):
            log.append_batch("t", 1, batch(3, fill=2), record_count=3)
        await settle(log)
        stream = await stream_of(log)
        assert len(await fetch_all(log, "t", 0)) == 5
        assert len(await fetch_all(log, "t", 1)) == 155
    async with opened(place) as log:
        assert await stream_of(log) == stream
        assert [entry.epoch for entry in log.state.history] == [1, 2]


async def test_what_is_committed_is_not_truncated_but_by_an_operators_decision(place: Place) -> None:
    async with opened(place) as log:
        lead(log)
        await write_segments(log, 3)
        stream = await stream_of(log)
        frames = frames_of(stream)
        to = frames[len(frames) // 2].position
        before = log.end
        with pytest.raises(OutOfRange, match="committed"):
            await log.truncate(to)
        with pytest.raises(OutOfRange, match="no frame ends there"):
            await log.truncate(Position(log.end - 1))
        assert log.end == before
        await log.truncate(to, lost=True)
        assert log.end == log.committed.value == log.durable.value == to
        assert log.committed_offset("t", 0) == log.end_offset("t", 0)
    lost = [name for name in place.names() if name.startswith("lost/")]
    assert b"".join(place.read(name) for name in lost) == stream[to:]
    async with opened(place) as log:
        assert (log.end, log.committed.value) == (to, to)


async def test_truncation_to_the_logs_start_leaves_nothing(place: Place) -> None:
    async with opened(place) as log:
        lead(log)
        for _ in range(100):
            log.append_batch("t", 0, batch(3), record_count=3)
        await log.durable.wait(log.end)
        await log.truncate(Position(0))
        assert (log.start, log.end, log.segments, log.state.topics) == (0, 0, 0, {})
        lead(log, 2)
        await write_some(log, 10)
    async with opened(place) as log:
        assert log.end_offset("t", 0) == 15


async def test_appending_after_recovery_continues_in_the_same_segment(place: Place) -> None:
    async with opened(place) as log:
        lead(log)
        await write_some(log, 5)
    for epoch in (2, 3, 4):
        async with opened(place) as log:
            lead(log, epoch)
            await write_some(log, 2)
    assert len(segment_names(place)) == 1
    assert len(frames_in(place, segment_names(place)[0])) == 3 + 5 + 3 * 3


async def test_truncated_and_killed_at_once_is_no_damage() -> None:
    """What was cut was marked durable before: the marks go down first, or the next start would call it damage."""
    place = SimPlace()
    async with opened(place) as log:
        lead(log)
        for _ in range(150):
            log.append_batch("t", 0, batch(3), record_count=3)
        await log.durable.wait(log.end)
        assert log.segments > 3
        frames = frames_of(await stream_of(log))
        await all_sealed(log)
    for frame in reversed(frames[3::11]):
        disk = place.disk()
        log = await Log.open(disk, SETTINGS, CLUSTER)
        async with trio.open_nursery() as nursery:
            await nursery.start(log.run)
            await trio.testing.wait_all_tasks_blocked()
            await log.truncate(frame.position)
            disk.crash()
            nursery.cancel_scope.cancel()
        async with opened(place, run=False) as log:
            assert log.end == frame.position


async def test_a_truncation_that_is_cut_off_anywhere_leaves_a_log_that_opens() -> None:
    """kill -9 and power cuts at every step of it: the log ends at the old end, at the new one, or where frames between
    them end."""
    for power_cut in (False, True):
        for stop_after in range(1, 40):
            place = SimPlace()
            async with opened(place) as log:
                lead(log)
                for _ in range(100):
                    log.append_batch("t", 0, batch(3), record_count=3)
                await log.durable.wait(log.end)
                await all_sealed(log)
                frames = frames_of(await stream_of(log))
                stream = await stream_of(log)
            disk = StopsAfter(place.rng, place.medium, stop_after)
            log = await Log.open(disk, SETTINGS, CLUSTER)
            done = False
            async with trio.open_nursery() as nursery:
                await nursery.start(log.run)
                await trio.testing.wait_all_tasks_blocked()
                disk.counting = True
                with trio.move_on_after(0.2) as patience:
                    await log.truncate(frames[20].position)
                done = not patience.cancelled_caught
                if not disk.dead:
                    disk.crash()
                nursery.cancel_scope.cancel()
            if power_cut:
                disk.power_cut()
            async with opened(place, run=False) as log:
                assert frames[20].position <= log.end <= len(stream)
                assert await stream_of(log) == stream[: log.end]
                if done:
                    assert log.end == frames[20].position
            if done:
                break
        else:
            raise AssertionError("it never came to its end")


class StopsAfter(SimDisk):
    """The process dies at the nth change of a file or folder, counted from when it is told to count."""

    def __init__(self, rng: random.Random, medium: Medium, steps: int) -> None:
        super().__init__(rng, medium)
        self.slowness = 0.0
        self.steps = steps
        self.counting = False

    def _step(self) -> None:
        if self.counting:
            self.steps -= 1
            if self.steps == 0:
                self.crash()

    async def commit(self, file: File, writes: Sequence[Write]) -> None:
        self._step()
        await super().commit(file, writes)

    async def zero(self, file: File, start: int, end: int) -> None:
        self._step()
        await super().zero(file, start, end)

    async def remove(self, name: str) -> None:
        self._step()
        await super().remove(name)

    async def sync_dir(self, folder: str) -> None:
        self._step()
        await super().sync_dir(folder)
