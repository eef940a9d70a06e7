"""The real disk on this machine's files. What both disks promise alike stands in test_disk_contract.py."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import trio

from chronik_repl.errors import DiskFailed, ForeignLog
from chronik_repl.wal.disk import Buffer, Disk, RealDisk, Write


async def test_commits_run_in_call_order_and_may_overlap(tmp_path: Path) -> None:
    disk: Disk = RealDisk(tmp_path)
    file = await disk.open("a", create=True)
    done: list[int] = []

    async def commit(n: int) -> None:
        await disk.commit(file, [Write(0, [b"%04d" % n] * 2), Write(4096, [b"%04d" % n])])
        done.append(n)

    async with trio.open_nursery() as nursery:
        for n in range(20):
            nursery.start_soon(commit, n)
            await trio.testing.wait_all_tasks_blocked()
    assert sorted(done) == list(range(20))
    assert await disk.read(file, 0, 100) == b"00190019" + bytes(92)
    assert await disk.read(file, 4096, 100) == b"0019"
    assert await disk.size(file) == 4100
    disk.close()


async def test_only_what_may_be_early_is_written_before_the_commit_ahead_is_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    syncing, may_end, fdatasync = threading.Event(), threading.Event(), os.fdatasync

    def slow(fd: int) -> None:
        syncing.set()
        may_end.wait()
        fdatasync(fd)

    disk = RealDisk(tmp_path)
    file = await disk.open("a", create=True)
    large = b"2" * 100_000
    monkeypatch.setattr("os.fdatasync", slow)
    first = disk.begin(file, Write(8, [b"1"]), Write(0, [b"A"]))
    await trio.to_thread.run_sync(syncing.wait)
    second = disk.begin(file, Write(9, [large]), Write(0, [b"B"]))
    try:
        with trio.fail_after(10):
            while (tmp_path / "a").read_bytes()[9:] != large:  # while the device is at the first one
                await trio.sleep(0.001)
        assert (tmp_path / "a").read_bytes()[:1] == b"A", "the late part speaks of what is not durable yet"
    finally:
        may_end.set()
    await first()
    await second()
    assert (tmp_path / "a").read_bytes() == b"B" + bytes(7) + b"1" + large
    disk.close()


async def test_a_mark_waits_for_its_frames_whichever_thread_writes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    syncing, running_ahead, marked = threading.Event(), threading.Event(), threading.Event()
    pwritev, fdatasync, order = os.pwritev, os.fdatasync, []

    def write(fd: int, buffers: Sequence[Buffer], at: int) -> int:
        if threading.current_thread().name == "forerunner":
            running_ahead.set()
            marked.wait(0.3)  # for what must not come
            order.append("frames")
        elif buffers == [b"B"]:
            order.append("mark")
            marked.set()
        elif buffers != [b"1"] and buffers != [b"A"]:
            order.append("frames again")
        return pwritev(fd, buffers, at)

    def sync(fd: int) -> None:
        syncing.set()
        running_ahead.wait()
        fdatasync(fd)

    monkeypatch.setattr("os.pwritev", write)
    monkeypatch.setattr("os.fdatasync", sync)
    disk = RealDisk(tmp_path)
    file = await disk.open("a", create=True)
    first = disk.begin(file, Write(8, [b"1"]), Write(0, [b"A"]))
    await trio.to_thread.run_sync(syncing.wait)
    second = disk.begin(file, Write(9, [b"2" * 100_000]), Write(0, [b"B"]))
    await first()
    await second()
    assert order == ["frames", "mark"]
    disk.close()


async def test_an_error_of_what_may_be_early_is_final(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwritev = os.pwritev

    def write(fd: int, buffers: Sequence[Buffer], at: int) -> int:
        if at == 8:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return pwritev(fd, buffers, at)

    monkeypatch.setattr("os.pwritev", write)
    disk = RealDisk(tmp_path)
    file = await disk.open("a", create=True)
    ended = disk.begin(file, Write(8, [b"1"]), Write(0, [b"A"]))
    with pytest.raises(DiskFailed, match="write failed: Input/output error"):
        await ended()
    assert (tmp_path / "a").read_bytes() == b"", "a mark of what is not there"
    disk.close()


async def test_nobody_is_told_before_the_sync_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told, fdatasync, order = threading.Event(), os.fdatasync, []

    def sync(fd: int) -> None:
        told.wait(0.2)  # for what must not come
        fdatasync(fd)
        order.append("synced")

    monkeypatch.setattr("os.fdatasync", sync)
    disk = RealDisk(tmp_path)
    file = await disk.open("a", create=True)
    await disk.begin(file, Write(8, [b"1"]), Write(0, [b"A"]))()
    order.append("told")
    told.set()
    assert order == ["synced", "told"]
    disk.close()


async def test_a_file_that_is_closed_under_a_cancelled_commit_keeps_its_number_until_that_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing, may_write, pwritev = threading.Event(), threading.Event(), os.pwritev

    def write(fd: int, buffers: Sequence[Buffer], at: int) -> int:
        writing.set()
        may_write.wait()
        return pwritev(fd, buffers, at)

    monkeypatch.setattr("os.pwritev", write)
    disk = RealDisk(tmp_path)
    file = await disk.open("a", create=True)
    ended = disk.begin(file, Write(8, [b"1"]), Write(0, [b"A"]))
    await trio.to_thread.run_sync(writing.wait)
    with trio.CancelScope() as scope:
        scope.cancel()
        await ended()
    file.close()
    for name in "bcdefg":  # one of them would get that number
        await disk.open(name, create=True)
    may_write.set()
    disk.close()
    assert (tmp_path / "a").read_bytes() == b"A" + bytes(7) + b"1"
    assert not any((tmp_path / name).read_bytes() for name in "bcdefg")


async def test_more_buffers_than_one_system_call_takes(tmp_path: Path) -> None:
    disk = RealDisk(tmp_path)
    file = await disk.open("a", create=True)
    pieces = [os.urandom(n % 50) for n in range(5000)]
    await disk.commit(file, [Write(3, pieces)])
    assert (await disk.read(file, 3, 1 << 20)) == b"".join(pieces)
    disk.close()


async def test_cancelled_waiter_does_not_stop_its_write(tmp_path: Path) -> None:
    disk = RealDisk(tmp_path)
    file = await disk.open("a", create=True)
    with trio.CancelScope() as scope:
        scope.cancel()
        await disk.commit(file, [Write(0, [b"written"])])
    assert scope.cancelled_caught
    file.close()  # behind the write, not under it
    again = await disk.open("a")
    await disk.commit(again, [Write(7, [b"!"])])
    assert await disk.read(again, 0, 100) == b"written!"
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        with trio.CancelScope() as scope:
            scope.cancel()
            await disk.commit(again, [Write(0, [b"again"])])
        await disk.commit(again, [Write(0, [b"again"])])
    assert len(os.listdir("/proc/self/fd")) <= before + 2, "eventfds of cancelled tasks are used again"
    disk.close()


async def test_any_error_of_a_write_is_final(tmp_path: Path) -> None:
    disk = RealDisk(tmp_path)
    full = await disk.open("a", create=True)
    os.dup2(os.open("/dev/full", os.O_WRONLY), full.fd)  # type: ignore[attr-defined]
    good = await disk.open("b", create=True)
    results: list[str] = []

    async def commit(file: object) -> None:
        with pytest.raises(DiskFailed) as caught:
            await disk.commit(file, [Write(0, [b"x"])])  # type: ignore[arg-type]
        results.append(str(caught.value))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(commit, full)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(commit, good)
    with pytest.raises(DiskFailed):
        await disk.replace("c", b"")
    with pytest.raises(DiskFailed):
        await disk.preallocate("d", 10)
    assert len(set(results)) == 1, "one failure, told alike to everybody"
    assert "No space left" in results[0]
    assert await disk.read(good, 0, 10) == b"", "nothing behind the failure was done"
    disk.close()


async def test_directory_in_use_names_the_process(tmp_path: Path) -> None:
    first, second = RealDisk(tmp_path), RealDisk(tmp_path)
    first.lock()
    with pytest.raises(ForeignLog, match=f"process {os.getpid()}"):
        second.lock()
    first.close()
    second.lock()
    second.close()


async def test_close_leaves_nothing_open(tmp_path: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    disk = RealDisk(tmp_path)
    disk.lock()
    for name in "abc":
        file = await disk.open(name, create=True)
        await disk.commit(file, [Write(0, [b"x"])])
    await disk.preallocate("spare", 3 << 20)
    disk.close()
    assert set(os.listdir("/proc/self/fd")) == before


async def test_a_filling_that_has_gone_far_enough_ends_with_its_step(tmp_path: Path) -> None:
    disk = RealDisk(tmp_path, fill_pace=1_000_000)  # with rests that nobody would live to see the end of
    size, enough = 64 << 20, trio.Event()
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: disk.preallocate("spare", size, enough=enough))
            while not (tmp_path / "spare").exists():
                await trio.lowlevel.checkpoint()
            enough.set()
    assert (tmp_path / "spare").stat().st_size in (size, 1 << 20)  # by file system: space ahead of the zeros, or not
    assert not any((tmp_path / "spare").read_bytes())
    disk.close()
