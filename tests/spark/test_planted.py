"""Known kinds of damage, all in one log of millions of records and one run: each is found and named exactly, and
nothing else.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest

from chronik_repl.positions import Checksum, Position
from chronik_repl.spark.compare import Range
from chronik_repl.spark.parity import Options, run
from chronik_repl.spark.verdict import Report
from chronik_repl.wal import segment
from chronik_repl.wal.frame import Kind, encode, topic_prefix
from chronik_repl.wal.index import ActiveIndex
from tests.spark import plants
from tests.spark.logs import CODECS, Writer, Written, batch, copy_log

RECORDS_A_BATCH = 500


def index_of(frames: list[Written], start: int, chain: int) -> ActiveIndex:
    """What the log would write beside the segment."""
    index = ActiveIndex(Position(start), Checksum(chain))
    for frame in frames:
        if frame.topic:
            (newest,) = struct.unpack_from(">q", plants.data_of(frame), 35)
            index.add((frame.topic, frame.partition), frame.base, newest, frame.position, len(frame.raw), frame.count)
        index.ends.append(frame.end)
        index.checksums.append(plants.checksum_of(frame))
    index.close([])
    return index


class Planted:
    """Three copies, and what was done to them."""

    def __init__(self, root: Path) -> None:
        self.a, self.b, self.c = root / "a", root / "b", root / "c"
        self.expected: list[tuple[str, str, int, int, tuple[Range, ...]]] = []
        raws = [batch([(b"key-%d" % i, b"value" * 3, []) for i in range(RECORDS_A_BATCH)], codec) for codec in CODECS]
        self.writer = writer = Writer(self.a, segment_bytes=300_000, keep=True)
        for number in range(4000):
            raw = raws[number % 5] if number % 50 == 0 else raws[4]
            writer.data(f"orders-{number % 3}", number % 5, raw, RECORDS_A_BATCH)
        writer.roll()
        for number in range(10):
            writer.data("orders-1", number % 5, raws[4], RECORDS_A_BATCH)
        self.old_epoch_ends = writer.position
        self.old_chain, self.old_offsets = writer.chain, dict(writer.offsets)
        writer.begin_epoch(leader=2)
        for number in range(60):
            writer.data("orders-0", number % 5, raws[4], RECORDS_A_BATCH)
        writer.close(spare_bytes=1 << 16)
        self.starts = [*writer.starts, writer.position]
        self._write_indexes()
        copy_log(self.a, self.b)
        copy_log(self.a, self.c)
        self.raw = raws[4]

    def _write_indexes(self) -> None:
        chain = 0
        for number in range(len(self.starts) - 2):
            frames = self.frames(number)
            index = index_of(frames, self.starts[number], chain)
            name = segment.segment_name(Position(self.starts[number])).replace(".wal", ".idx")
            (self.a / "wal" / name).write_bytes(index.encode())
            chain = plants.checksum_of(frames[-1])

    def frames(self, number: int) -> list[Written]:
        low, high = self.starts[number], self.starts[number + 1]
        return [f for f in self.writer.written if low <= f.position < high]

    def expect(self, copy: str, kind: str, start: int, end: int, *frames: Written) -> None:
        self.expected.append((copy, kind, start, end, plants.records(*frames)))

    def plant(self) -> None:
        b, c, s = self.b, self.c, self.starts
        f = [self.frames(n) for n in range(len(s) - 1)]

        frame = f[1][20]
        plants.flip(b, s[1], frame.end - 9)  # in data
        self.expect("b", "damaged", frame.position, frame.end, frame)

        frame = f[2][30]
        plants.flip(c, s[2], frame.position + 10 + len(frame.topic) + 2)  # in metadata: the partition
        self.expect("c", "damaged", frame.position, frame.end, frame)

        frame = f[3][40]
        plants.flip(b, s[3], frame.position + 6)  # in the frame's head: its length
        self.expect("b", "damaged", frame.position, frame.end, frame)

        path = c / "wal" / segment.segment_name(Position(s[4]))  # in the segment's header
        raw = bytearray(path.read_bytes())
        raw[13] ^= 4
        path.write_bytes(raw)
        self.expect("c", "header", s[4], s[4])

        frame = f[5][50]
        plants.cut_out(b, s[5], frame)
        self.expect("b", "missing", frame.position, frame.end, frame)

        (c / "wal" / segment.segment_name(Position(s[6]))).unlink()
        (c / "wal" / segment.segment_name(Position(s[6])).replace(".wal", ".idx")).unlink()
        ranges: dict[tuple[str, int], Range] = {}
        for frame in f[6]:
            if frame.topic:
                key = (frame.topic, frame.partition)
                first = ranges[key].first if key in ranges else frame.base
                ranges[key] = Range(*key, first, frame.base + frame.count)
        self.expected.append(("c", "missing", s[6], s[7], tuple(sorted(ranges.values()))))

        before = f[7][60]  # an extra frame, right in itself and rightly chained to the one before it
        extra, _ = encode(
            topic_prefix("orders-9"),
            0,
            500,
            plants.fields_of(before)[3],
            Kind.DATA,
            1,
            before.end,
            plants.checksum_of(before),
            0,
            (struct.pack(">qii", 0, len(self.raw) - 12, 1), self.raw[16:]),
        )
        plants.put_in(c, s[7], before.end, extra)
        self.expected.append(("c", "extra", before.end, before.end + len(extra), (Range("orders-9", 0, 0, 500),)))

        one, two = f[8][70], f[8][71]
        plants.swap(b, s[8], one, two)
        self.expect("b", "out of order", one.position, two.end, one, two)

        frame = f[9][80]
        plants.put_in(c, s[9], frame.end, frame.raw)
        self.expect("c", "duplicated", frame.end, frame.end + len(frame.raw), frame)

        frame = f[10][90]  # a wrong offset, with a right checksum
        plants.overwrite(b, s[10], frame.position, plants.again(frame, base=frame.base + 7))
        self.expect("b", "changed", frame.position, frame.end, frame)

        name = segment.segment_name(Position(s[11])).replace(".wal", ".idx")  # an index that lies, with right checksums
        lying = [f[11][0], *f[11][2:]]
        index = index_of(f[11], s[11], plants.checksum_of(f[10][-1]))
        index.rows = index_of(lying, s[11], 0).rows
        (c / "wal" / name).write_bytes(index.encode())
        self.expect("c", "index", s[11], s[12])

        hole = f[12][100:103]  # zeros over three frames
        plants.overwrite(b, s[12], hole[0].position, bytes(hole[-1].end - hole[0].position))
        self.expect("b", "damaged", hole[0].position, hole[-1].end, *hole)

        plants.wrong_chain_in_header(c, s[13])
        self.expect("c", "header", s[13], s[13])

        last = f[13][-1]  # a whole frame more after a sealed segment's end
        plants.put_in(b, s[13], s[14], last.raw)
        self.expect("b", "duplicated", s[14], s[14] + len(last.raw), last)

        self._stale_tail(s[-2])

        # The active segment of b ends in the middle of a frame, below its own mark. What is compared ends with c.
        lost = [frame for frame in self.frames(len(s) - 2)[-10:] if frame.end <= self.stale_end]
        plants.truncate(b, s[-2], lost[0].position + 11)
        self.expected.append(("b", "missing", lost[0].position, lost[-1].end, _joined(lost)))

    def _stale_tail(self, start: int) -> None:
        """c was cut off before epoch 2 began and went on alone for a while in epoch 1."""
        position, chain, raws, frames = self.old_epoch_ends, self.old_chain, b"", []
        time_ms = plants.fields_of(next(w for w in self.writer.written if w.end == position))[3]
        for number in range(200):
            base = self.old_offsets["orders-1", 0] + number * RECORDS_A_BATCH
            head = struct.pack(">qii", base, len(self.raw) - 12, 1)
            raw, chain = encode(
                topic_prefix("orders-1"),
                base,
                RECORDS_A_BATCH,
                time_ms,
                Kind.DATA,
                1,
                position,
                chain,
                0,
                (head, self.raw[16:]),
            )
            if position + len(raw) > self.writer.position:
                break
            frames.append(Written(position, raw, "orders-1", 0, base, RECORDS_A_BATCH))
            raws += raw
            position += len(raw)
        plants.edit(self.c, start, lambda stream: stream[: self.old_epoch_ends - start] + raws + bytes(1 << 16))
        path = self.c / "wal" / segment.segment_name(Position(start))
        with open(path, "rb+") as file:
            from tests.spark.logs import write_mark

            write_mark(file, 9, position, 0)
        self.stale_end = position
        self.expected.append(("c", "stale", self.old_epoch_ends, position, _joined(frames)))


def _joined(frames: list[Written]) -> tuple[Range, ...]:
    from chronik_repl.spark.compare import joined

    return joined(plants.records(*(f for f in frames if f.topic)))[0]


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Planted:
    return Planted(tmp_path_factory.mktemp("planted"))


def options(planted: Planted, *names: str) -> Options:
    return Options(tuple((n, str(getattr(planted, n))) for n in names or "abc"))


def told(report: Report) -> list[tuple[str, str, int, int, tuple[Range, ...]]]:
    return [(d.copy, d.kind, d.start, d.end, d.ranges) for d in report.differences]


def test_every_planted_difference_is_named_and_nothing_else(spark: Any, planted: Planted) -> None:
    clean = run(spark, options(planted))
    assert (clean.verdict, clean.exit_code, told(clean)) == ("same", 0, [])
    assert clean.records > 2_000_000
    assert {p.verdict for p in clean.partitions} == {"same"}
    assert all(p.not_compared == 0 for p in clean.partitions)

    planted.plant()
    report = run(spark, options(planted))
    assert (report.verdict, report.exit_code) == ("different", 1)
    found, expected = set(told(report)), set(planted.expected)
    assert sorted(found - expected) == []
    assert sorted(expected - found) == []
    assert len(report.differences) == len(planted.expected)
    assert [d.start for d in report.differences] == sorted(d.start for d in report.differences)
    assert next(c for c in report.copies if c.name == "a").verdict == "same"


def test_details_say_what_it_is(spark: Any, planted: Planted) -> None:
    report = run(spark, options(planted))
    details = {(d.copy, d.kind, d.detail) for d in report.differences}
    said = " | ".join(sorted(f"{c} {k}: {d}" for c, k, d in details))
    assert "frames of epoch 1, where the others have epoch 2" in said
    assert "where the others have" in said
    assert "b damaged: zeros" in said
    assert "the segment's file is not there" in said
    assert "is not in the index" in said or "is said to stand" in said
    assert "below the copy's own durable mark" in said
