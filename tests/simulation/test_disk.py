"""The simulated disk's own troubles: each really happens, and only what POSIX allows to happen does."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from chronik_repl.errors import DiskFailed, DiskFull
from chronik_repl.wal.disk import Write
from tests.simulation.disk import SimDisk
from tests.simulation.medium import Change, Entry, Medium


async def test_a_crash_keeps_the_page_cache_and_a_power_cut_may_not() -> None:
    kept, lost, torn = 0, 0, 0
    for seed in range(200):
        disk = SimDisk(random.Random(seed))
        file = await disk.open("a", create=True)
        await disk.commit(file, [Write(0, [b"d" * 2048])])
        await disk.sync_dir("")
        disk.medium.write(0, 2048, b"u" * 2048)
        disk.crash()
        disk = disk.reopen()
        assert disk.medium.bytes_of("a") == b"d" * 2048 + b"u" * 2048
        disk.power_cut()
        left = disk.reopen().medium.bytes_of("a")
        assert left[:2048] == b"d" * 2048
        kept += left[2048:] == b"u" * 2048
        lost += left[2048:] == b""
        torn += 0 < left.count(b"u") < 2048
        assert all(left[at : at + 512] in (b"u" * 512, bytes(512), b"") for at in range(2048, 4096, 512))
    assert min(kept, lost, torn) > 10


async def test_what_is_early_may_survive_what_stands_before_it(autojump_clock: trio.testing.MockClock) -> None:
    early_alone = 0
    for seed in range(100):
        disk = SimDisk(random.Random(seed))
        file = await disk.open("a", create=True)
        await disk.commit(file, [Write(0, [bytes(2048)])])
        await disk.sync_dir("")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(disk.begin(file, Write(512, [b"1" * 512]), Write(0, [b"A"])))
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(disk.begin(file, Write(1024, [b"2" * 512]), Write(0, [b"B"])))
            await trio.testing.wait_all_tasks_blocked()
            disk.power_cut()
            nursery.cancel_scope.cancel()
        left = disk.reopen().medium.bytes_of("a")
        assert left[:1] != b"B"
        early_alone += left[512:1536] == bytes(512) + b"2" * 512
    assert early_alone > 5


async def test_an_entry_is_durable_only_after_its_folder_is_synced() -> None:
    gone = 0
    for seed in range(50):
        disk = SimDisk(random.Random(seed))
        await disk.commit(await disk.open("a", create=True), [Write(0, [b"x"])])
        disk.power_cut()
        gone += disk.medium.find("a") is None
    assert 10 < gone < 40


async def test_calls_of_a_dead_process_never_return_and_do_nothing(mock_clock: trio.testing.MockClock) -> None:
    disk = SimDisk(random.Random(1))
    mock_clock.autojump_threshold = 0
    file = await disk.open("a", create=True)
    await disk.commit(file, [Write(0, [b"before"])])
    mock_clock.autojump_threshold = math.inf

    async def never(call: Callable[[], object]) -> None:
        await call()  # type: ignore[misc]
        raise AssertionError("a dead disk answered")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(never, lambda: disk.commit(file, [Write(0, [b"in flight"])]))
        await wait_all_tasks_blocked()
        disk.crash()
        for call in (
            lambda: disk.commit(file, [Write(0, [b"after"])]),
            lambda: disk.read(file, 0, 1),
            lambda: disk.replace("b", b""),
            lambda: disk.remove("a"),
        ):
            nursery.start_soon(never, call)
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert disk.medium.image() == {"a": b"before"}


async def test_after_a_failed_sync_the_pages_are_clean_and_may_vanish() -> None:
    disk = SimDisk(random.Random(1))
    file = await disk.open("a", create=True)
    await disk.commit(file, [Write(0, [b"good"])])
    await disk.sync_dir("")
    disk.fail_sync_in(1)
    with pytest.raises(DiskFailed, match="fdatasync failed: Input/output error"):
        await disk.commit(file, [Write(4, [b"lostlost"])])
    with pytest.raises(DiskFailed):
        await disk.commit(file, [Write(4, [b"late"])])
    assert await disk.read(file, 0, 20) == b"goodlostlost"
    disk.crash()
    disk = disk.reopen()
    file = await disk.open("a")
    await disk.commit(file, [Write(8, [b"next"])])
    disk.medium.cut(lambda number, change, sector: False)
    assert disk.medium.bytes_of("a") == b"good\0\0\0\0next", "a later sync did not write them"


async def test_no_space_is_a_short_write_and_then_an_error() -> None:
    disk = SimDisk(random.Random(1))
    disk.capacity_bytes = 1000
    file = await disk.open("a", create=True)
    await disk.commit(file, [Write(0, [b"x" * 900])])
    assert disk.free_bytes() == 100
    with pytest.raises(DiskFull):
        await disk.preallocate("b", 200)
    with pytest.raises(DiskFailed, match="No space left"):
        await disk.commit(file, [Write(900, [b"y" * 200])])
    assert await disk.size(file) == 1000


async def test_a_misplaced_write_is_not_where_it_should_be() -> None:
    disk = SimDisk(random.Random(3))
    file = await disk.open("a", create=True)
    await disk.commit(file, [Write(0, [bytes(8192)])])
    disk.misplace_in(1)
    await disk.commit(file, [Write(0, [b"m" * 512])])
    seen = await disk.read(file, 0, 8192)
    assert b"m" * 512 in seen
    assert not seen.startswith(b"m")


async def test_a_stalled_device_answers_after_it_resumed(autojump_clock: trio.testing.MockClock) -> None:
    disk = SimDisk(random.Random(3))
    file = await disk.open("a", create=True)
    disk.stall()
    with trio.move_on_after(100) as scope:
        await disk.read(file, 0, 1)
    assert scope.cancelled_caught
    disk.resume()
    with trio.fail_after(1):
        await disk.read(file, 0, 1)


async def test_what_was_recorded_can_be_played_again() -> None:
    disk = SimDisk(random.Random(3))
    events = disk.record()
    file = await disk.open("a", create=True)
    await disk.commit(file, [Write(0, [b"one"])])
    await disk.replace("b", b"two")
    await disk.rename("a", "c")
    await disk.sync_dir("")
    await disk.zero(file, 1, 5)
    await disk.remove("b")
    again = Medium()
    for event in events:
        again.play(event)
    assert again.image() == disk.medium.image() == {"c": b"o\0\0\0\0"}
    assert again.digest() == disk.medium.digest()
    assert [type(change) for change in again.undecided()] == [Entry]


def test_a_cut_applies_what_it_keeps_in_any_combination() -> None:
    medium = Medium()
    inode = medium.create("a")
    medium.sync_dir("")
    medium.write(inode, 0, b"1" * 1024)
    medium.sync(inode)
    medium.write(inode, 512, b"2" * 1024)
    medium.resize(inode, 700)
    seen = set()
    for mask in range(8):
        other = medium.clone()

        def keep(number: int, change: Change | Entry, sector: int, mask: int = mask) -> bool:
            bit = 2 if number == 1 else (sector - 512) // 512
            return bool(mask >> bit & 1)

        other.cut(keep)
        seen.add(other.bytes_of("a"))
    assert len(seen) == 6, "four without the resize, and two with it, which hides the second sector"
