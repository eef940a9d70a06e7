"""A log written on real files, as a process of its own: `python -m tests.crash.life DIRECTORY GROUPS SEED [ahead]`.

It opens the log (or founds it), appends, and says on stdout what is durable, a line an ack: `acked OFFSET SIZE FILL`.
The batch follows from size and fill, so whoever reads the lines knows what must be there after a crash. On a disk
error it says `failed MESSAGE` and ends with code 3, and `acked` after that would be a lie that the reader notices.

It waits for each group, or, with `ahead`, appends frames so large and so many that two groups are with the disk.
"""

from __future__ import annotations

import os
import random
import sys
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path

import trio

from chronik_repl.errors import DiskFailed, first_of
from chronik_repl.positions import Epoch, Position
from chronik_repl.wal.changes import EpochStart, TopicMade
from chronik_repl.wal.disk import RealDisk
from chronik_repl.wal.log import Log
from chronik_repl.wal.values import LogSettings
from tests.crash.scenario import CLUSTER, batch

SETTINGS = LogSettings(segment_bytes=32 * 1024, min_free_bytes=0, scrub_mb_per_s=0)
AHEAD_SETTINGS = LogSettings(segment_bytes=512 * 1024, min_free_bytes=0, scrub_mb_per_s=0)
AHEAD = 4  # batches that are appended and not yet durable
RECORDS = 3
Say = Callable[[str], None]


async def live(
    directory: Path, groups: int, seed: int, say: Say, settings: LogSettings = SETTINGS, *, ahead: bool = False
) -> None:
    """Append `groups` groups, a few batches each, and wait for each group; or `ahead`: as many large batches, without
    waiting for each. Raises DiskFailed or DiskFull."""
    rng = random.Random(seed)
    disk = RealDisk(directory, fill_pace=0)
    try:
        disk.lock()
        log = await Log.open(disk, AHEAD_SETTINGS if ahead else settings, CLUSTER)
        async with trio.open_nursery() as nursery:
            await nursery.start(log.run)
            _begin(log)
            await (_append_ahead if ahead else _append)(log, groups, rng, say)
            nursery.cancel_scope.cancel()
        await log.close()
    except BaseExceptionGroup as group:
        errors = group.subgroup(DiskFailed)
        if errors is None:
            raise
        raise first_of(errors) from None
    finally:
        disk.close()


def _begin(log: Log) -> None:
    if not log.state.history:
        log.found(CLUSTER)
    log.begin_epoch(Epoch(log.state.history[-1].epoch + 1 if log.state.history else 1), EpochStart(1, "directory"))
    if "t" not in log.state.topics:
        log.append_change(TopicMade("t", 1))


async def _append(log: Log, groups: int, rng: random.Random, say: Say) -> None:
    for _ in range(groups):
        acks = []
        for _ in range(rng.choice((1, 2, 4))):
            size, fill = rng.choice((50, 500, 5000)), rng.randrange(256)
            appended = log.append_batch("t", 0, batch(RECORDS, size, fill), record_count=RECORDS)
            acks.append(f"acked {appended.base_offset} {size} {fill}")
        await log.durable.wait(log.end)
        log.commit_to(log.durable.value)
        for ack in acks:
            say(ack)


async def _append_ahead(log: Log, batches: int, rng: random.Random, say: Say) -> None:
    waiting: deque[tuple[Position, str]] = deque()
    for number in range(batches + AHEAD):
        if number < batches:
            size, fill = rng.choice((500, 20_000, 40_000)), rng.randrange(256)
            appended = log.append_batch("t", 0, batch(RECORDS, size, fill), record_count=RECORDS)
            waiting.append((appended.end, f"acked {appended.base_offset} {size} {fill}"))
            await trio.lowlevel.checkpoint()  # each may be a group
        if number >= AHEAD:
            end, ack = waiting.popleft()
            await log.durable.wait(end)
            log.commit_to(log.durable.value)
            say(ack)


async def missing(directory: Path, said: list[str], settings: LogSettings = SETTINGS) -> list[str]:
    """Of the acks that were said: those that the recovered log does not hold, byte for byte."""
    disk = RealDisk(directory, fill_pace=0)
    lost = []
    try:
        disk.lock()
        log = await Log.open(disk, settings, CLUSTER)
        if said:
            async with trio.open_nursery() as nursery:
                await nursery.start(log.run)
                log.commit_to(log.durable.value)
                for line in said:
                    word, *numbers = line.split()
                    assert word == "acked", line
                    offset, size, fill = map(int, numbers)
                    if log.end_offset("t", 0) < offset + RECORDS:
                        lost.append(line)
                        continue
                    fetched = await log.fetch("t", 0, offset, 1)
                    got = bytes(fetched.batches[0])
                    # The leader's epoch and the offset stand in the first 16 bytes.
                    if int.from_bytes(got[:8], "big") != offset or got[16:] != batch(RECORDS, size, fill)[16:]:
                        lost.append(line)
                nursery.cancel_scope.cancel()
            await log.close()
    finally:
        disk.close()
    return lost


def main() -> int:
    directory, groups, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])

    def say(line: str) -> None:
        os.write(1, line.encode() + b"\n")  # no buffer: a killed process said what it said

    try:
        trio.run(partial(live, directory, groups, seed, say, ahead=sys.argv[4:] == ["ahead"]))
    except DiskFailed as error:
        say(f"failed {error}")
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
