"""Failures of the disk that others had: known failures 11–14 and 19–22. Those that need real faults are in
tests/crash."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator

import pytest
import trio
from crc32c import crc32c

from chronik_repl.errors import ChronikError, CorruptLog, DiskFailed, ForeignLog, FormatTooNew
from chronik_repl.positions import ORIGIN
from chronik_repl.wal.frame import HEAD, MAGIC, OVERHEAD, VERSION, Frame, encode, topic_prefix
from chronik_repl.wal.index import CRC, ENTRY, HEADER, HEADER_BYTES, PARTITION
from chronik_repl.wal.log import Log, LogSettings
from chronik_repl.wal.segment import BLOCK, FRAMES_AT, Header, decode_header, encode_header
from tests.wal.workbench import (
    CLUSTER,
    SETTINGS,
    Place,
    SimPlace,
    batch,
    fetch_all,
    flip,
    frames_in,
    image,
    lead,
    opened,
    segment_names,
    set_marks,
    settle,
    stream_of,
    write_segments,
    write_some,
)


async def make_log(place: Place, segments: int = 1) -> bytes:
    """A log that was stopped cleanly; its stream."""
    async with opened(place) as log:
        lead(log)
        await write_segments(log, segments)
        return await stream_of(log)


def unmark(place: Place, frames: int) -> tuple[str, list[Frame]]:
    """As if the last so many frames had been written and never synced: the last segment's name, and its frames."""
    name = segment_names(place)[-1]
    found = frames_in(place, name)
    set_marks(place, name, found[-frames].position, found[-frames].position)
    return name, found


def at(name: str, position: int) -> int:
    return FRAMES_AT + position - int(name[4:24])


async def opens_at(place: Place, end: int, stream: bytes) -> None:
    """The log ends there, holds what it held before, and goes on."""
    async with opened(place) as log:
        assert log.end == end
        assert await stream_of(log) == stream[:end]
        await fetch_all(log, "t", 0)
        lead(log, log.state.history[-1].epoch + 1)
        await write_some(log, 3)
        grown = await stream_of(log)
    async with opened(place) as log:
        assert await stream_of(log) == grown


async def refuses(place: Place, error: type[ChronikError] = CorruptLog) -> ChronikError:
    """It does not open, and nothing was changed."""
    before = image(place)
    disk = place.disk()
    with pytest.raises(error) as caught:
        await Log.open(disk, SETTINGS, CLUSTER)
    disk.close()
    assert image(place) == before
    return caught.value


@pytest.mark.parametrize("how", ["zeros", "end of file", "old bytes"])
async def test_kf11_last_frame_torn_at_every_byte(place: Place, how: str) -> None:
    stream = await make_log(place)
    name, frames = unmark(place, 1)
    last = frames[-1]
    whole = place.read(name)
    step = 1 if isinstance(place, SimPlace) else 23
    for kept in range(0, last.size, step):
        torn_at = at(name, last.position) + kept
        if how == "zeros":
            torn = whole[:torn_at] + bytes(len(whole) - torn_at)
        elif how == "end of file":
            torn = whole[:torn_at]
        else:
            torn = whole[:torn_at] + random.Random(kept).randbytes(300)
        place.write(name, torn)
        if kept % 10 == 0:
            await opens_at(place, last.position, stream)
            for other in segment_names(place)[1:]:
                place.remove(other)
        else:
            async with opened(place, run=False) as log:
                assert log.end == last.position
                assert await stream_of(log) == stream[: last.position]


async def test_kf12_damage_in_the_middle_is_never_a_tail(place: Place) -> None:
    await make_log(place)
    name = segment_names(place)[-1]
    frames = frames_in(place, name)
    victim = frames[len(frames) // 2]
    for byte in (0, 7, 9, 30, victim.size - 1):
        flip(place, name, at(name, victim.position) + byte)
        error = await refuses(place)
        assert isinstance(error, CorruptLog)
        assert (error.file, error.start) == (name, victim.position)
        assert name in str(error)
        assert str(victim.position) in str(error)
        flip(place, name, at(name, victim.position) + byte)
    async with opened(place, run=False) as log:
        assert log.end == frames[-1].position + frames[-1].size


async def test_kf12_also_when_all_after_it_is_zeros(place: Place) -> None:
    await make_log(place)
    name = segment_names(place)[-1]
    frames = frames_in(place, name)
    data = place.read(name)
    cut = at(name, frames[-3].position)
    place.write(name, data[:cut] + bytes(len(data) - cut))
    await refuses(place)
    place.write(name, data[:cut])
    await refuses(place)


async def test_kf13_a_hole_of_zeros_inside_an_unsynced_group(place: Place) -> None:
    stream = await make_log(place)
    name, frames = unmark(place, 3)
    hole = frames[-2]
    data = bytearray(place.read(name))
    data[at(name, hole.position) : at(name, hole.position) + hole.size] = bytes(hole.size)
    place.write(name, bytes(data))
    await opens_at(place, hole.position, stream)
    survivor = bytes(stream[frames[-1].position :])
    assert survivor not in place.read(name), "what stood after the hole does not come back"


def foreign_tails(last: Frame, other: Frame, stream: bytes) -> Iterator[tuple[str, bytes]]:
    def head(length: int) -> bytes:
        return HEAD.pack(MAGIC, VERSION, length)

    end, chain = last.position + last.size, last.checksum
    yield "length 0", head(0) + bytes(200)
    yield "too small", head(OVERHEAD - 9) + bytes(200)
    yield "too large", head(2**32 - 1) + bytes(200)
    yield "over the limit", head(SETTINGS.frame_bytes_max) + bytes(200)
    yield "longer than the file", head(8000) + bytes(200)
    yield "another version", HEAD.pack(MAGIC, 3, 100) + bytes(200)
    yield "a good frame of another position", stream[other.position : other.position + other.size]
    yield "the last frame again", stream[last.position : end]
    prefix = topic_prefix("t")
    sent = batch(3)
    yield "in its place, another chain", encode(prefix, 0, 3, 0, 0, 1, end, chain ^ 1, 0, (sent,))[0]
    yield "in the chain, another position", encode(prefix, 0, 3, 0, 0, 1, end + 8, chain, 0, (sent,))[0]
    yield "an unknown kind", encode(prefix, 0, 3, 0, 99, 1, end, chain, 0, (sent,))[0]
    yield "a good frame, a wrong offset", encode(prefix, 10**6, 3, 0, 0, 1, end, chain, 0, (sent,))[0]
    yield "a good frame, no such topic", encode(topic_prefix("u"), 0, 3, 0, 0, 1, end, chain, 0, (sent,))[0]
    yield "a good frame, no batch", encode(prefix, 0, 3, 0, 0, 1, end, chain, 0, (b"short",))[0]
    yield "a good frame, no msgpack", encode(topic_prefix(""), 0, 0, 0, 4, 1, end, chain, 0, (b"\xc1\xff",))[0]
    yield "noise", random.Random(5).randbytes(1000)


async def test_kf14_old_or_foreign_bytes_after_the_tail(place: Place) -> None:
    stream = await make_log(place)
    name = segment_names(place)[-1]
    frames = frames_in(place, name)
    last = frames[-1]
    end = last.position + last.size
    for what, tail in foreign_tails(last, frames[3], stream):
        data = place.read(name)
        keep = at(name, end)
        place.write(name, data[:keep] + tail + bytes(500))
        async with opened(place, run=False) as log:
            assert log.end == end, what
            assert await stream_of(log) == stream, what
        assert not any(place.read(name)[keep:]), f"{what}: it is gone"
    await opens_at(place, end, stream)


async def read_back(place: Place) -> tuple[list[list[bytes]], int]:
    async with opened(place, run=False) as log:
        batches = [await fetch_all(log, "t", partition) for partition in (0, 1)]
        return batches, log.stats.indexes_rebuilt


def fix_index(data: bytearray) -> bytes:
    """Make the checksums right again."""
    struct.pack_into(">I", data, HEADER.size - 4, crc32c(data[HEADER_BYTES:]))
    struct.pack_into(">I", data, HEADER.size, crc32c(data[: HEADER.size]))
    return bytes(data)


async def test_kf19_an_index_that_is_missing_stale_or_wrong_is_made_again(place: Place) -> None:
    await make_log(place, 3)
    expected, rebuilt = await read_back(place)
    assert rebuilt == 0
    names = [name for name in place.names() if name.endswith(".idx")]
    assert len(names) == 2
    good = {name: place.read(name) for name in names}
    first, second = names

    for name in names:
        place.remove(name)
    assert await read_back(place) == (expected, 2)
    assert {name: place.read(name) for name in names} == good, "the same bytes again"

    for wrong in (b"", b"x", good[first][:-1], good[first] + b"\0", good[second], bytes(len(good[first]))):
        place.write(first, wrong)
        assert await read_back(place) == (expected, 1)

    for byte in [*range(0, HEADER_BYTES, 3), *range(HEADER_BYTES, len(good[first]), 29)]:
        flip(place, first, byte)
        batches, rebuilt = await read_back(place)
        assert batches == expected, byte
        assert rebuilt == 1, byte
    assert place.read(first) == good[first]


async def test_kf19_an_index_that_lies_with_right_checksums(place: Place) -> None:
    await make_log(place, 3)
    expected, _ = await read_back(place)
    name = next(name for name in place.names() if name.endswith(".idx"))
    good = place.read(name)
    _, _, _, _, _, partitions, entries, *_ = HEADER.unpack_from(good)
    entries_at = HEADER_BYTES + partitions * PARTITION.size
    rng = random.Random(3)
    table = [PARTITION.unpack_from(good, HEADER_BYTES + row * PARTITION.size) for row in range(partitions)]
    for row, (*fields, next_offset, newest) in enumerate(table):
        for lie in (next_offset - 7, next_offset + 30, 0, 10**9):
            data = bytearray(good)
            PARTITION.pack_into(data, HEADER_BYTES + row * PARTITION.size, *fields, lie, newest)
            place.write(name, fix_index(data))
            batches, _ = await read_back(place)
            assert batches == expected, (row, lie)
    for number in range(0, entries, 3):
        base, newest, relative, size, records, zero = ENTRY.unpack_from(good, entries_at + number * ENTRY.size)
        _, _, elsewhere, other_size, *_ = ENTRY.unpack_from(good, entries_at + (number + 7) % entries * ENTRY.size)
        for lie in (
            (base, newest, elsewhere, other_size, records, zero),
            (base, newest, relative + 8, size, records, zero),
            (base, newest, rng.randrange(1 << 32), size, records, zero),
            (base, newest, relative, rng.randrange(1 << 32), records, zero),
            (base, newest, relative, size, records + 1, zero),
            (base + 1, newest, relative, size, records, zero),
        ):
            data = bytearray(good)
            ENTRY.pack_into(data, entries_at + number * ENTRY.size, *lie)
            place.write(name, fix_index(data))
            batches, _ = await read_back(place)
            assert batches == expected, (number, lie)


async def test_kf20_a_bit_rots_in_a_cold_segment_and_is_found_before_it_is_needed(place: Place) -> None:
    await make_log(place, 4)
    name = segment_names(place)[1]
    frames = frames_in(place, name)
    victim = frames[len(frames) // 2]
    flip(place, name, at(name, victim.position) + victim.size - 3, 5)
    async with opened(place, LogSettings(segment_bytes=8192, min_free_bytes=0, scrub_mb_per_s=1000)) as log:
        with trio.fail_after(30):
            while not log.stats.scrub_rounds:
                await trio.sleep(0.01)
        (damage,) = log.damage
        assert (damage.file, damage.start, damage.end) == (name, victim.position, victim.position + victim.size)
        assert (damage.topic, damage.partition, damage.offset) == ("t", victim.partition, victim.base_offset)
        assert "checksum" in damage.what
        with pytest.raises(CorruptLog, match=name):
            await log.fetch("t", victim.partition, victim.base_offset, 1)
        assert (await log.fetch("t", victim.partition, victim.base_offset - 3, 1)).batches, "the rest is served"
        assert len(log.damage) == 1


async def test_kf21_a_good_frame_stands_in_the_wrong_segment(place: Place) -> None:
    await make_log(place, 3)
    first, second = segment_names(place)[:2]
    size = frames_in(place, first)[-1].size
    stranger = next(f for f in frames_in(place, first) if f.size == size and f.kind == 0)
    victim = next(f for f in frames_in(place, second) if f.size == size and f.kind == 0)
    data = bytearray(place.read(second))
    moved = place.read(first)[at(first, stranger.position) :][:size]
    data[at(second, victim.position) : at(second, victim.position) + size] = moved
    place.write(second, bytes(data))
    async with opened(place, run=False) as log:
        with pytest.raises(CorruptLog, match=second):
            await log.fetch("t", victim.partition, victim.base_offset, 1)


async def test_kf21_a_good_frame_of_the_last_segment_elsewhere_in_it(place: Place) -> None:
    await make_log(place)
    name = segment_names(place)[-1]
    data_frames = [f for f in frames_in(place, name) if f.kind == 0]
    one, other = data_frames[2], data_frames[4]
    assert one.size == other.size
    data = bytearray(place.read(name))
    for where, what in ((one, other), (other, one)):
        raw = place.read(name)[at(name, what.position) :][: what.size]
        data[at(name, where.position) : at(name, where.position) + where.size] = raw
    place.write(name, bytes(data))
    error = await refuses(place)
    assert isinstance(error, CorruptLog)
    assert error.start == one.position


async def test_kf22_a_segment_is_missing(place: Place) -> None:
    await make_log(place, 4)
    names = segment_names(place)
    for missing in names[:-1]:
        data = place.read(missing)
        place.remove(missing)
        error = await refuses(place)
        assert "missing" in str(error)
        place.write(missing, data)
    async with opened(place, run=False) as log:
        assert log.segments == 4


async def test_kf22_a_segment_is_there_twice(place: Place) -> None:
    await make_log(place, 3)
    names = segment_names(place)
    for copied in names:
        for as_name in (f"wal/{12345678:020d}.wal", f"wal/{int(names[1][4:24]) + 7:020d}.wal"):
            place.write(as_name, place.read(copied))
            assert "copied or renamed" in str(await refuses(place))
            place.remove(as_name)


async def test_a_log_of_another_cluster(place: Place) -> None:
    await make_log(place, 2)
    disk = place.disk()
    before = image(place)
    with pytest.raises(ForeignLog, match="of cluster 'workbench', this node is of 'another'"):
        await Log.open(disk, SETTINGS, "another")
    assert image(place) == before
    log = await Log.open(disk, SETTINGS, None)
    assert log.cluster_id == CLUSTER
    await log.close()
    disk.close()


async def test_one_segment_of_another_cluster_among_ours(place: Place) -> None:
    await make_log(place, 3)
    name = segment_names(place)[1]
    data = place.read(name)
    header = decode_header(data, name)
    place.write(name, encode_header(Header(header.start, header.chain, "another")) + data[BLOCK:])
    assert name in str(await refuses(place, ForeignLog))


async def test_a_newer_format(place: Place) -> None:
    await make_log(place)
    name = segment_names(place)[0]
    data = bytearray(place.read(name))
    struct.pack_into(">I", data, 8, 2)
    from chronik_repl.wal.segment import HEADER as SEGMENT_HEADER

    CRC.pack_into(data, SEGMENT_HEADER.size, crc32c(data[: SEGMENT_HEADER.size]))
    place.write(name, bytes(data))
    assert "Upgrade" in str(await refuses(place, FormatTooNew))


async def test_a_foreign_file_in_the_folder(place: Place) -> None:
    await make_log(place)
    for name in ("wal/notes.txt", "wal/00000.wal", "wal/x.idx"):
        place.write(name, b"mine")
        assert name in str(await refuses(place, ForeignLog))
        place.remove(name)


async def test_what_a_crash_left_behind_is_cleared_away(place: Place) -> None:
    stream = await make_log(place, 2)
    for name in ("wal/spare", "wal/next", "wal/repair", f"wal/{7:020d}.idx", f"wal/{0:020d}.idx.new"):
        place.write(name, b"half of it")
    async with opened(place, run=False) as log:
        assert await stream_of(log) == stream
    assert not [name for name in place.names() if name in ("wal/next", "wal/repair") or name.endswith(".new")]


async def test_a_segment_too_short_for_its_blocks(place: Place) -> None:
    await make_log(place)
    name = segment_names(place)[0]
    data = place.read(name)
    for size in (0, 100, FRAMES_AT - 1):
        place.write(name, data[:size])
        assert name in str(await refuses(place))


async def test_both_marks_damaged_still_opens_what_is_whole(place: Place) -> None:
    """Nothing then tells a torn tail from damage; but all that is there is good, so it is kept."""
    stream = await make_log(place)
    name = segment_names(place)[0]
    data = place.read(name)
    place.write(name, data[:BLOCK] + bytes(2 * BLOCK) + data[FRAMES_AT:])
    async with opened(place, run=False) as log:
        assert await stream_of(log) == stream
        assert log.committed.value == ORIGIN


async def test_what_is_kept_above_the_mark_is_written_again_and_synced() -> None:
    """A failed sync left the pages clean: what the cache shows is not on the device, and no later sync would write
    it."""
    place = SimPlace()
    disk = place.disk()
    log = await Log.open(disk, SETTINGS, CLUSTER)
    lead(log)
    with pytest.RaisesGroup(DiskFailed, flatten_subgroups=True):
        async with trio.open_nursery() as nursery:
            await nursery.start(log.run)
            await write_some(log, 5)
            acked = log.end
            log.append_batch("t", 0, batch(3), record_count=3)
            disk.fail_sync_in(1)
            await trio.sleep_forever()
    disk.crash()
    async with opened(place) as log:
        assert log.end > acked, "the page cache has it"
        shown = log.end
        await settle(log)
    place.medium.cut(lambda *_: False)
    async with opened(place) as log:
        assert log.end >= shown
