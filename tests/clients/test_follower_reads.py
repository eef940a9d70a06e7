"""Consumers with a rack read from the follower of their rack; nobody reads past the high watermark anywhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from confluent_kafka import Consumer, TopicPartition

from tests.clients.cluster import Cluster, Node
from tests.clients.ledger import PARTITIONS, Ledger
from tests.clients.test_confluent import IMPATIENT, consume, make_topic, produce
from tests.end_to_end.processes import until


def fetched_bytes(node: Node) -> float:
    return sum(value for name, value in node.metrics().items() if name.startswith("chronik_kafka_fetched_bytes"))


def test_a_consumer_with_a_rack_reads_from_that_racks_follower(cluster: Cluster, fresh: Callable[[str], str]) -> None:
    topic = make_topic(cluster, fresh("rack"))
    ledger = produce(cluster, topic, 20_000)
    for near in cluster.followers:
        before = {node.node_id: fetched_bytes(node) for node in cluster.nodes}
        found = Ledger()
        found.acked = ledger.acked
        consume(cluster, topic, found, **{"client.rack": f"rack-{near.node_id}"})
        found.once_and_in_order()
        read = {node.node_id: fetched_bytes(node) - before[node.node_id] for node in cluster.nodes}
        assert read.pop(near.node_id) > 20_000 * 50
        assert set(read.values()) == {0.0}


def test_nobody_reads_past_the_high_watermark(cluster: Cluster, fresh: Callable[[str], str]) -> None:
    """Both followers stand still: the leader alone has what was acked with acks=1, and shows it to nobody."""
    topic = make_topic(cluster, fresh("watermark"))
    produce(cluster, topic, 400)
    config: dict[str, Any] = {
        "bootstrap.servers": cluster.leader.kafka, "group.id": "unused", "enable.auto.commit": False,
        "fetch.wait.max.ms": 50, **IMPATIENT,
    }  # fmt: skip
    consumer = Consumer(config)
    consumer.assign([TopicPartition(topic, partition, 0) for partition in range(PARTITIONS)])
    seen = 0

    def read(wanted: int) -> bool:
        nonlocal seen
        seen += sum(1 for message in consumer.consume(1000, 0.1) if not message.error())
        return seen >= wanted

    until(lambda: read(400), "what is committed")
    for node in cluster.followers:
        node.pause()
    try:
        watermark = cluster.leader.status()["log"]["high_watermark"]
        produce(cluster, topic, 400, first=400, acks="1")
        deadline = time.monotonic() + 1
        while time.monotonic() < deadline:
            read(800)
        assert seen == 400
        log = cluster.leader.status()["log"]
        assert log["high_watermark"] == watermark < log["durable_end"]
    finally:
        for node in cluster.followers:
            node.resume()
    until(lambda: read(800), "what became committed")
    assert seen == 800
    consumer.close()


def test_kf34_every_acks_level_reaches_every_follower(cluster: Cluster, fresh: Callable[[str], str]) -> None:
    topic = make_topic(cluster, fresh("acks"))
    for first, acks in ((0, "0"), (1000, "1"), (2000, "all")):
        produce(cluster, topic, 1000, first=first, acks=acks)
    for near in cluster.followers:
        found = Ledger()
        found.acked = set(range(3000))

        def everything(found: Ledger = found, near: Node = near) -> bool:
            found.found.clear()
            consume(cluster, topic, found, **{"client.rack": f"rack-{near.node_id}"})
            return sum(map(len, found.found.values())) == 3000

        until(everything, f"all three thousand are on node {near.node_id}")
        found.once_and_in_order()
    durable = {node.status()["log"]["durable_end"] for node in cluster.nodes}
    until(lambda: len({node.status()["log"]["end_checksum"] for node in cluster.nodes}) == 1, f"one chain {durable}")
