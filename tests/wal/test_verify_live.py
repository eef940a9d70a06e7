"""`verify` and `dump` while the node works: each moment at which the log changes under them, one by one.

The log stands still until the reader is at the moment in question, and then does one thing while the reader waits. So
what happens once in a hundred runs beside a busy node happens here every time.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio

from chronik_repl.positions import Position
from chronik_repl.wal import verify as verify_module
from chronik_repl.wal.changes import LogStartMoved
from chronik_repl.wal.dump import Trouble, Wanted, dump
from chronik_repl.wal.log import Log
from chronik_repl.wal.survey import READ_BYTES, segment_paths
from chronik_repl.wal.values import LogSettings
from chronik_repl.wal.verify import Verified, verify
from tests.wal.workbench import RealPlace, batch, lead, opened, settle, write_segments

LARGE = LogSettings(segment_bytes=3 * READ_BYTES, min_free_bytes=0, scrub_mb_per_s=0)


class Meanwhile:
    """A progress callback: after `frames` frames it lets the log do something, and waits until that is done."""

    def __init__(self, frames: int, do: Callable[[], Awaitable[None]]) -> None:
        self._left, self._do = frames, do

    def __call__(self, size: int) -> None:
        self._left -= 1
        if self._left == 0:
            trio.from_thread.run(self._do)


async def verify_and(directory: Path, frames: int, do: Callable[[], Awaitable[None]]) -> Verified:
    with trio.fail_after(30):
        return await trio.to_thread.run_sync(verify, directory, Meanwhile(frames, do))


async def frames_now(directory: Path) -> int:
    return (await trio.to_thread.run_sync(verify, directory)).frames


async def retain(log: Log, start: Position, directory: Path) -> None:
    """Retention up to the segment at `start`; returns when the files before it are gone."""
    log.append_change(LogStartMoved(start))
    await settle(log)
    while segment_paths(directory)[0][0] < start:
        await trio.lowlevel.checkpoint()


async def test_the_last_segment_is_sealed_after_it_was_read(tmp_path: Path) -> None:
    """The index that appears then is of more frames than were seen."""
    async with opened(RealPlace(tmp_path)) as log:
        lead(log)
        await write_segments(log, 2)
        seen = log.durable.value

        async def roll_and_seal() -> None:
            await write_segments(log, 4)

        found = await verify_and(tmp_path, await frames_now(tmp_path), roll_and_seal)
        assert found.damage == []
        assert found.end >= seen
        assert found.segments == 2


async def test_retention_takes_the_first_segment_for_a_reason_that_stands_in_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(RealPlace(tmp_path)) as log:
        lead(log)
        await write_segments(log, 3)
        middle, _, _ = await log.segment_bounds(Position(log.end // 2))
        listed: list[tuple[Position, Path]] = []

        async def roll_and_retain() -> None:
            await write_segments(log, 5)
            await retain(log, middle, tmp_path)

        def list_then_retain(directory: Path) -> list[tuple[Position, Path]]:
            listed.extend(segment_paths(directory))
            trio.from_thread.run(roll_and_retain)
            return listed

        monkeypatch.setattr(verify_module, "segment_paths", list_then_retain)
        with trio.fail_after(30):
            found = await trio.to_thread.run_sync(verify, tmp_path)
        assert found.damage == []
        assert found.start == middle > listed[0][0]
        assert any("removed meanwhile" in note for note in found.notes)


async def test_missing_first_segments_are_still_damage_where_nothing_was_removed_meanwhile(tmp_path: Path) -> None:
    async with opened(RealPlace(tmp_path)) as log:
        lead(log)
        await write_segments(log, 3)
    segment_paths(tmp_path)[0][1].unlink()
    (damage,) = verify(tmp_path).damage
    assert "are missing" in damage.what


async def write_large_segments(log: Log) -> Position:
    """Segments that take more than one read each; returns where the high watermark is, early in the first."""
    lead(log)
    await settle(log)
    while log.segments < 3:
        log.append_batch("t", 0, batch(1, 100_000), record_count=1)
        await log.durable.wait(log.end)
    return log.committed.value


async def test_a_truncation_while_a_sealed_segment_is_read(tmp_path: Path) -> None:
    """What a follower does when it meets a new leader: the segments after it go, the rest of it becomes zeros."""
    async with opened(RealPlace(tmp_path), LARGE) as log:
        committed = await write_large_segments(log)

        async def truncate() -> None:
            await log.truncate(committed)

        found = await verify_and(tmp_path, 5, truncate)
        assert found.damage == []
        assert found.frames > 5


async def test_a_dump_beside_a_truncation_names_no_damage(tmp_path: Path) -> None:
    async with opened(RealPlace(tmp_path), LARGE) as log:
        committed = await write_large_segments(log)
        lines = dump(tmp_path, Wanted(json=True))
        shown = [next(lines)]
        await log.truncate(committed)
        with trio.fail_after(30):
            shown += await trio.to_thread.run_sync(list, lines)
        assert [line for line in shown if isinstance(line, Trouble)] == []
        assert len(shown) > 5
