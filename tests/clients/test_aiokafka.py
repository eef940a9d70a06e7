"""aiokafka: the asyncio client, with its own codec and its own ways of failing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.errors import KafkaError

from tests.clients.cluster import Cluster
from tests.clients.ledger import PARTITIONS, RECORDS, Ledger, value_of
from tests.clients.test_confluent import make_topic


@pytest.mark.parametrize("idempotent", [True, False])
def test_through_a_leaders_death(cluster: Cluster, fresh: Callable[[str], str], idempotent: bool) -> None:
    topic = make_topic(cluster, fresh("aiokafka"))
    ledger = Ledger()
    asyncio.run(produce(cluster, topic, ledger, idempotent))
    asyncio.run(consume(cluster, topic, ledger))
    if idempotent:
        ledger.once_and_in_order()
        assert ledger.complete()
    else:
        ledger.nothing_lost()
        assert len(ledger.acked) > RECORDS // 4


async def produce(cluster: Cluster, topic: str, ledger: Ledger, idempotent: bool) -> None:
    producer = AIOKafkaProducer(
        bootstrap_servers=cluster.bootstrap, acks="all", enable_idempotence=idempotent, linger_ms=20,
        max_batch_size=65536, compression_type="snappy" if idempotent else None, retry_backoff_ms=50,
        request_timeout_ms=20_000,
    )  # fmt: skip
    await producer.start()
    trouble: asyncio.Future[Any] | None = None
    sent = []
    for number in range(RECORDS):
        if number == RECORDS // 2:
            trouble = asyncio.ensure_future(asyncio.to_thread(cluster.kill_leader_and_start_it_again))
        sent.append(await producer.send(topic, value_of(number), partition=number % PARTITIONS))
    await asyncio.wait_for(asyncio.wait(sent), 60)
    for number, future in enumerate(sent):
        if future.exception() is None:
            ledger.acked.add(number)
    assert trouble is not None
    await trouble
    await producer.stop()


async def consume(cluster: Cluster, topic: str, ledger: Ledger) -> None:
    consumer = AIOKafkaConsumer(bootstrap_servers=cluster.bootstrap, enable_auto_commit=False, fetch_max_wait_ms=100)
    await consumer.start()
    places = [TopicPartition(topic, partition) for partition in range(PARTITIONS)]
    consumer.assign(places)
    await consumer.seek_to_beginning()
    ends = await consumer.end_offsets(places)
    while any([await consumer.position(place) < ends[place] for place in places]):
        for place, records in (await consumer.getmany(timeout_ms=5000, max_records=5000)).items():
            ledger.took_all((place.partition, record.value) for record in records)
    await consumer.stop()


def test_a_group_that_commits_and_comes_back(cluster: Cluster, fresh: Callable[[str], str]) -> None:
    topic, group = make_topic(cluster, fresh("aiokafka")), fresh("group")

    async def read(wanted: int) -> list[bytes]:
        consumer = AIOKafkaConsumer(
            topic, bootstrap_servers=cluster.bootstrap, group_id=group, auto_offset_reset="earliest",
            enable_auto_commit=False, session_timeout_ms=6000, heartbeat_interval_ms=500,
        )  # fmt: skip
        await consumer.start()
        values: list[bytes] = []
        while len(values) < wanted:
            values.append((await asyncio.wait_for(consumer.getone(), 20)).value)
        await consumer.commit()
        await consumer.stop()
        return values

    async def both() -> None:
        async with AIOKafkaProducer(bootstrap_servers=cluster.bootstrap) as producer:
            for number in range(20):
                await producer.send_and_wait(topic, value_of(number), partition=number % PARTITIONS)
        assert sorted(await read(20)) == sorted(value_of(number) for number in range(20))
        async with AIOKafkaProducer(bootstrap_servers=cluster.bootstrap) as producer:
            await producer.send_and_wait(topic, b"later", partition=0)
        assert await read(1) == [b"later"]

    asyncio.run(both())


def test_transactions_are_refused_for_good(cluster: Cluster, fresh: Callable[[str], str]) -> None:
    async def begin() -> None:
        producer = AIOKafkaProducer(bootstrap_servers=cluster.bootstrap, transactional_id=fresh("txn"))
        try:
            with pytest.raises(KafkaError):
                await asyncio.wait_for(producer.start(), 20)
        finally:
            await producer.stop()

    asyncio.run(begin())
