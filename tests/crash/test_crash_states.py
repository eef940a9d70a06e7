"""A power cut at any point of a log's life: nothing acked is lost, nothing invented. scripts/crash-states does more.

Two bugs are planted, so that it is known that this would notice them.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence

from chronik_repl.wal.disk import File, Write
from tests.crash.scenario import record_life
from tests.crash.states import check_states, crash_states
from tests.simulation.disk import SimDisk, SimFile


def test_kf10_acked_survives_every_power_cut() -> None:
    """The unsynced tail may go; nothing else. A sample of the states of two lives."""
    count = 0
    for seed in (1, 2):
        events = record_life(seed)
        checked, failures = check_states(crash_states(events, random.Random(seed), random_states=2, skip=0.7))
        assert not failures, failures
        count += checked
    assert count > 1000, "a sample worth its name"


class ForgetsFolders(SimDisk):
    """The planted bug: directory syncs are left out."""

    async def sync_dir(self, folder: str) -> None:
        await self._call()


def test_kf18_a_directory_sync_left_out_is_noticed() -> None:
    events = record_life(1, ForgetsFolders)
    _, failures = check_states(crash_states(events, random.Random(1), random_states=1), failures_max=1)
    assert failures


class AcksEarly(SimDisk):
    """The planted bug: a commit returns before its sync, which comes with the next one."""

    _behind: SimFile | None = None

    async def _commit(self, file: SimFile, writes: Sequence[Write]) -> None:
        async with self._commits:
            if self._behind is not None:
                await self._sync(self._behind.inode, self._behind.name)
            self._behind = file
            for at, (data,) in writes:
                await self._write(file.inode, file.name, at, data)

    async def rename(self, old: str, new: str) -> None:
        if self._behind is not None:
            await self._finish(lambda: self._catch_up())
        await super().rename(old, new)

    async def _catch_up(self) -> None:
        assert self._behind is not None
        await self._sync(self._behind.inode, self._behind.name)


def test_kf23_an_ack_before_the_sync_is_noticed() -> None:
    events = record_life(1, AcksEarly)
    _, failures = check_states(crash_states(events, random.Random(1), random_states=1), failures_max=1)
    assert failures
    assert "acked up to" in failures[0].complaint


class MarksEarly(SimDisk):
    """The planted bug: a mark is written with the frames that go ahead, while what it speaks of is being synced."""

    def begin(self, file: File, early: Write, late: Write) -> Callable[[], Awaitable[None]]:
        if self._is_committing():
            assert isinstance(file, SimFile)
            self._put(file.inode, file.name, late.at, b"".join(late.buffers))
        return super().begin(file, early, late)


def test_a_mark_before_the_sync_it_speaks_of_is_noticed() -> None:
    events = record_life(1, MarksEarly)
    _, failures = check_states(crash_states(events, random.Random(1), random_states=1), failures_max=1)
    assert failures


def test_the_recording_covers_what_it_should() -> None:
    events = record_life(1)
    names = [name for name, _ in events]
    notes = [what[0] for name, what in events if name == "note"]
    renamed = [str(what[1]) for name, what in events if name == "rename"]
    assert notes.count("truncated") == 2
    assert notes.count("acked") > 30
    assert sum(name.endswith(".wal") for name in renamed) >= 6, "rolls"
    assert any(".idx." in str(what[0]) for name, what in events if name == "create"), "indexes"
    assert any(name == "unlink" and str(what[0]).endswith(".wal") for name, what in events), "retention"
    assert names.count("sync_dir") >= 6
