"""Real faults of a real machine: acked is there, always. `scripts/faults` repeats each as often as you like."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import trio

from chronik_repl.errors import ChronikError, DiskFailed, DiskFull
from chronik_repl.wal.seam import Buffer
from chronik_repl.wal.values import LogSettings
from tests.crash.faults import (
    CannotDo,
    PowerCuts,
    can_shut_down,
    fail_nth_sync,
    fail_nth_write,
    kill_at_write,
    kill_inside_write,
    mounted,
)
from tests.crash.life import live, missing


def at_each(run: Callable[[Path, int], tuple[bool, str]], numbers: list[int], tmp_path: Path) -> int:
    reached = 0
    try:
        for n in numbers:
            hit, wrong = run(tmp_path / str(n), n)
            assert not wrong, f"at {n}: {wrong}"
            reached += hit
    except CannotDo as error:
        pytest.skip(str(error))
    return reached


def test_kf15_a_failed_fdatasync_is_final_and_what_was_acked_is_there(tmp_path: Path) -> None:
    """EIO at the nth fdatasync of a run; the later ones would succeed. No retry, no ack after it."""
    assert at_each(fail_nth_sync, [1, 2, 3, 5, 8, 11], tmp_path) >= 5


def test_kill_9_in_the_middle_of_each_write(tmp_path: Path) -> None:
    """Every write of the run, to its end: frames, marks, headers, the filling of spares, indexes."""
    for n in itertools.count(1):
        hit, wrong = kill_inside_write(tmp_path / str(n), n)
        assert not wrong, f"at write {n}: {wrong}"
        if not hit:
            break
    assert n > 80


def test_kill_9_in_the_middle_of_each_write_while_two_groups_are_with_the_disk(tmp_path: Path) -> None:
    for n in itertools.count(1):
        hit, wrong = kill_inside_write(tmp_path / str(n), n, groups=80, ahead=True)
        assert not wrong, f"at write {n}: {wrong}"
        if not hit:
            break
    assert n > 50


def test_an_error_while_two_groups_are_with_the_disk_is_final(tmp_path: Path) -> None:
    """Of a sync, of a group's frames in whichever thread writes them, of its mark."""
    assert at_each(partial(fail_nth_sync, ahead=True), [2, 5, 9], tmp_path / "syncs") >= 2
    assert at_each(partial(fail_nth_write, ahead=True), [1, 2, 6, 7], tmp_path / "writes") >= 3


def test_kill_9_from_outside_at_some_writes(tmp_path: Path) -> None:
    """The same by strace, which stops the process at the door of the system call."""
    assert at_each(kill_at_write, [2, 7, 16], tmp_path) >= 2


def test_kf10_a_true_power_cut_twenty_times(tmp_path: Path) -> None:
    """ext4 on a loop device, shut down without flushing its journal, mounted again."""
    try:
        can_shut_down()
        cuts = PowerCuts(tmp_path, seed=1)
        for n in range(20):
            wrong = cuts.cut()
            assert not wrong, f"cut {n}: {wrong}"
    except CannotDo as error:
        pytest.skip(str(error))
    assert len(cuts.acked) > 20
    assert cuts.cuts_in_flight > 2


def test_kf10_a_true_power_cut_while_two_groups_are_with_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The frames of the one behind may be there whole, and those of the one ahead not."""
    pwritev, ran_ahead = os.pwritev, 0

    def write(fd: int, buffers: Sequence[Buffer], at: int) -> int:
        nonlocal ran_ahead
        ran_ahead += threading.current_thread().name == "forerunner"
        return pwritev(fd, buffers, at)

    monkeypatch.setattr("os.pwritev", write)
    try:
        can_shut_down()
        cuts = PowerCuts(tmp_path, seed=4, ahead=True)
        for n in range(20):
            wrong = cuts.cut()
            assert not wrong, f"cut {n}: {wrong}"
    except CannotDo as error:
        pytest.skip(str(error))
    assert cuts.cuts_in_flight > 2
    assert ran_ahead > 5


def test_a_power_cut_shows_a_sync_that_was_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: so that it is known that the cuts are true ones."""
    try:
        can_shut_down()
        monkeypatch.setattr("os.fdatasync", lambda fd: None)
        cuts = PowerCuts(tmp_path, seed=2)
        assert any(cuts.cut() for _ in range(10))
    except CannotDo as error:
        pytest.skip(str(error))


def test_kf17_a_full_file_system_and_the_restart_once_there_is_space(tmp_path: Path) -> None:
    """A tmpfs too small for the run: writes end in mid-frame. Everything acked is there, before and after there is
    space, and the log goes on."""
    settings = LogSettings(segment_bytes=1024 * 1024, min_free_bytes=0, scrub_mb_per_s=0)
    said: list[str] = []
    try:
        with mounted(["-t", "tmpfs", "-o", "size=300k", "tmpfs"], tmp_path / "small") as where:
            ballast = where / "ballast"
            ballast.write_bytes(bytes(100 * 1024))
            with pytest.raises((DiskFailed, DiskFull), match=r"[Nn]o space"):
                trio.run(live, where / "log", 500, 1, said.append, settings)
            assert said
            assert trio.run(missing, where / "log", said, settings) == []
            ballast.unlink()
            before = len(said)
            with pytest.raises((DiskFailed, DiskFull)):
                trio.run(live, where / "log", 500, 2, said.append, settings)
            assert len(said) > before, "it went on where it had stopped"
            assert trio.run(missing, where / "log", said, settings) == []
    except CannotDo as error:
        pytest.skip(str(error))


async def test_a_directory_in_use_is_refused(tmp_path: Path) -> None:
    alive = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(live, tmp_path, 10_000, 1, lambda _: alive.set())
        with trio.fail_after(30):
            await alive.wait()
        with pytest.raises(ChronikError, match="in use by process"):
            await missing(tmp_path, [])
        nursery.cancel_scope.cancel()
