"""Real processes under load: clean runs find nothing, and Spark reads of a topic what a Kafka consumer reads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients.cluster import Cluster
from tests.end_to_end.processes import until
from tests.spark.live import CODECS, VARIABLES, Load, check

RECORDS = 1_000_000
PARTITIONS = 4


@pytest.fixture
def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    running = Cluster(tmp_path, **request.param)
    running.start()
    try:
        yield running
    finally:
        running.stop()


@pytest.mark.parametrize("cluster", [VARIABLES], indirect=True, ids=["small segments"])
def test_a_busy_cluster_is_the_same(spark: Any, cluster: Cluster, tmp_path: Path) -> None:
    with Load(cluster.bootstrap) as load:
        until(lambda: load.acked > 5_000 and len(load.topics) == len(CODECS), "some load of every kind", 120)
        first = check(spark, cluster, None)
        cluster.followers[0].kill()
        before = load.acked
        until(lambda: load.acked > before + 25_000, "more load", 120)
        second = check(spark, cluster, str(tmp_path / "state"))
    assert second.end > first.end
    assert second.copies[1].behind > 0  # the one that was killed; behind is not different
    assert {p.topic for p in first.partitions} == load.topics


def consume(bootstrap: str, topic: str, target: Path) -> int:
    """What a Kafka consumer reads of the topic, as Parquet."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from confluent_kafka import Consumer, TopicPartition

    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "reader", "enable.auto.commit": False})
    columns: dict[str, list[Any]] = {name: [] for name in ("key", "value", "partition", "offset", "millis")}
    for partition in range(PARTITIONS):
        consumer.assign([TopicPartition(topic, partition, 0)])
        _, end = consumer.get_watermark_offsets(TopicPartition(topic, partition), timeout=20)
        count = 0
        while count < end:
            for message in consumer.consume(min(10_000, end - count), 5):  # it waits for as many as it was asked for
                assert message.error() is None, message.error()
                columns["key"].append(message.key())
                columns["value"].append(message.value())
                columns["partition"].append(partition)
                columns["offset"].append(message.offset())
                columns["millis"].append(message.timestamp()[1])
                count += 1
    consumer.close()
    types = [("key", pa.binary()), ("value", pa.binary()), ("partition", pa.int32()), ("offset", pa.int64())]
    table = pa.table(columns, schema=pa.schema([*types, ("millis", pa.int64())]))
    pq.write_table(table, target)
    return int(table.num_rows)


@pytest.mark.parametrize("cluster", [{}], indirect=True, ids=["segments of 16 MiB"])
def test_a_million_records_as_a_kafka_consumer_reads_them(spark: Any, cluster: Cluster, tmp_path: Path) -> None:
    from confluent_kafka import Producer

    from chronik_repl.spark.source import ChronikSource

    for codec in CODECS:
        producer = Producer(
            {
                "bootstrap.servers": cluster.bootstrap,
                "compression.type": codec,
                "linger.ms": 20,
                "queue.buffering.max.messages": RECORDS,
                "enable.idempotence": True,
            }
        )
        for number in range(RECORDS // len(CODECS)):
            producer.produce("million", b"%s %d" % (codec.encode(), number), key=b"%d" % (number % 1000))
        assert producer.flush(120) == 0
    consumed = consume(cluster.leader.kafka, "million", tmp_path / "consumed.parquet")
    assert consumed == RECORDS
    follower = cluster.followers[0]
    leader_end = cluster.leader.status()["log"]["high_watermark"]
    until(lambda: follower.status()["log"]["high_watermark"] >= leader_end, "the follower knows it too", 60)

    spark.dataSource.register(ChronikSource)
    found = fingerprint(wait_for_records(spark, follower.data_dir))
    assert found.records == RECORDS
    assert found == fingerprint(spark.read.parquet(str(tmp_path / "consumed.parquet")))


def fingerprint(table: Any) -> Any:
    """The same for the same records, in whatever order."""
    row = "xxhash64(key, value, partition, offset, millis)"
    return table.selectExpr(
        "count(*) as records", f"sum(cast({row} as decimal(38))) as hashes", f"bit_xor({row}) as bits"
    ).collect()[0]


def wait_for_records(spark: Any, data_dir: Path) -> Any:
    """The directory's own mark knows a new high watermark a moment after the node does."""
    table = spark.read.format("chronik").schema("topic string, offset bigint").load(str(data_dir))
    until(lambda: table.filter("topic = 'million'").count() == RECORDS, "the mark is written", 60)
    return (
        spark.read.format("chronik")
        .schema("key binary, value binary, topic string, partition int, offset bigint, timestamp timestamp")
        .load(str(data_dir))
        .filter("topic = 'million'")
        .selectExpr("key", "value", "partition", "offset", "unix_millis(timestamp) as millis")
    )
