"""How far readers see in a log that begins with a snapshot: what stands before that is committed."""

from __future__ import annotations

import trio

from chronik_repl.wal.changes import LogStartMoved, TopicMade, TopicRemoved
from chronik_repl.wal.log import Log
from tests.wal.workbench import (
    CLUSTER,
    Place,
    another,
    batch,
    fetch_all,
    lead,
    opened,
    settle,
    ship,
    write_segments,
    write_some,
)


def shown(log: Log) -> list[int]:
    return [log.committed_offset("t", partition) for partition in (0, 1)]


async def begin_segment(log: Log) -> None:
    """All before it is committed, and of the segment itself nothing."""
    await settle(log)
    log._writer._roll()
    await log.durable.wait(log.end)
    assert log.committed.value == log._store.list[-1].start


async def test_all_before_the_last_segment_is_shown_where_the_high_watermark_ends_there(place: Place) -> None:
    """As after a crash just behind a roll: the partitions that got nothing since are not empty."""
    async with opened(place) as log:
        lead(log)
        await write_some(log, 4)
        await begin_segment(log)
        assert shown(log) == [6, 6]
    async with opened(place) as log:
        assert log.committed.value == log._store.list[-1].start
        assert shown(log) == [6, 6]
        assert len((await log.fetch("t", 1, 0, 10_000)).batches) == 2


async def test_the_same_where_it_is_many_segments_behind(place: Place) -> None:
    async with opened(place) as log:
        lead(log, topics={"t": 2, "other": 1})
        await write_some(log, 4)
        await begin_segment(log)
        while log.segments < 10:
            log.append_batch("other", 0, batch(3), record_count=3)
        await log.durable.wait(log.end)
    async with opened(place) as log:
        assert shown(log) == [6, 6]
        assert log.committed_offset("other", 0) == 0
        await settle(log)
        assert log.committed_offset("other", 0) == log.end_offset("other", 0)


async def test_a_follower_that_begins_anew_shows_what_the_leader_shows(place: Place) -> None:
    async with opened(place) as leader, opened(another(place)) as follower:
        lead(leader)
        await write_some(leader, 4)
        await begin_segment(leader)
        first = leader._store.list[-1]
        await follower.begin_at(first.start, first.chain, CLUSTER)
        await ship(leader, follower)
        assert shown(follower) == shown(leader) == [6, 6]


async def test_a_follower_that_begins_anew_starts_where_its_log_does(place: Place) -> None:
    """A consumer that reads there from the earliest offset on must not be sent to one that is gone."""
    async with opened(place) as leader, opened(another(place)) as follower:
        lead(leader)
        await write_segments(leader, 6)
        moved_to = leader._store.list[3].start
        leader.append_change(LogStartMoved(moved_to))
        await settle(leader)
        with trio.fail_after(10):
            while leader.start < moved_to:
                await trio.sleep(0.001)
        first = leader._store.list[0]
        await follower.begin_at(first.start, first.chain, CLUSTER)
        await ship(leader, follower)
        for partition in (0, 1):
            start = follower.log_start_offset("t", partition)
            assert start == leader.log_start_offset("t", partition) > 0
            assert await fetch_all(follower, "t", partition) == await fetch_all(leader, "t", partition)


async def test_a_topic_made_again_after_a_restart_is_shown_up_to_its_start(place: Place) -> None:
    async with opened(place) as log:
        lead(log)
        await write_some(log, 4)
        log.append_change(TopicRemoved("t"))
        await settle(log)
    async with opened(place) as log:
        lead(log, 2, topics={})
        log.append_change(TopicMade("t", 2))
        await settle(log)
        assert shown(log) == [log.log_start_offset("t", partition) for partition in (0, 1)] == [6, 6]
