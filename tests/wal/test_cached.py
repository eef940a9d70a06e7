"""What the machine's memory holds of a log: its newest part, so that it does not push out what others need."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
import trio

from chronik_repl.positions import Position
from chronik_repl.wal import housekeeping, reader
from chronik_repl.wal.disk import File, RealDisk, Write
from chronik_repl.wal.log import Log
from chronik_repl.wal.segment import FRAMES_AT
from tests.wal.workbench import SETTINGS, RealPlace, lead, opened, segment_names, write_segments


def in_memory(path: Path, at: int = 0) -> bool:
    """Does the machine hold this page of the file?"""
    fd = os.open(path, os.O_RDONLY)
    try:
        return bool(os.preadv(fd, (bytearray(1),), at, os.RWF_NOWAIT))
    except BlockingIOError:
        return False
    finally:
        os.close(fd)


@pytest.fixture
async def forgetful(tmp_path: Path) -> Path:
    """A folder on a disk, not in memory."""
    disk = RealDisk(tmp_path)
    file = await disk.open("probe", create=True)
    await disk.commit(file, [Write(0, [b"x" * 100_000])])
    assert in_memory(tmp_path / "probe")
    await disk.drop_cached(file)
    assert await disk.read(file, 0, 1) == b"x", "nothing is lost by it"
    await disk.drop_cached(file)
    disk.close()
    if in_memory(tmp_path / "probe"):
        pytest.skip("this file system holds all its files in memory")
    return tmp_path


async def test_segments_leave_memory_once_they_are_not_new_any_more(
    forgetful: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(housekeeping, "CACHED_BYTES", 20_000)
    place = RealPlace(forgetful)
    async with opened(place) as log:
        lead(log)
        await write_segments(log, 10)
        oldest, *_, before_last, last, active = [forgetful / name for name in segment_names(place)]
        with trio.fail_after(30):
            while in_memory(oldest, FRAMES_AT):
                await trio.sleep(0.01)
        assert [in_memory(path, FRAMES_AT) for path in (before_last, last, active)] == [True] * 3, "the newest stay"


async def test_a_catch_up_leaves_nothing_of_an_old_segment_in_memory(
    forgetful: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "CACHED_BYTES", 20_000)
    place = RealPlace(forgetful)
    async with opened(place) as log:
        lead(log)
        await write_segments(log, 10)
        oldest, last = forgetful / segment_names(place)[0], forgetful / segment_names(place)[-2]
        assert in_memory(oldest, FRAMES_AT)
        at, buffer = log.start, memoryview(bytearray(4096))
        while at < log.durable.value:
            at = Position(at + await log.read_into(at, buffer))
        assert not in_memory(oldest, FRAMES_AT)
        assert in_memory(last, FRAMES_AT), "the newest stay"


async def test_a_scrubber_reads_the_disk_and_not_what_memory_knows_of_it(tmp_path: Path) -> None:
    place = RealPlace(tmp_path)
    async with opened(place) as log:
        lead(log)
        await write_segments(log, 4)
    said: list[tuple[str, str]] = []

    class Noting(RealDisk):
        async def drop_cached(self, file: File) -> None:
            said.append(("drop", file.name))
            await super().drop_cached(file)

        async def read(self, file: File, at: int, size: int) -> bytes:
            said.append(("read", file.name))
            return await super().read(file, at, size)

    log = await Log.open(Noting(tmp_path), msgspec.structs.replace(SETTINGS, scrub_mb_per_s=1000), None)
    async with trio.open_nursery() as nursery:
        said.clear()  # what opening read
        await nursery.start(log.run)
        with trio.fail_after(30):
            while not log.stats.scrub_rounds:
                await trio.sleep(0.01)
        nursery.cancel_scope.cancel()
    await log.close()
    for name in segment_names(place)[:-1]:
        of_it = [what for what, where in said if where == name]
        assert of_it[0] == of_it[-1] == "drop", name
        assert "read" in of_it, name
