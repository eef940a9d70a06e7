"""The next segment's file: filled ahead of need, and never filled again once it is on its way to become a segment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import trio
import trio.testing

from chronik_repl.wal.committer import SPARE
from chronik_repl.wal.disk import File, Write
from tests.simulation.disk import SimDisk
from tests.wal.workbench import Place, SimPlace, batch, frames_in, lead, opened, segment_names, settle


class WatchedDisk(SimDisk):
    """Slow to write the header of a spare, and it knows between which calls a spare is nobody else's."""

    taken = False
    filled_while_taken = 0
    becoming_segments = 0
    ask_for_another: Callable[[], None] = staticmethod(lambda: None)

    async def open(self, name: str, *, create: bool = False) -> File:
        if name == SPARE:
            self.taken = True
            self.becoming_segments += 1
        return await super().open(name, create=create)

    async def commit(self, file: File, writes: Sequence[Write]) -> None:
        if file.name == SPARE:
            self.ask_for_another()
            await trio.testing.wait_all_tasks_blocked()  # whoever fills it would do so now
        await super().commit(file, writes)

    async def rename(self, old: str, new: str) -> None:
        await super().rename(old, new)
        if old == SPARE:
            self.taken = False

    async def preallocate(self, name: str, size: int, **options: Any) -> None:
        if name == SPARE and self.taken:
            self.filled_while_taken += 1
        await super().preallocate(name, size, **options)


class WatchedPlace(SimPlace):
    def disk(self) -> WatchedDisk:
        self.watched = WatchedDisk(self.rng, self.medium)
        self.watched.slowness = 0.0
        return self.watched


async def test_a_spare_on_its_way_to_become_a_segment_is_not_filled_again() -> None:
    """It was once: the filling's zeros went over frames that were already acked."""
    place = WatchedPlace()
    async with opened(place) as log:
        lead(log)
        await settle(log)
        place.watched.ask_for_another = lambda: log._committer._spare_wanted.set()
        for number in range(60):
            log.append_batch("t", 0, batch(1, 900, fill=number), record_count=1)
            await settle(log)
        assert place.watched.becoming_segments >= 3, "the spare must be used for this to mean anything"
        assert place.watched.filled_while_taken == 0
    kept = [frame for name in segment_names(place) for frame in frames_in(place, name) if frame.kind == 0]
    assert len(kept) == 60


class SlowToFill(SimDisk):
    """Never ready with a spare by itself: its filling ends only when someone has had enough."""

    partly_filled = 0

    async def preallocate(self, name: str, size: int, *, enough: trio.Event | None = None) -> None:
        assert enough is not None
        await super().preallocate(name, size // 2, enough=enough)
        await enough.wait()
        self.partly_filled += 1


class SlowPlace(SimPlace):
    def disk(self) -> SlowToFill:
        self.slow = SlowToFill(self.rng, self.medium)
        self.slow.slowness = 0.0
        return self.slow


async def test_a_roll_takes_the_spare_as_it_is() -> None:
    """It does not wait for the filling: frames go beyond what was filled, and are there after the next opening."""
    place = SlowPlace()
    async with opened(place) as log:
        lead(log)
        with trio.fail_after(10):
            for number in range(60):
                log.append_batch("t", 0, batch(1, 900, fill=number), record_count=1)
                await settle(log)
        assert place.slow.partly_filled >= 5
        end = log.end
    async with opened(place) as log:
        assert log.end == end
    kept = [frame for name in segment_names(place) for frame in frames_in(place, name) if frame.kind == 0]
    assert len(kept) == 60


async def test_a_spare_that_someone_removed_is_not_missed(place: Place) -> None:
    async with opened(place) as log:
        lead(log)
        with trio.fail_after(20):
            for number in range(60):
                while not log._committer._spare_exists:
                    await trio.sleep(0.001)
                if SPARE in place.names():
                    place.remove(SPARE)
                log.append_batch("t", 0, batch(1, 900, fill=number), record_count=1)
                await settle(log)
        assert log.stats.segments_rolled >= 5
    kept = [frame for name in segment_names(place) for frame in frames_in(place, name) if frame.kind == 0]
    assert len(kept) == 60
