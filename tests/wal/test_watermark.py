"""Waiting for a position."""

from __future__ import annotations

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from chronik_repl.errors import DiskFailed, NotLeader
from chronik_repl.positions import Position
from chronik_repl.wal.watermark import Watermark


async def test_who_waits_is_woken_by_what_reaches_it_and_nothing_less() -> None:
    mark = Watermark(Position(10))
    woken: list[int] = []

    async def wait(position: int) -> None:
        await mark.wait(Position(position))
        woken.append(position)

    async with trio.open_nursery() as nursery:
        for position in (30, 5, 20, 40, 10):
            nursery.start_soon(wait, position)
        await wait_all_tasks_blocked()
        assert sorted(woken) == [5, 10]
        mark.advance(Position(29))
        await wait_all_tasks_blocked()
        assert sorted(woken) == [5, 10, 20]
        mark.advance(Position(3))
        assert mark.value == 29
        mark.advance(Position(40))
    assert sorted(woken) == [5, 10, 20, 30, 40]


async def test_kf33_an_advance_before_anyone_waits_is_not_missed() -> None:
    mark = Watermark(Position(0))
    mark.advance(Position(7))
    with trio.fail_after(1):
        await mark.wait(Position(7))
        assert await mark.wait_beyond(Position(6)) == 7


async def test_a_failure_reaches_all_who_wait_now() -> None:
    mark = Watermark(Position(0))
    failed: list[BaseException] = []

    async def wait() -> None:
        try:
            await mark.wait(Position(9))
        except NotLeader as error:
            failed.append(error)

    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(wait)
        await wait_all_tasks_blocked()
        mark.fail(NotLeader("deposed", None))
    assert [str(error) for error in failed] == ["deposed"] * 3
    assert len({id(error) for error in failed}) == 3
    mark.advance(Position(9))
    await mark.wait(Position(9))


async def test_a_dead_disk_fails_all_who_come() -> None:
    mark = Watermark(Position(5))
    mark.fail_forever(DiskFailed("gone"))
    for position in (1, 9):
        with pytest.raises(DiskFailed):
            await mark.wait(Position(position))


async def test_who_gives_up_leaves_nothing_behind() -> None:
    mark = Watermark(Position(0))
    for _ in range(1000):
        with trio.move_on_after(0):
            await mark.wait(Position(5))
    assert len(mark._waiters) < 200
    with trio.move_on_after(0):
        await mark.wait(Position(0))
    mark.advance(Position(5))
