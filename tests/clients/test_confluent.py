"""librdkafka by confluent-kafka: every compression and acks, with and without idempotence, through a leader's death."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from tests.clients.cluster import Cluster
from tests.clients.ledger import PARTITIONS, RECORDS, Ledger, value_of

IMPATIENT = {
    "reconnect.backoff.ms": 20,
    "reconnect.backoff.max.ms": 200,
    "retry.backoff.ms": 50,
    "topic.metadata.refresh.interval.ms": 2000,
}


def make_topic(cluster: Cluster, name: str, partitions: int = PARTITIONS) -> str:
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap})
    for made in admin.create_topics([NewTopic(name, partitions, -1)], request_timeout=20).values():
        made.result()
    return name


def produce(
    cluster: Cluster,
    topic: str,
    records: int,
    *,
    first: int = 0,
    in_the_middle: Callable[[], None] | None = None,
    **config: Any,
) -> Ledger:
    ledger = Ledger()
    producer = Producer(
        {"bootstrap.servers": cluster.bootstrap, "linger.ms": 5, "batch.num.messages": 500, **IMPATIENT, **config}
    )

    def delivered(error: KafkaError | None, message: Message) -> None:
        if error is None:
            ledger.acked.add(int(message.key()))

    trouble = threading.Thread(target=in_the_middle) if in_the_middle else None
    for number in range(first, first + records):
        if trouble and number == first + records // 2:
            trouble.start()
        while True:
            try:
                producer.produce(topic, value_of(number), str(number), number % PARTITIONS, on_delivery=delivered)
                break
            except BufferError:
                producer.poll(0.1)
        if number % 1000 == 0:
            producer.poll(0)
    left = producer.flush(60)
    if trouble:
        trouble.join()
    assert left == 0
    return ledger


def consume(cluster: Cluster, topic: str, ledger: Ledger, **config: Any) -> None:
    """Everything that stands in the topic now, from its start."""
    consumer = Consumer(
        {
            "bootstrap.servers": cluster.bootstrap, "group.id": "unused", "enable.auto.commit": False,
            "auto.offset.reset": "earliest", "enable.partition.eof": True, "fetch.wait.max.ms": 100,
            "check.crcs": True, **IMPATIENT, **config,
        }
    )  # fmt: skip
    partitions = range(len(consumer.list_topics(topic, timeout=20).topics[topic].partitions))
    consumer.assign([TopicPartition(topic, partition, 0) for partition in partitions])
    open_ends = set(partitions)
    until = time.monotonic() + 60
    while open_ends:
        assert time.monotonic() < until, f"partitions {open_ends} did not end"
        for message in consumer.consume(5000, 0.1):
            error = message.error()
            if error is None:
                ledger.took(message.partition(), message.value())
            elif error.code() == KafkaError._PARTITION_EOF:
                open_ends.discard(message.partition())
            else:
                raise KafkaException(error)
    consumer.close()


@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_every_compression_comes_back_as_it_went(cluster: Cluster, fresh: Callable[[str], str], codec: str) -> None:
    topic = make_topic(cluster, fresh("codec"))
    config: Any = {"compression.type": codec, "enable.idempotence": True}
    ledger = produce(cluster, topic, 5000, **config)
    consume(cluster, topic, ledger)
    ledger.once_and_in_order()
    assert ledger.complete(5000)


@pytest.mark.parametrize("acks", ["0", "1", "all"])
def test_every_acks(cluster: Cluster, fresh: Callable[[str], str], acks: str) -> None:
    topic = make_topic(cluster, fresh("acks"))
    ledger = produce(cluster, topic, 5000, acks=acks)
    consume(cluster, topic, ledger)
    ledger.once_and_in_order()
    assert ledger.complete(5000)


def test_idempotent_through_a_leaders_death_every_record_once(cluster: Cluster, fresh: Callable[[str], str]) -> None:
    topic = make_topic(cluster, fresh("killed"))
    config: Any = {"compression.type": "lz4", "enable.idempotence": True}
    ledger = produce(cluster, topic, RECORDS, in_the_middle=cluster.kill_leader_and_start_it_again, **config)
    consume(cluster, topic, ledger)
    ledger.once_and_in_order()
    assert ledger.complete()


@pytest.mark.parametrize("acks", ["all", "1"])
def test_without_idempotence_through_a_leaders_death_nothing_acked_is_lost(
    cluster: Cluster, fresh: Callable[[str], str], acks: str
) -> None:
    topic = make_topic(cluster, fresh("killed"))
    ledger = produce(cluster, topic, RECORDS, in_the_middle=cluster.kill_leader_and_start_it_again, acks=acks)
    consume(cluster, topic, ledger)
    ledger.nothing_lost()
    assert len(ledger.acked) > RECORDS // 4


def test_a_topic_is_made_on_first_use(cluster: Cluster, fresh: Callable[[str], str]) -> None:
    topic = fresh("first-use")
    ledger = produce(cluster, topic, 100)
    consume(cluster, topic, ledger)
    ledger.once_and_in_order()


def test_transactions_are_refused_for_good(cluster: Cluster, fresh: Callable[[str], str]) -> None:
    producer = Producer({"bootstrap.servers": cluster.bootstrap, "transactional.id": fresh("txn"), **IMPATIENT})
    with pytest.raises(KafkaException) as caught:
        producer.init_transactions(20)
    error = caught.value.args[0]
    assert error.fatal() or not error.retriable()
    assert error.code() != KafkaError._TIMED_OUT
