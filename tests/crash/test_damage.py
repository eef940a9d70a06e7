"""Every single byte of a log changed, and every file cut at every length: no wrong record is ever returned, and nothing
that was durable is cut off.

The log has three small segments, two sealed with their indexes and one that is being written to. In CI every byte that
means something and a part of the padding; `scripts/faults damage` does all of them, in all eight bits.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import trio
import trio.testing

from chronik_repl.errors import ChronikError
from chronik_repl.positions import Epoch, Position
from chronik_repl.wal import values
from chronik_repl.wal.changes import EpochStart, TopicMade
from chronik_repl.wal.log import Log
from chronik_repl.wal.segment import BLOCK, FRAMES_AT
from chronik_repl.wal.verify import verify
from tests.crash.scenario import CLUSTER, batch
from tests.simulation.disk import SimDisk
from tests.simulation.medium import Medium

with pytest.MonkeyPatch.context() as _patch:
    _patch.setattr(values, "SEGMENT_BYTES_MIN", 512)  # smaller than anyone may configure: every byte is tried
    SETTINGS = values.LogSettings(segment_bytes=900, min_free_bytes=0, scrub_mb_per_s=0)
HEADER_USED = 128
MARK_USED = 32


class Whole(NamedTuple):
    """The log before anything was done to it."""

    medium: Medium
    stream: bytes
    batches: dict[int, list[tuple[int, bytes]]]  # by partition: base offset and bytes


@pytest.fixture(scope="module")
def whole() -> Whole:
    return make_whole()


def make_whole() -> Whole:
    medium = Medium()
    stream = bytearray()
    batches: dict[int, list[tuple[int, bytes]]] = {0: [], 1: []}

    async def main() -> None:
        disk = SimDisk(random.Random(1), medium)
        log = await Log.open(disk, SETTINGS, CLUSTER)
        log.listeners.append(lambda position, frame, _: stream.extend(frame))
        async with trio.open_nursery() as nursery:
            await nursery.start(log.run)
            log.found(CLUSTER)
            log.begin_epoch(Epoch(1), EpochStart(1, "directory"))
            log.append_change(TopicMade("t", 2))
            while len(await disk.list("wal")) < 6 or log.end - (await log.segment_bounds(log.end))[0] < 500:
                partition = len(batches[0]) % 2
                log.append_batch("t", partition, batch(3, 20, len(stream) % 251), record_count=3)
                await log.durable.wait(log.end)
                log.commit_to(log.end)
                fetched = await log.fetch("t", partition, log.end_offset("t", partition) - 3, 1)
                batches[partition].append((log.end_offset("t", partition) - 3, bytes(fetched.batches[0])))
                await trio.sleep(0.1)  # seal, index, mark
            await log.close()
            nursery.cancel_scope.cancel()
        disk.close()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    medium.cut(lambda *_: True)
    if medium.find("wal/spare") is not None:
        medium.unlink("wal/spare")  # nobody reads it
        medium.sync_dir("wal")
    assert sum(name.endswith(".wal") for name in medium.image()) == 3
    assert sum(name.endswith(".idx") for name in medium.image()) == 2
    return Whole(medium, bytes(stream), batches)


async def ways_out(whole: Whole, medium: Medium) -> str:
    """Open and read all of it, by position and by offset. What came out is right or refused; returns which."""
    before = medium.image()
    try:
        log = await Log.open(SimDisk(random.Random(0), medium), SETTINGS, CLUSTER)
    except ChronikError:
        assert medium.image() == before, "refused, and yet something was changed"
        return "refused"
    assert log.end == len(whole.stream), f"cut off at {log.end} of {len(whole.stream)}"
    result = "all"
    position = log.start
    while position < log.end:
        try:
            data = await log.read(position, 1 << 20)
            assert data, f"nothing at {position}"
            if whole.stream[position : position + len(data)] != data:
                result = "raw bytes differ"  # the stream's reader checks frames itself: replication does
            position = Position(position + len(data))
        except ChronikError:
            result = "part"
            _, position, _ = await log.segment_bounds(position)
    for partition, batches in whole.batches.items():
        for offset, data in batches:
            try:
                fetched = await log.fetch("t", partition, offset, 1)
            except ChronikError:
                result = "part"
                continue
            if fetched.high_watermark_offset <= offset:  # the newest mark is damaged, the one before it speaks
                result = "part"
                continue
            assert [bytes(b) for b in fetched.batches] == [data], f"a wrong batch for t/{partition} offset {offset}"
    return result


def damaged(whole: Whole, name: str, at: int, bit: int) -> Medium:
    medium = whole.medium.clone()
    medium.rot(name, at, bit)
    return medium


def cut_short(whole: Whole, name: str, size: int) -> Medium:
    medium = whole.medium.clone()
    inode = medium.find(name)
    assert inode is not None
    medium.resize(inode, size)
    medium.sync(inode)
    return medium


def places(whole: Whole, *, padding_step: int) -> Iterator[tuple[str, int, bool]]:
    """(file, byte, whether a change there must be noticed)."""
    for name, data in sorted(whole.medium.image().items()):
        if not name.endswith(".wal"):
            for at in range(len(data)):
                yield name, at, False  # an index is made again
            continue
        last = max(n for n in whole.medium.image() if n.endswith(".wal")) == name
        frames_end = FRAMES_AT + len(whole.stream) - int(name[4:24]) if last else len(data)
        for at in range(len(data)):
            in_header = at < HEADER_USED
            in_mark = BLOCK <= at < 3 * BLOCK and at % BLOCK < MARK_USED
            in_frames = FRAMES_AT <= at < frames_end
            if in_header or in_mark or in_frames or at % padding_step == 0:
                yield name, at, in_frames


def check_all(cases: Iterator[tuple[str, Medium]], whole: Whole) -> dict[str, int]:
    counts: dict[str, int] = {}

    async def main() -> None:
        for name, medium in cases:
            try:
                result = await ways_out(whole, medium)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from error
            counts[result] = counts.get(result, 0) + 1

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    return counts


def test_every_byte_flipped(whole: Whole) -> None:
    rng = random.Random(7)
    counts = check_all(
        (
            (f"{name} byte {at}", damaged(whole, name, at, rng.randrange(8)))
            for name, at, _ in places(whole, padding_step=97)
        ),
        whole,
    )
    assert counts["refused"] > 500, counts
    assert counts["part"] > 500, counts
    assert counts["all"] > 300, counts


def test_every_truncation(whole: Whole) -> None:
    rng = random.Random(8)

    def cases() -> Iterator[tuple[str, Medium]]:
        for name, data in sorted(whole.medium.image().items()):
            blocks = range(rng.randrange(97), FRAMES_AT, 97) if name.endswith(".wal") else range(FRAMES_AT)
            for size in [*blocks, *range(FRAMES_AT, len(data))]:
                if size < len(data):
                    yield f"{name} cut to {size}", cut_short(whole, name, size)

    counts = check_all(cases(), whole)
    assert counts["refused"] > 500, counts
    assert counts["all"] > 500, counts  # indexes


def test_verify_names_every_flipped_byte_of_a_frame(whole: Whole, tmp_path: Path) -> None:
    image = whole.medium.image()
    for name, data in image.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    assert verify(tmp_path).ok
    rng = random.Random(9)
    for name, at, noticed in places(whole, padding_step=997):
        with open(tmp_path / name, "r+b") as file:
            file.seek(at)
            file.write(bytes([image[name][at] ^ 1 << rng.randrange(8)]))
        found = verify(tmp_path)
        with open(tmp_path / name, "r+b") as file:
            file.seek(at)
            file.write(image[name][at : at + 1])
        if noticed:
            position = int(name[4:24]) + at - FRAMES_AT
            assert any(d.start <= position < d.end and d.file == name[4:] for d in found.damage), (name, at, found)
        for damage in found.damage:
            assert damage.file in (name[4:], name[4:].replace(".wal", ".idx")), (name, at, found)
    assert verify(tmp_path).ok
