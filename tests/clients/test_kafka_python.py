"""kafka-python: producer, consumer, groups and the admin client."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer, TopicPartition
from kafka.errors import KafkaError

from tests.clients.cluster import Cluster
from tests.clients.ledger import PARTITIONS, RECORDS, Ledger, value_of
from tests.clients.test_confluent import make_topic

IMPATIENT: dict[str, Any] = {"reconnect_backoff_ms": 20, "reconnect_backoff_max_ms": 200, "retry_backoff_ms": 50}


def consume(cluster: Cluster, topic: str, ledger: Ledger) -> None:
    consumer = KafkaConsumer(
        bootstrap_servers=cluster.bootstrap.split(","), enable_auto_commit=False, fetch_max_wait_ms=100, **IMPATIENT
    )
    places = [TopicPartition(topic, partition) for partition in range(PARTITIONS)]
    consumer.assign(places)
    consumer.seek_to_beginning()
    ends = consumer.end_offsets(places)
    while any(consumer.position(place) < ends[place] for place in places):
        for place, records in consumer.poll(timeout_ms=5000, max_records=5000).items():
            ledger.took_all((place.partition, record.value) for record in records)
    consumer.close()


@pytest.mark.parametrize("idempotent", [True, False])
def test_through_a_leaders_death(cluster: Cluster, fresh: Callable[[str], str], idempotent: bool) -> None:
    topic = make_topic(cluster, fresh("kafka-python"))
    ledger = Ledger()
    producer = KafkaProducer(
        bootstrap_servers=cluster.bootstrap.split(","), acks="all", enable_idempotence=idempotent, linger_ms=20,
        batch_size=65536, compression_type="gzip" if idempotent else None, delivery_timeout_ms=60_000, **IMPATIENT,
    )  # fmt: skip
    trouble = threading.Thread(target=cluster.kill_leader_and_start_it_again)
    futures = []
    for number in range(RECORDS):
        if number == RECORDS // 2:
            trouble.start()
        futures.append(producer.send(topic, value_of(number), partition=number % PARTITIONS))
    producer.flush(timeout=60)
    trouble.join()
    for number, future in enumerate(futures):
        if future.succeeded():
            ledger.acked.add(number)
    producer.close()
    consume(cluster, topic, ledger)
    if idempotent:
        ledger.once_and_in_order()
        assert ledger.complete()
    else:
        ledger.nothing_lost()
        assert len(ledger.acked) > RECORDS // 4


def test_a_group_and_the_admin_client(cluster: Cluster, fresh: Callable[[str], str]) -> None:
    topic, group = make_topic(cluster, fresh("kafka-python")), fresh("group")
    servers = cluster.bootstrap.split(",")
    with KafkaProducer(bootstrap_servers=servers, **IMPATIENT) as producer:
        for number in range(100):
            producer.send(topic, value_of(number), partition=number % PARTITIONS)
        producer.flush(20)
    consumer = KafkaConsumer(
        topic, bootstrap_servers=servers, group_id=group, auto_offset_reset="earliest", consumer_timeout_ms=20_000,
        enable_auto_commit=False, session_timeout_ms=6000, heartbeat_interval_ms=500, **IMPATIENT,
    )  # fmt: skip
    seen = [next(consumer) for _ in range(100)]
    assert len({record.value for record in seen}) == 100
    consumer.commit()
    admin = KafkaAdminClient(bootstrap_servers=servers, **IMPATIENT)
    assert group in [found["group_id"] for found in admin.list_groups()]
    described = admin.describe_groups([group])[group]
    assert described["group_state"] == "Stable"
    assert len(described["members"]) == 1
    committed = admin.list_group_offsets([group])
    assert sum(offset.offset for offset in next(iter(committed.values())).values()) == 100
    consumer.close()
    admin.delete_groups([group])
    assert group not in [found["group_id"] for found in admin.list_groups()]
    admin.close()


def test_transactions_are_refused_for_good(cluster: Cluster, fresh: Callable[[str], str]) -> None:
    producer = KafkaProducer(
        bootstrap_servers=cluster.bootstrap.split(","), transactional_id=fresh("txn"), max_block_ms=10_000, **IMPATIENT
    )
    with pytest.raises(KafkaError):
        producer.init_transactions()
    producer.close(timeout=1)
