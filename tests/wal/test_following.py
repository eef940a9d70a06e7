"""A follower's log: the leader's, byte for byte; beginning anew; damage set aside and repaired."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import trio
import trio.testing

from chronik_repl.errors import CorruptLog, OutOfRange
from chronik_repl.positions import Checksum, Epoch, Position
from chronik_repl.wal.changes import EpochStart, LogStartMoved, SnapshotPart
from chronik_repl.wal.frame import BadFrame, Kind, encode, topic_prefix
from chronik_repl.wal.log import Log, LogSettings
from chronik_repl.wal.segment import FRAMES_AT
from chronik_repl.wal.snapshot import PART_BYTES
from tests.wal.workbench import (
    CLUSTER,
    SETTINGS,
    Place,
    all_sealed,
    another,
    batch,
    copy_to,
    fetch_all,
    flip,
    frames_in,
    frames_of,
    image,
    lead,
    opened,
    segment_names,
    settle,
    ship,
    stream_of,
    write_segments,
    write_some,
)


async def test_a_followers_log_is_the_leaders_byte_for_byte(place: Place) -> None:
    other = another(place)
    async with opened(place) as leader, opened(other) as follower:
        lead(leader)
        await write_segments(leader, 4)
        await copy_to(follower, leader)
        assert (follower.end, follower.end_checksum) == (leader.end, leader.end_checksum)
        assert follower.durable_checksum == leader.durable_checksum
        assert follower.state.snapshot() == leader.state.snapshot()
        assert await stream_of(follower) == await stream_of(leader)
        assert await fetch_all(follower, "t", 1) == await fetch_all(leader, "t", 1)
        await all_sealed(follower)
    assert segment_names(other) == segment_names(place)
    for name in segment_names(other):
        assert place.read(name)[FRAMES_AT:].rstrip(b"\0") == other.read(name)[FRAMES_AT:].rstrip(b"\0")
    for name in other.names():
        if name.endswith(".idx"):
            assert other.read(name) == place.read(name)


async def follower_of(leader: Log, follower: Log) -> memoryview:
    """A follower with all that there is, and what the leader appends next."""
    lead(leader)
    await write_some(leader, 3)
    await copy_to(follower, leader)
    await trio.testing.wait_all_tasks_blocked()
    end = leader.end
    await write_some(leader, 1)
    return memoryview(await leader.read(end, 10_000))


async def test_frames_that_find_the_disk_idle_are_with_it_in_the_step_in_which_they_came(place: Place) -> None:
    async with opened(place) as leader, opened(another(place)) as follower:
        news = await follower_of(leader, follower)
        follower.append_received(news)
        assert follower._committer._outstanding == 1, "a pass of the event loop later is too late"
        assert not follower.pending_bytes
        await follower.durable.wait(follower.end)
        assert await stream_of(follower) == await stream_of(leader)


async def test_a_stop_in_the_step_in_which_frames_went_to_the_disk_loses_nothing(place: Place) -> None:
    other = another(place)
    async with opened(place) as leader:
        async with opened(other) as follower:
            follower.append_received(await follower_of(leader, follower))
        async with opened(other) as follower:
            assert follower.end == leader.end
            assert await stream_of(follower) == await stream_of(leader)


async def test_what_a_follower_refuses(place: Place) -> None:
    async with opened(place) as log:
        lead(log, 5)
        await write_some(log, 3)
        frames = frames_of(await stream_of(log))
        end, chain = log.end, log.end_checksum
        base = log.end_offset("t", 0)
        prefix, sent = topic_prefix("t"), (base).to_bytes(8, "big") + batch(3)[8:]

        def frame(
            kind: int = 0, epoch: int = 5, position: int = end, previous: int = chain, offset: int = base
        ) -> bytes:
            return encode(prefix, offset, 3, 0, kind, epoch, position, previous, 0, (sent,))[0]

        stream = await stream_of(log)
        for wrong in (
            frame(epoch=4),
            frame(epoch=6),
            frame(position=end + 1),
            frame(previous=chain ^ 1),
            frame(offset=base + 1),
            frame(kind=4),
            frame(kind=7),
            stream[frames[-1].position :],
            b"GET / HTTP/1.1\r\n\r\n" + bytes(100),
            b"\x57\x41\x00\x02\xff\xff\xff\xff",
        ):
            with pytest.raises(BadFrame):
                log.append_received(memoryview(wrong))
            assert (log.end, log.end_checksum) == (end, chain)
        assert log.append_received(memoryview(frame()[:-1])) == 0, "not whole yet"
        good = frame()
        assert log.append_received(memoryview(good + good)[: len(good) + 20]) == len(good)
        with pytest.raises(BadFrame):
            log.append_received(memoryview(good))
        await log.durable.wait(log.end)


async def test_good_frames_before_a_bad_one_are_taken(place: Place) -> None:
    other = another(place)
    async with opened(place) as leader, opened(other) as follower:
        lead(leader)
        await write_some(leader, 5)
        stream = bytearray(await stream_of(leader))
        last = frames_of(bytes(stream))[-1]
        stream[-1] ^= 1
        await follower.begin_at(Position(0), Checksum(0), CLUSTER)
        with pytest.raises(BadFrame):
            follower.append_received(memoryview(stream))
        assert follower.end == last.position
        await ship(leader, follower)
        assert follower.end_checksum == leader.end_checksum


async def test_a_log_begins_with_a_segment_start(place: Place) -> None:
    other = another(place)
    async with opened(place) as leader, opened(other) as follower:
        lead(leader)
        await write_segments(leader, 3)
        frames = frames_of(await stream_of(leader))
        await follower.begin_at(frames[1].position, frames[1].previous, CLUSTER)
        with pytest.raises(BadFrame, match="begins with a segment start"):
            follower.append_received(memoryview(await leader.read(frames[1].position, 1000)))


async def test_beginning_anew_at_a_later_segment(place: Place) -> None:
    other = another(place)
    async with opened(place) as leader:
        lead(leader)
        await write_segments(leader, 4)
        async with opened(other) as follower:
            lead(follower, 9)  # something else entirely
            await write_segments(follower, 2)
            starts = [f for f in frames_of(await stream_of(leader)) if f.kind == Kind.SEGMENT_START]
            start = starts[2]
            leader.append_change(LogStartMoved(start.position))
            await settle(leader)
            with trio.fail_after(10):
                while leader.start < start.position:
                    await trio.sleep(0.001)
            await follower.begin_at(start.position, start.previous, CLUSTER)
            assert (follower.start, follower.end) == (start.position, start.position)
            await ship(leader, follower)
            assert follower.start == start.position
            assert follower.state.snapshot() == leader.state.snapshot()
        async with opened(other) as follower:
            assert (follower.start, follower.end) == (start.position, leader.end)
            first = follower.log_start_offset("t", 0)
            assert first > 0
            assert await fetch_all(follower, "t", 0) == await fetch_all(leader, "t", 0)
            with pytest.raises(OutOfRange):
                await follower.fetch("t", 0, first - 1, 100)


async def test_a_snapshot_of_several_parts(place: Place) -> None:
    """Some MB of groups' offsets: as many parts at a segment's start, on leader, follower and after a restart."""
    from chronik_repl.wal.changes import CommittedOffset, OffsetsCommitted

    other = another(place)
    settings = LogSettings(segment_bytes=1 << 20, min_free_bytes=0, scrub_mb_per_s=0)
    async with opened(place, settings) as leader, opened(other, settings) as follower:
        lead(leader)
        for group in range(60):
            offsets = tuple(CommittedOffset(f"topic-{n}", 0, n, 1, "m" * 100) for n in range(700))
            leader.append_change(OffsetsCommitted(f"group-{group}", offsets))
        await write_some(leader, 3)
        starts = [f for f in frames_of(await stream_of(leader)) if f.kind == Kind.SEGMENT_START]
        assert len(starts) > leader.segments + 3
        await follower.begin_at(Position(0), Checksum(0), CLUSTER)
        await ship(leader, follower, step=300_000)
        assert follower.state.snapshot() == leader.state.snapshot()
        assert follower.segments == leader.segments
        state = leader.state.snapshot()
    for each in (place, other):
        async with opened(each, settings) as log:
            assert log.state.snapshot() == state
            assert [segment.snapshot_whole for segment in log._store.list] == [True] * log.segments


async def test_a_snapshot_that_was_not_finished(place: Place) -> None:
    """The state comes from the segment before it; the next leader begins a segment with a whole one, where a log may
    begin."""
    async with opened(place) as log:
        lead(log)
        await write_some(log, 10)
        state = log.state.snapshot()
        end, chain = log.end, log.end_checksum
        part = encode(topic_prefix(""), 0, 0, log.state.timestamp_ms, 2, 1, end, chain, -1, (_part(0, 3),))[0]
        log.append_received(memoryview(part))
        await log.durable.wait(log.end)
        assert log.segments == 2
    for _ in range(2):
        async with opened(place) as log:
            assert log.end == end + len(part)
            assert log.state.snapshot_pending
            assert log.state.snapshot() == state
            assert [segment.snapshot_whole for segment in log._store.list] == [True, False]
    async with opened(place) as log:
        lead(log, 2)
        await write_some(log, 10)
        assert [segment.snapshot_whole for segment in log._store.list] == [True, False, True]
        state = log.state.snapshot()
        await all_sealed(log)
    async with opened(place) as log:
        assert log.state.snapshot() == state
        assert len(await fetch_all(log, "t", 0)) == 10
        assert log._store.list[1].snapshot_whole is False


def _part(part: int, parts: int) -> bytes:
    from chronik_repl.wal.changes import encode_change

    return encode_change(SnapshotPart(part, parts, b"\0" * PART_BYTES))


async def test_a_damaged_cold_segment_gets_the_leaders_bytes(place: Place) -> None:
    other = another(place)
    async with opened(place) as leader:
        lead(leader)
        await write_segments(leader, 4)
        async with opened(other) as follower:
            await copy_to(follower, leader)
            await all_sealed(follower)
        name = segment_names(other)[1]
        victim = next(f for f in frames_in(other, name) if f.kind == Kind.DATA)
        flip(other, name, FRAMES_AT + victim.position - int(name[4:24]) + 60)
        other.remove(name.replace(".wal", ".idx"))
        async with opened(other) as follower:
            with pytest.raises(CorruptLog):
                await follower.fetch("t", victim.partition, victim.base_offset, 1)
            (damage,) = follower.damage
            start, end, _ = await leader.segment_bounds(Position(damage.start))

            async def pieces(corrupt: bool = False) -> AsyncIterator[bytes]:
                position = start
                while position < end:
                    data = await leader.read(Position(position), 1000)
                    position = Position(position + len(data))
                    yield data[:-1] + bytes([data[-1] ^ corrupt]) if corrupt else data

            with pytest.raises(CorruptLog, match="what was sent"):
                await follower.replace_segment(start, pieces(corrupt=True))
            assert follower.damage
            await follower.replace_segment(start, pieces())
            assert follower.damage == []
            assert await stream_of(follower) == await stream_of(leader)
            assert await fetch_all(follower, "t", 0) == await fetch_all(leader, "t", 0)
            with pytest.raises(OutOfRange):
                await follower.replace_segment(Position(start + 1), pieces())
        async with opened(other) as follower:
            assert await stream_of(follower) == await stream_of(leader)


async def test_a_damaged_tail_is_set_aside_and_remembered_until_it_is_there_again(place: Place) -> None:
    other = another(place)
    async with opened(place) as leader:
        lead(leader)
        await write_segments(leader, 3)
        async with opened(other) as follower:
            await copy_to(follower, leader)
        name = segment_names(other)[-1]
        flip(other, name, FRAMES_AT + 200)
        before = image(other)
        disk = other.disk()
        with pytest.raises(CorruptLog):
            await Log.open(disk, SETTINGS, CLUSTER)
        assert image(other) == before
        disk.close()
        for _ in range(2):
            disk = other.disk()
            follower = await Log.open(disk, SETTINGS, CLUSTER, set_aside_damage=True)
            assert follower.end == int(name[4:24])
            assert follower.impaired_until == leader.end
            await follower.close()
            disk.close()
        assert name.replace("wal/", "damaged/") in other.names()
        async with opened(other) as follower:
            await ship(leader, follower)
            await trio.testing.wait_all_tasks_blocked()
            assert follower.impaired_until == leader.end, "no leader has said yet how far that must be"
            follower.met_leader(leader.end)
            with trio.fail_after(10):
                while follower.impaired_until is not None:
                    await trio.sleep(0.001)
            assert await stream_of(follower) == await stream_of(leader)
        async with opened(other) as follower:
            assert follower.impaired_until is None


async def test_a_follower_removes_what_the_leader_removed(place: Place) -> None:
    other = another(place)
    async with opened(place) as leader, opened(other) as follower:
        lead(leader)
        await write_segments(leader, 5)
        await copy_to(follower, leader)
        await all_sealed(follower)
        start = leader._store.list[3].start
        leader.append_change(LogStartMoved(start))
        await settle(leader)
        await ship(leader, follower)
        with trio.fail_after(10):
            while (leader.stats.segments_removed, follower.stats.segments_removed) != (3, 3):
                await trio.sleep(0.001)
        assert leader.start == follower.start == start
        assert follower.log_start_offset("t", 0) == leader.log_start_offset("t", 0) > 0
        assert await fetch_all(follower, "t", 0) == await fetch_all(leader, "t", 0)
    assert segment_names(place)[:2] == segment_names(other)[:2]


async def test_an_epoch_is_begun_once(place: Place) -> None:
    async with opened(place) as log:
        lead(log, 2)
        await settle(log)
        end, chain = log.end, log.end_checksum
        from chronik_repl.wal.changes import encode_change

        again = encode(topic_prefix(""), 0, 0, 0, 1, 2, end, chain, -1, (encode_change(EpochStart(2, "x")),))[0]
        with pytest.raises(BadFrame):
            log.append_received(memoryview(again))
        assert [entry.epoch for entry in log.state.history] == [Epoch(2)]


async def test_an_epochs_first_frame_is_its_start_also_in_a_full_segment(place: Place) -> None:
    other = another(place)
    async with opened(place) as leader, opened(other) as follower:
        lead(leader)
        await settle(leader)
        await follower.begin_at(Position(0), Checksum(0), CLUSTER)
        for epoch in range(2, 100):
            lead(leader, epoch)
            await settle(leader)
            await ship(leader, follower)
        assert leader.segments == 1, "a start never rolls"
        await write_some(leader, 3)
        assert leader.segments == 2
        await ship(leader, follower)
        assert follower.end_checksum == leader.end_checksum
