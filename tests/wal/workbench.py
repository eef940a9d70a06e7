"""What the log's tests stand on: batches, and a place for a log that can be looked into and tampered with.

A `Place` is a data directory, on the machine or simulated; each `opened` is one process's life in it.
"""

from __future__ import annotations

import random
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

import trio
from crc32c import crc32c

from chronik_repl.positions import Checksum, Epoch, Position
from chronik_repl.wal.changes import EpochStart, TopicMade
from chronik_repl.wal.disk import Disk, RealDisk
from chronik_repl.wal.frame import Frame, decode
from chronik_repl.wal.log import Appended, Log, LogSettings
from chronik_repl.wal.segment import FRAMES_AT, Mark, encode_mark, mark_offset
from tests.simulation.disk import SimDisk
from tests.simulation.medium import Medium

SETTINGS = LogSettings(segment_bytes=8192, min_free_bytes=0, scrub_mb_per_s=0)
CLUSTER = "workbench"
BATCH = struct.Struct(">qiibIhiqqqhii")


def batch(
    records: int = 1,
    size: int = 100,
    *,
    fill: int = 120,
    producer: tuple[int, int, int] = (-1, -1, -1),
    newest: int = 5,
) -> bytes:
    """A record batch (v2) of about this size; the log never looks at its records. `producer`: id, epoch, sequence."""
    tail = BATCH.pack(0, 0, 0, 0, 0, 0, records - 1, newest, newest, *producer, records)[21:] + bytes([fill]) * size
    return BATCH.pack(0, len(tail) + 9, -1, 2, crc32c(tail), 0, 0, 0, 0, 0, 0, 0, 0)[:21] + tail


class Place(Protocol):
    def disk(self) -> Disk: ...

    def names(self) -> list[str]: ...

    def read(self, name: str) -> bytes: ...

    def write(self, name: str, data: bytes) -> None:
        """The whole file, behind the log's back, durable."""

    def remove(self, name: str) -> None: ...


class RealPlace:
    def __init__(self, path: Path) -> None:
        self.path = path

    def disk(self) -> RealDisk:
        return RealDisk(self.path, fill_pace=0)

    def names(self) -> list[str]:
        return sorted(str(p.relative_to(self.path)) for p in self.path.rglob("*") if p.is_file())

    def read(self, name: str) -> bytes:
        return (self.path / name).read_bytes()

    def write(self, name: str, data: bytes) -> None:
        (self.path / name).parent.mkdir(exist_ok=True)
        if (self.path / name).exists():
            (self.path / name).chmod(0o644)
        (self.path / name).write_bytes(data)

    def remove(self, name: str) -> None:
        (self.path / name).unlink()


class SimPlace:
    def __init__(self) -> None:
        self.medium = Medium()
        self.rng = random.Random(1)

    def disk(self) -> SimDisk:
        disk = SimDisk(self.rng, self.medium)
        disk.slowness = 0.0
        return disk

    def names(self) -> list[str]:
        return sorted(self.medium.image())

    def read(self, name: str) -> bytes:
        return self.medium.bytes_of(name)

    def write(self, name: str, data: bytes) -> None:
        self.medium.make_folder(name.rpartition("/")[0])
        found = self.medium.find(name)
        inode = self.medium.create(name) if found is None else found
        self.medium.resize(inode, 0)
        self.medium.write(inode, 0, data)
        self.medium.sync(inode)
        self.medium.sync_dir(name.rpartition("/")[0])

    def remove(self, name: str) -> None:
        self.medium.unlink(name)
        self.medium.sync_dir(name.rpartition("/")[0])


@asynccontextmanager
async def opened(place: Place, settings: LogSettings = SETTINGS, *, run: bool = True) -> AsyncIterator[Log]:
    """A log, open and running, and stopped cleanly in the end."""
    disk = place.disk()
    try:
        log = await Log.open(disk, settings, CLUSTER)
        if run:
            async with trio.open_nursery() as nursery:
                await nursery.start(log.run)
                yield log
                nursery.cancel_scope.cancel()
        else:
            yield log
        await log.close()
    finally:
        disk.close()


def lead(log: Log, epoch: int = 1, *, topics: dict[str, int] | None = None) -> Appended:
    """Begin an epoch; on a new log make these topics too (`t` with two partitions)."""
    if log.cluster_id is None or not log.segments:
        log.found(CLUSTER)
    appended = log.begin_epoch(Epoch(epoch), EpochStart(1, "directory"))
    for topic, partitions in ({"t": 2} if topics is None else topics).items():
        if topic not in log.state.topics:
            appended = log.append_change(TopicMade(topic, partitions))
    return appended


async def settle(log: Log) -> None:
    """All that was appended is durable and committed."""
    await log.durable.wait(log.end)
    log.commit_to(log.end)


async def write_some(log: Log, count: int, *, size: int = 100, topic: str = "t", partitions: int = 2) -> None:
    """Batches, each of three records, over the partitions in turn; a group every few of them; settled in the end."""
    for number in range(count):
        log.append_batch(topic, number % partitions, batch(3, size, fill=number % 251), record_count=3)
        if number % 7 == 6:
            await log.durable.wait(log.end)
    await settle(log)


async def write_segments(log: Log, segments: int) -> None:
    """Go on until the log has so many, and something in the last one; wait until the others are sealed."""
    while log.segments < segments:
        await write_some(log, 5)
    await write_some(log, 5)
    await all_sealed(log)


async def all_sealed(log: Log) -> None:
    with trio.fail_after(10):
        while not all(segment.sealed for segment in log._store.list[:-1]):
            await trio.sleep(0.001)


async def fetch_all(log: Log, topic: str, partition: int, *, bytes_max: int = 5000) -> list[bytes]:
    """Every committed batch, as a consumer gets them."""
    batches: list[bytes] = []
    offset = log.log_start_offset(topic, partition)
    while offset < log.committed_offset(topic, partition):
        fetched = await log.fetch(topic, partition, offset, bytes_max)
        assert fetched.batches
        assert fetched.next_offset > offset
        batches += [bytes(one) for one in fetched.batches]
        offset = fetched.next_offset
    return batches


async def stream_of(log: Log) -> bytes:
    """All durable bytes, from the start of the log."""
    stream = b""
    while log.start + len(stream) < log.durable.value:
        stream += await log.read(Position(log.start + len(stream)), 1 << 20)
    return stream


def frames_of(data: bytes, start: int = 0, chain: int | None = None) -> list[Frame]:
    """Of a stream, or of a segment's bytes after the blocks, to its end or its zeros."""
    frames: list[Frame] = []
    view, at = memoryview(data), 0
    while at < len(data) and data[at : at + 2] != b"\0\0":
        frame = decode(view, at, start + at, chain)
        assert frame is not None
        frames.append(frame)
        at += frame.size
        chain = frame.checksum
    return frames


def segment_names(place: Place) -> list[str]:
    return [name for name in place.names() if name.startswith("wal/") and name.endswith(".wal")]


def frames_in(place: Place, name: str) -> list[Frame]:
    return frames_of(place.read(name)[FRAMES_AT:], int(name[4:24]))


def flip(place: Place, name: str, at: int, bit: int = 0) -> None:
    data = bytearray(place.read(name))
    data[at] ^= 1 << bit
    place.write(name, bytes(data))


def set_marks(place: Place, name: str, durable_end: int, high_watermark: int) -> None:
    """As if the last marks of this segment had been these."""
    data = bytearray(place.read(name))
    for sequence in (100, 101):
        mark = encode_mark(Mark(sequence, Position(durable_end), Position(high_watermark)))
        data[mark_offset(sequence) : mark_offset(sequence) + len(mark)] = mark
    place.write(name, bytes(data))


def image(place: Place) -> dict[str, bytes]:
    return {name: place.read(name) for name in place.names() if name != "lock"}


async def ship(leader: Log, follower: Log, *, step: int = 777) -> None:
    """From the follower's end to the leader's durable end, in odd pieces."""
    rest = b""
    while follower.end + len(rest) < leader.durable.value:
        rest += await leader.read(Position(follower.end + len(rest)), step)
        taken = follower.append_received(memoryview(rest))
        rest = rest[taken:]
    assert not rest
    await follower.durable.wait(follower.end)
    follower.commit_to(leader.committed.value)


async def copy_to(follower: Log, leader: Log) -> None:
    """A new follower gets all that there is."""
    await follower.begin_at(Position(0), Checksum(0), CLUSTER)
    await ship(leader, follower)


def another(place: Place) -> Place:
    if isinstance(place, RealPlace):
        (place.path / "other").mkdir()
        return RealPlace(place.path / "other")
    return SimPlace()
