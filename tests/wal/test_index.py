"""The index of a segment, in memory and in its file: the same answers."""

from __future__ import annotations

import random

import pytest

from chronik_repl.positions import Checksum, Position
from chronik_repl.wal.index import HEADER_BYTES, ActiveIndex, BadIndex, SealedIndex

START = Position(10_000)


def made(seed: int = 1, batches: int = 300) -> ActiveIndex:
    rng = random.Random(seed)
    index = ActiveIndex(START, Checksum(77))
    position = START
    offsets: dict[tuple[str, int], int] = {(f"topic-{t}", p): rng.randrange(100) for t in range(4) for p in range(3)}
    for _ in range(batches):
        size, records = rng.randrange(100, 5000), rng.randrange(1, 20)
        index.ends.append(position + size)
        index.checksums.append(rng.randrange(1 << 32))
        if rng.random() < 0.9:
            key = rng.choice(list(offsets)[:10])
            index.add(key, offsets[key], rng.randrange(1000), position, size, records)
            offsets[key] += records
        position = Position(position + size)
    index.close(offsets.items())
    return index


def test_the_file_answers_as_memory_does() -> None:
    active = made()
    end = Position(active.ends[-1])
    sealed = SealedIndex(active.encode(), START, end)
    assert sealed.end_chain == active.checksums[-1]
    for topic, partition in [*active.next_offsets, ("topic-9", 0), ("topic-1", 9), ("", 0)]:
        ours, theirs = active.partition(topic, partition), sealed.partition(topic, partition)
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            assert (ours.next_offset, ours.max_timestamp_ms, ours.entry_count) == (
                theirs.next_offset,
                theirs.max_timestamp_ms,
                theirs.entry_count,
            )
        assert active.next_offset(topic, partition) == sealed.next_offset(topic, partition)
        for offset in range(0, 700, 13):
            assert list(active.entries(topic, partition, offset)) == list(sealed.entries(topic, partition, offset))


def test_entries_begin_with_the_batch_that_holds_the_offset() -> None:
    active = made()
    for (topic, partition), next_offset in active.next_offsets.items():
        everything = list(active.entries(topic, partition, 0))
        for entry in everything:
            for offset in (entry.base_offset, entry.base_offset + entry.record_count - 1):
                assert next(active.entries(topic, partition, offset)) == entry
        assert list(active.entries(topic, partition, next_offset)) == []


def test_landmarks_lead_close_to_every_frame() -> None:
    active = made()
    sealed = SealedIndex(active.encode(), START, Position(active.ends[-1]))
    chain_at = {0: 77} | {end - START: crc for end, crc in zip(active.ends, active.checksums, strict=True)}
    for relative in range(0, active.ends[-1] - START, 997):
        for index in (active, sealed):
            found = index.landmark(relative)
            assert found is not None
            at, chain = found
            assert chain_at[at] == chain
            assert at <= relative < at + 64 * 1024 + 5000 * 2


def test_which_batch_stands_there_and_where_the_next_frame_is() -> None:
    active = made(batches=40)
    sealed = SealedIndex(active.encode(), START, Position(active.ends[-1]))
    starts = [0, *(end - START for end in active.ends)]
    for relative in starts[:-2]:
        assert active.batch_at(relative) == sealed.batch_at(relative)
        assert active.next_frame(relative) == starts[starts.index(relative) + 1]
    assert active.batch_at(3) is sealed.batch_at(3) is None


def test_anything_else_is_no_index() -> None:
    active = made(batches=30)
    good, end = active.encode(), Position(active.ends[-1])
    SealedIndex(good, START, end)
    for size in range(len(good)):
        with pytest.raises(BadIndex):
            SealedIndex(good[:size], START, end)
    for at in range(len(good)):
        bad = bytearray(good)
        bad[at] ^= 1 << (at % 8)
        with pytest.raises(BadIndex):
            SealedIndex(bytes(bad), START, end)
    for start, stop in ((START + 1, end), (START, end + 1)):
        with pytest.raises(BadIndex):
            SealedIndex(good, Position(start), Position(stop))
    with pytest.raises(BadIndex):
        SealedIndex(good + b"\0", START, end)
    assert len(good) > HEADER_BYTES
