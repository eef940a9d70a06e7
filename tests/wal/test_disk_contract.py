"""What `Disk` promises, on both of its implementations."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from chronik_repl.errors import ForeignLog
from chronik_repl.wal.disk import Disk, RealDisk, Write
from tests.simulation.disk import SimDisk


@pytest.fixture(params=["real", "simulated"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    made: Disk = RealDisk(tmp_path, fill_pace=0) if request.param == "real" else SimDisk(random.Random(1))
    yield made
    made.close()


async def test_written_is_read(disk: Disk) -> None:
    file = await disk.open("a", create=True)
    await disk.commit(file, [Write(5, [b"one", bytearray(b"two"), memoryview(b"three")]), Write(1, [b"x"])])
    assert await disk.read(file, 0, 100) == b"\0x\0\0\0onetwothree"
    assert await disk.read(file, 8, 3) == b"two"
    assert await disk.read(file, 100, 3) == b""
    assert await disk.size(file) == 16


async def test_commits_keep_their_order_and_a_return_covers_all_before_it(disk: Disk) -> None:
    file = await disk.open("a", create=True)

    async def commit(n: int) -> None:
        await disk.commit(file, [Write(0, [b"%02d" % n]), Write(2 + n, [b"!"])])
        assert (await disk.read(file, 2, n + 1)) == b"!" * (n + 1)

    async with trio.open_nursery() as nursery:
        for n in range(8):
            nursery.start_soon(commit, n)
            await wait_all_tasks_blocked()
    assert await disk.read(file, 0, 2) == b"07"


async def test_what_was_begun_is_done_by_whoever_waits_for_it(disk: Disk) -> None:
    file = await disk.open("a", create=True)
    large = b"2" * 100_000
    first = disk.begin(file, Write(8, [b"one", b"!"]), Write(0, [b"A"]))
    second = disk.begin(file, Write(12, [large, b"!"]), Write(0, [b"B"]))
    await first()
    await second()
    assert await disk.read(file, 0, 200_000) == b"B" + bytes(7) + b"one!" + large + b"!"
    await disk.commit(file, [Write(0, [b"C"])])
    assert await disk.read(file, 0, 9) == b"C" + bytes(7) + b"o"


async def test_files_and_folders(disk: Disk) -> None:
    assert await disk.list("wal") == {}
    await disk.make_folder("wal")
    await disk.make_folder("wal")
    with pytest.raises(FileNotFoundError):
        await disk.open("wal/a")
    await disk.preallocate("wal/spare", 3 * 1024 * 1024 + 5)
    file = await disk.open("wal/spare")
    await disk.rename("wal/spare", "wal/a")
    await disk.sync_dir("wal")
    assert file.name == "wal/a"
    assert await disk.list("wal") == {"a": 3 * 1024 * 1024 + 5}
    assert not any(await disk.read(file, 0, 4 * 1024 * 1024))
    await disk.commit(file, [Write(0, [b"abcdef"])])
    await disk.zero(file, 3, 10)
    assert await disk.read(file, 0, 100) == b"abc" + bytes(7)
    await disk.truncate(file, 2)
    await disk.set_read_only("wal/a")
    assert await disk.list("wal") == {"a": 2}
    await disk.replace("node", b"first")
    await disk.replace("node", b"2nd")
    assert await disk.list("") == {"node": 3}
    await disk.remove("wal/a")
    await disk.remove("wal/a")
    assert await disk.list("wal") == {}
    assert await disk.read(file, 0, 10) == b"ab", "a reader keeps what it opened"
    assert disk.free_bytes() > 0


async def test_the_lock_is_taken_once(disk: Disk, tmp_path: Path) -> None:
    disk.lock()
    other: Disk = RealDisk(tmp_path) if isinstance(disk, RealDisk) else disk
    with pytest.raises(ForeignLog, match="in use by process"):
        other.lock()
