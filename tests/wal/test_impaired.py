"""A follower that lost the end of its log to damage knows that it did, whatever is left of the files, until it is known
to hold again all that it ever acked."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from chronik_repl.errors import CorruptLog
from chronik_repl.positions import Epoch
from chronik_repl.wal.changes import EpochStart
from chronik_repl.wal.log import Log
from chronik_repl.wal.segment import BLOCK, FRAMES_AT
from tests.wal.workbench import (
    CLUSTER,
    SETTINGS,
    Place,
    all_sealed,
    another,
    copy_to,
    flip,
    lead,
    opened,
    segment_names,
    set_marks,
    ship,
    stream_of,
    write_segments,
)


def header_rots(place: Place, name: str) -> None:
    flip(place, name, 20)


def header_and_marks_rot(place: Place, name: str) -> None:
    for at in (20, BLOCK + 3, 2 * BLOCK + 3):
        flip(place, name, at)


def cut_in_its_header(place: Place, name: str) -> None:
    place.write(name, place.read(name)[:100])


def cut_to_nothing(place: Place, name: str) -> None:
    place.write(name, b"")


def first_frame_rots(place: Place, name: str) -> None:
    flip(place, name, FRAMES_AT + 200)


def rots_under_an_older_mark(place: Place, name: str) -> None:
    """The last group was acked; the mark speaks of the one before it."""
    start = int(name[4:24])
    set_marks(place, name, start + 300, start)
    flip(place, name, FRAMES_AT + 200)


def is_gone(place: Place, name: str) -> None:
    place.remove(name)


DAMAGES = (
    header_rots,
    header_and_marks_rot,
    cut_in_its_header,
    cut_to_nothing,
    first_frame_rots,
    rots_under_an_older_mark,
    is_gone,
)


async def follower_of(place: Place, other: Place) -> None:
    """Both hold three segments and something in the last one."""
    async with opened(place) as leader:
        lead(leader)
        await write_segments(leader, 3)
        async with opened(other) as follower:
            await copy_to(follower, leader)
            await all_sealed(follower)


@asynccontextmanager
async def running(place: Place) -> AsyncIterator[Log]:
    """As a follower's node opens it."""
    disk = place.disk()
    try:
        log = await Log.open(disk, SETTINGS, CLUSTER, set_aside_damage=True)
        async with trio.open_nursery() as nursery:
            await nursery.start(log.run)
            yield log
            nursery.cancel_scope.cancel()
        await log.close()
    finally:
        disk.close()


async def healed(log: Log) -> None:
    with trio.fail_after(10):
        while log.impaired_until is not None:
            await trio.sleep(0.001)


@pytest.mark.parametrize("damage", DAMAGES)
async def test_kf07_a_lost_tail_is_not_forgotten_before_a_leader_was_caught_up_with(
    place: Place, damage: Callable[[Place, str], None]
) -> None:
    other = another(place)
    await follower_of(place, other)
    last = segment_names(other)[-1]
    damage(other, last)
    async with opened(place) as leader:
        for _ in range(2):
            async with running(other) as follower:
                await trio.testing.wait_all_tasks_blocked()
                assert follower.impaired_until is not None
                assert follower.end <= int(last[4:24])
        async with running(other) as follower:
            follower.met_leader(leader.end)
            half = await leader.read(follower.end, 700)
            follower.append_received(memoryview(half))
            await follower.durable.wait(follower.end)
            await trio.testing.wait_all_tasks_blocked()
            assert follower.impaired_until is not None, "it holds a part of it only"
        async with running(other) as follower:
            await ship(leader, follower)
            await trio.testing.wait_all_tasks_blocked()
            assert follower.impaired_until is not None, "where the leader's log ended is not known to this process"
            follower.met_leader(leader.end)
            await healed(follower)
            assert await stream_of(follower) == await stream_of(leader)
    for _ in range(2):
        async with running(other) as follower:
            assert follower.impaired_until is None


@pytest.mark.parametrize("damage", DAMAGES)
async def test_a_leader_with_such_damage_refuses_to_start(place: Place, damage: Callable[[Place, str], None]) -> None:
    async with opened(place) as leader:
        lead(leader)
        await write_segments(leader, 3)
    damage(place, segment_names(place)[-1])
    disk = place.disk()
    with pytest.raises(CorruptLog):
        await Log.open(disk, SETTINGS, CLUSTER)
    disk.close()


async def test_one_that_cannot_be_read_is_still_a_sign_of_damage(place: Place) -> None:
    other = another(place)
    await follower_of(place, other)
    for content in (b"", b"x\n", b"\xff\xfe", b"12\0"):
        other.write("impaired", content)
        async with running(other) as follower:
            assert follower.impaired_until is not None
            follower.met_leader(follower.end)
            await healed(follower)


async def test_an_accepted_loss_makes_it_whole(place: Place) -> None:
    other = another(place)
    await follower_of(place, other)
    header_rots(other, segment_names(other)[-1])
    async with running(other) as log:
        log.begin_epoch(Epoch(2), EpochStart(2, "two"))
        await log.durable.wait(log.end)
        await trio.testing.wait_all_tasks_blocked()
        assert log.impaired_until is not None
        log.begin_epoch(Epoch(3), EpochStart(2, "two", accept_loss=True))
        await healed(log)


async def test_a_truncation_to_an_earlier_segment_leaves_no_sign_of_a_lost_one(place: Place) -> None:
    async with opened(place) as log:
        lead(log)
        await write_segments(log, 4)
        second = log._store.list[1]
        await log.truncate(second.end, lost=True)
        assert not any(name.endswith(second.index_name) for name in place.names())
    async with opened(place) as log:
        assert log.end == second.end
