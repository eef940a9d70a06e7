"""The fast way in takes what the careful way takes, and nothing else."""

from __future__ import annotations

import random

import pytest

from chronik_repl.positions import CHAIN_SEED, ORIGIN, Checksum, Epoch, Position
from chronik_repl.wal.changes import ProducerIdGiven
from chronik_repl.wal.entities import Pending
from chronik_repl.wal.frame import BadFrame, Frame, decode, encode, topic_prefix
from chronik_repl.wal.index import ActiveIndex
from chronik_repl.wal.intake import Intake
from chronik_repl.wal.recovery import Walk, scan
from chronik_repl.wal.state import State
from tests.wal.workbench import SimPlace, batch, lead, opened, settle, stream_of

MAX = 1 << 24


async def make_stream(seed: int) -> bytes:
    rng = random.Random(seed)
    async with opened(SimPlace()) as log:
        lead(log, topics={"t": 3, "a-longer-name": 2})
        for number in range(60):
            producer = (rng.randrange(4), 0, number) if rng.random() < 0.4 else (-1, -1, -1)
            topic, partitions = rng.choice([("t", 3), ("a-longer-name", 2)])
            records = rng.randrange(1, 9)
            sent = batch(records, rng.randrange(300), producer=producer, newest=rng.randrange(99))
            log.append_batch(topic, rng.randrange(partitions), sent, record_count=records)
            if rng.random() < 0.1:
                log.append_change(ProducerIdGiven(number))
        await settle(log)
        return await stream_of(log)


class Way:
    """One way through a stream, and what it left behind."""

    def __init__(self, fast: bool, high_watermark: int | None = None) -> None:
        self.fast = fast
        self.appended: list[tuple[int, str, int, int]] = []
        watermark = None if high_watermark is None else Position(high_watermark)
        self.intake = Intake(State(), MAX, self._note, watermark)
        self.intake.index = ActiveIndex(ORIGIN, CHAIN_SEED)

    def _note(self, pending: Pending) -> None:
        end, partition, next_offset = pending
        self.appended.append((end, partition.topic, partition.partition, next_offset))

    def run(self, stream: bytes, pieces: int | None = None) -> tuple[object, ...]:
        batches = self.intake.take_batches if self.fast else None
        if pieces is None:
            scanned = scan(memoryview(stream), ORIGIN, CHAIN_SEED, MAX, self.intake.take, batches)
            result = (scanned.end, scanned.chain, bool(scanned.why))
        else:
            walk = Walk(ORIGIN, CHAIN_SEED, MAX, self.intake.take, batches)
            rest = b""
            for at in range(0, len(stream), pieces):
                rest += stream[at : at + pieces]
                rest = rest[walk.take(memoryview(rest)) :]
            result = (walk.end, walk.chain, bool(walk.why))
        index = self.intake.index
        assert index is not None
        committed = [(p.topic, p.partition, p.committed_offset) for p in self.intake.state.partitions()]
        return (
            *result,
            self.intake.state.snapshot(),
            self.appended,
            committed,
            self.intake.records,
            index.rows,
            index.ends,
            index.checksums,
        )


async def test_both_ways_lead_to_the_same_place() -> None:
    for seed in range(5):
        stream = await make_stream(seed)
        careful = Way(fast=False).run(stream)
        assert careful[:3] == (len(stream), careful[1], False)
        assert Way(fast=True).run(stream) == careful
        for pieces in (1, 7, 100, 1000, 5000):
            assert Way(fast=True).run(stream, pieces) == careful
            assert Way(fast=False).run(stream, pieces) == careful


async def test_both_ways_show_the_same_at_every_high_watermark() -> None:
    stream = await make_stream(9)
    ends: list[int] = []

    def note(frame: Frame) -> None:
        ends.append(frame.position + frame.size)

    scan(memoryview(stream), ORIGIN, CHAIN_SEED, MAX, note)
    for high_watermark in [0, *ends, *(end + 1 for end in ends[::5])]:
        careful = Way(fast=False, high_watermark=high_watermark).run(stream)
        assert Way(fast=True, high_watermark=high_watermark).run(stream) == careful


async def test_both_ways_stop_at_the_same_damage() -> None:
    stream = await make_stream(3)
    rng = random.Random(4)
    for _ in range(600):
        bad = bytearray(stream)
        at = rng.randrange(len(bad))
        bad[at] ^= 1 << rng.randrange(8)
        assert Way(fast=True).run(bytes(bad)) == Way(fast=False).run(bytes(bad)), at
    for size in range(0, len(stream), 41):
        assert Way(fast=True).run(stream[:size]) == Way(fast=False).run(stream[:size])


async def test_both_ways_refuse_the_same_lies_with_right_checksums() -> None:
    """Every field of a good frame, changed, and the checksum made right."""
    stream = await make_stream(5)
    frames: list[Frame] = []
    scan(memoryview(stream), ORIGIN, CHAIN_SEED, MAX, frames.append)
    rng = random.Random(6)
    refused = 0
    for victim in frames[4::3]:
        for _ in range(30):
            fields = [
                victim.base_offset, victim.record_count, victim.timestamp_ms, victim.kind, victim.epoch,
                victim.position, victim.previous, victim.partition,
            ]  # fmt: skip
            field = rng.randrange(10)
            data, topic = bytearray(victim.data), victim.topic.decode()
            if field < 8:
                fields[field] = max(0, fields[field] + rng.choice([-1, 1, 7]))
            elif field == 8:
                topic = rng.choice(["t", "a-longer-name", "u", ""])
            elif data:
                data[rng.randrange(min(61, len(data)))] ^= 1 << rng.randrange(8)
            raw, _ = encode(topic_prefix(topic), *fields, (bytes(data),))  # type: ignore[call-arg, arg-type]
            lie = stream[: victim.position] + raw
            fast, careful = Way(fast=True).run(lie), Way(fast=False).run(lie)
            assert fast == careful, (victim.position, field)
            refused += careful[2] is True
    assert refused > 200


async def test_a_follower_takes_only_its_epochs_frames_the_fast_way() -> None:
    stream = await make_stream(1)
    frames: list[Frame] = []
    scan(memoryview(stream), ORIGIN, CHAIN_SEED, MAX, frames.append)
    first = next(frame for frame in frames if frame.kind == 0)
    way = Way(fast=True)
    way.run(stream[: first.position])
    for epoch, taken in ((2, 0), (1, first.size)):
        at, position, chain = way.intake.take_batches(
            memoryview(stream)[first.position : first.position + first.size],
            0,
            first.position,
            Checksum(first.previous),
            Epoch(epoch),
        )
        assert (at, position) == (taken, first.position + taken)
        assert chain == (first.checksum if taken else first.previous)


def test_the_careful_way_is_the_one_that_says_what_is_wrong() -> None:
    raw, _ = encode(topic_prefix("t"), 0, 1, 0, 0, 1, 0, 0, 0, (batch(),))
    way = Way(fast=True)
    assert way.intake.take_batches(memoryview(raw), 0, ORIGIN, CHAIN_SEED) == (0, 0, 0)
    frame = decode(memoryview(raw), 0, 0, 0)
    assert frame is not None
    with pytest.raises(BadFrame, match="no such partition"):
        way.intake.take(frame)
