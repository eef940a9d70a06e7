"""A log as a table: what was produced comes back, of every compression, and filters reach the reader."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from chronik_repl.errors import CorruptLog
from chronik_repl.positions import Position
from chronik_repl.spark.filters import Wanted
from chronik_repl.wal import segment
from tests.spark import plants
from tests.spark.logs import CODECS, TIME_MS, Record, Writer, batch, write_mark
from tests.spark.test_planted import index_of


def some_records(codec: str, number: int) -> list[Record]:
    return [
        (
            None if i % 7 == 0 else f"{codec}-{number}-{i}".encode(),
            None if i % 11 == 0 else f"value {i} ".encode() * (i % 5),
            [("trace", b"%d" % i), ("empty", None)] if i % 3 == 0 else [],
        )
        for i in range(30)
    ]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[Any, ...]]]:
    """Five compressions, one a topic, in several segments with indexes; and the rows that must come back."""
    folder = tmp_path_factory.mktemp("log") / "node"
    writer = Writer(folder, segment_bytes=40_000, keep=True)
    rows = []
    for number in range(40):
        for codec in CODECS:
            records = some_records(codec, number)
            time_ms = TIME_MS + number * 1000
            written = writer.data(f"t-{codec}", number % 2, batch(records, codec, time_ms), len(records))
            rows += [
                (key, value, f"t-{codec}", number % 2, written.base + i, time_ms + i, headers)
                for i, (key, value, headers) in enumerate(records)
            ]
    writer.close(spare_bytes=5000)
    starts = [*writer.starts, writer.position]
    chain = 0
    for start, end in pairwise(starts[:-1]):
        frames = [f for f in writer.written if start <= f.position < end]
        (folder / "wal" / f"{start:020d}.idx").write_bytes(index_of(frames, start, chain).encode())
        chain = plants.checksum_of(frames[-1])
    return folder, rows


@pytest.fixture(scope="module")
def read(spark: Any) -> Callable[..., Any]:
    from chronik_repl.spark.source import ChronikSource

    spark.dataSource.register(ChronikSource)

    def load(path: Path, **options: str) -> Any:
        return spark.read.format("chronik").options(**options).load(str(path))

    return load


def test_records_of_every_compression_come_back(
    read: Callable[..., Any], log: tuple[Path, list[tuple[Any, ...]]]
) -> None:
    folder, rows = log
    found = [
        (
            None if r.key is None else bytes(r.key),
            None if r.value is None else bytes(r.value),
            r.topic,
            r.partition,
            r.offset,
            round(r.timestamp.timestamp() * 1000),
            [(h.key, None if h.value is None else bytes(h.value)) for h in r.headers or []],
        )
        for r in read(folder).collect()
    ]
    assert sorted(found, key=lambda r: r[2:5]) == sorted(rows, key=lambda r: r[2:5])


def test_the_schema_is_the_one_of_kafkas_source(read: Callable[..., Any], log: tuple[Path, Any]) -> None:
    assert read(log[0]).dtypes == [
        ("key", "binary"),
        ("value", "binary"),
        ("topic", "string"),
        ("partition", "int"),
        ("offset", "bigint"),
        ("timestamp", "timestamp"),
        ("timestampType", "int"),
        ("headers", "array<struct<key:string,value:binary>>"),
    ]


def test_a_narrower_schema_is_read_as_asked(spark: Any, read: Callable[..., Any], log: tuple[Path, Any]) -> None:
    narrow = spark.read.format("chronik").schema("offset bigint, topic string").load(str(log[0]))
    assert narrow.columns == ["offset", "topic"]
    assert narrow.count() == len(log[1])
    with pytest.raises(Exception, match="no column colour"):
        spark.read.format("chronik").schema("colour string").load(str(log[0])).collect()


def test_frames_are_a_table_too(read: Callable[..., Any], log: tuple[Path, Any]) -> None:
    frames = read(log[0], mode="frames")
    kinds = {r["kind"]: r["count"] for r in frames.groupBy("kind").count().collect()}
    assert kinds["data"] == 200
    assert kinds["epoch start"] == 1
    first = frames.filter("position >= 0 and position < 200").collect()
    assert [r.position for r in first] == [0, 93]


def test_filters_reach_the_reader(
    read: Callable[..., Any], log: tuple[Path, list[tuple[Any, ...]]], tmp_path: Path
) -> None:
    folder, rows = log

    def cost(**options: str) -> int:
        return sum(json.loads(p.read_text())["bytes_read"] for p in Path(options["metrics"]).iterdir())

    def folder_for(name: str) -> str:
        (tmp_path / name).mkdir()
        return str(tmp_path / name)

    everything, one, late = folder_for("all"), folder_for("one"), folder_for("late")
    assert read(folder, metrics=everything).count() == len(rows)
    found = read(folder, metrics=one).filter("topic = 't-zstd' and partition = 1 and offset between 100 and 119")
    assert sorted(r.offset for r in found.collect()) == list(range(100, 120))
    moment = datetime.fromtimestamp(TIME_MS / 1000 + 38, UTC)
    found = read(folder, metrics=late).filter(f"timestamp >= timestamp'{moment.isoformat()}'")
    assert found.count() == sum(r[5] >= TIME_MS + 38_000 for r in rows)
    assert cost(metrics=one) < cost(metrics=everything) / 3
    assert cost(metrics=late) < cost(metrics=everything) / 2


def test_filters_that_only_spark_can_judge_are_left_to_it(
    read: Callable[..., Any], log: tuple[Path, list[tuple[Any, ...]]]
) -> None:
    folder, rows = log
    found = read(folder).filter(
        "topic in ('t-gzip', 't-none') and partition >= 1 and (offset < 5 or value like 'value 9%')"
    )
    wanted = [
        r
        for r in rows
        if r[2] in ("t-gzip", "t-none") and r[3] >= 1 and (r[4] < 5 or (r[1] or b"").startswith(b"value 9"))
    ]
    assert found.count() == len(wanted)
    assert read(folder).filter("topic like 't-s%'").count() == len(rows) // 5
    assert read(folder).filter("topic = 'nobody'").count() == 0


def test_only_what_is_below_the_high_watermark_is_read(read: Callable[..., Any], tmp_path: Path) -> None:
    writer = Writer(tmp_path / "node", keep=True)
    raw = batch([(None, b"x", [])] * 10)
    for _ in range(10):
        writer.data("t", 0, raw, 10)
    writer.close()
    with open(tmp_path / "node" / "wal" / segment.segment_name(Position(0)), "rb+") as file:
        write_mark(file, 8, writer.position, writer.written[5].end)
    assert read(tmp_path / "node").count() == 40
    assert read(tmp_path / "node", upto="durable").count() == 100


def test_damage_is_raised_and_never_skipped(tmp_path: Path) -> None:
    from chronik_repl.spark.source import ChronikSource

    writer = Writer(tmp_path / "node", keep=True)
    for _ in range(10):
        writer.data("t", 0, batch([(None, b"x", [])] * 10), 10)
    writer.close()
    frame = writer.written[6]
    plants.flip(tmp_path / "node", 0, frame.end - 3)
    source = ChronikSource({"path": str(tmp_path / "node")})
    reader = source.reader(source.schema())
    (task,) = reader.partitions()
    with pytest.raises(CorruptLog, match=str(frame.position)):
        list(reader.read(task))


def test_an_index_that_leads_elsewhere_is_not_believed(tmp_path: Path) -> None:
    from pyspark.sql.datasource import EqualTo

    from chronik_repl.spark.source import ChronikSource

    writer = Writer(tmp_path / "node", segment_bytes=2000, keep=True)
    for number in range(40):
        writer.data(f"t{number % 2}", 0, batch([(None, b"x", [])] * 10), 10)
    writer.close()
    end = writer.starts[1]
    frames = [f for f in writer.written if f.position < end]
    index = index_of(frames, 0, 0)
    for key, rows in index.rows.items():  # every entry points one byte too far
        index.rows[key] = bytearray(
            b"".join(
                struct.pack(">qqIIII", *row[:2], row[2] + 1, *row[3:]) for row in struct.iter_unpack(">qqIIII", rows)
            )
        )
    (tmp_path / "node" / "wal" / f"{0:020d}.idx").write_bytes(index.encode())
    source = ChronikSource({"path": str(tmp_path / "node")})
    reader = source.reader(source.schema())
    assert list(reader.pushFilters([EqualTo(("topic",), "t1")])) == []
    assert sum(b.num_rows for task in reader.partitions() for b in reader.read(task)) == 200


def test_filters_as_bounds() -> None:
    from pyspark.sql.datasource import EqualTo, GreaterThan, In, IsNotNull, LessThanOrEqual, Not, StringStartsWith

    wanted = Wanted()
    assert not wanted
    left = wanted.take(
        [
            IsNotNull(("topic",)),
            EqualTo(("topic",), "a"),
            In(("partition",), (1, 2)),
            GreaterThan(("offset",), 10),
            Not(EqualTo(("value",), b"x")),
        ]
    )
    assert [type(f).__name__ for f in left] == ["GreaterThan", "Not"]
    assert wanted
    assert wanted.partition("a", 1)
    assert not wanted.partition("a", 3)
    assert not wanted.partition("b", 1)
    assert not wanted.batch(0, 11, 0)
    assert wanted.batch(0, 12, 0)
    wanted.take([LessThanOrEqual(("offset",), 20), StringStartsWith(("topic",), "a")])
    assert wanted.batch(20, 5, 0)
    assert not wanted.batch(21, 5, 0)
