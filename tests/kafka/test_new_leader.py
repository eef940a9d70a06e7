"""What a consumer that is ahead of a new leader's high watermark is told, and what librdkafka makes of it.

A promoted follower, or a leader after kill -9, holds every committed record, but the high watermark that it knows is
older: what it last heard, or what its last mark says. Until its own start frame is committed it cannot know better.
A consumer that has read beyond that sees the new epoch in the metadata and asks where its own epoch ended
(OffsetForLeaderEpoch). If the answer went by the old high watermark, it would be lower than what the consumer has read,
which means to it that the log was cut there: librdkafka then seeks back to it and reads what follows a second time.
(Its debug log, without the refusal: "querying broker for epoch validation of offset 20", "Seek t [0] to offset 8".)
"""

from __future__ import annotations

import threading
from collections import deque
from pathlib import Path

import trio
from confluent_kafka import Consumer, TopicPartition

from chronik_repl.kafka import codec
from chronik_repl.kafka.codes import Code
from chronik_repl.positions import Position
from chronik_repl.wal.disk import RealDisk
from chronik_repl.wal.log import Log, LogSettings

from .client import KafkaClient, batch, connect
from .house import open_door

DEADLINE_S = 60.0
BATCHES = 20
KNOWN = 8  # of them below the high watermark that the new leader begins with


async def follower_behind(leader: Log, folder: Path, high_watermark: Position) -> None:
    """A copy of the log, made as a follower makes it, that has heard of this high watermark."""
    disk = RealDisk(folder)
    log = await Log.open(disk, LogSettings(segment_bytes=16 * 1024 * 1024, min_free_bytes=0), None)
    await log.begin_at(Position(0), leader._store.list[0].chain, leader.cluster_id or "")
    async with trio.open_nursery() as nursery:
        await nursery.start(log.run)
        data = await leader.read(Position(0), leader.durable.value)
        assert log.append_received(memoryview(data)) == len(data)
        await log.durable.wait(log.end)
        log.commit_to(high_watermark)
        nursery.cancel_scope.cancel()
    await log.close()
    disk.close()


class Reader:
    """A librdkafka consumer in a thread of its own."""

    def __init__(self, bootstrap: str) -> None:
        self.values: deque[bytes] = deque()
        self._over = threading.Event()
        self._consumer = Consumer({
            "bootstrap.servers": bootstrap, "group.id": "readers", "auto.offset.reset": "earliest",
            "enable.auto.commit": False, "topic.metadata.refresh.interval.ms": 200, "reconnect.backoff.max.ms": 100,
            "reconnect.backoff.ms": 20, "fetch.wait.max.ms": 50,
        })  # fmt: skip
        self._consumer.assign([TopicPartition("t", 0, 0)])
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        while not self._over.is_set():
            message = self._consumer.poll(0.05)
            if message is not None and not message.error():
                self.values.append(message.value())
        self._consumer.close()

    async def has(self, count: int) -> None:
        while len(self.values) < count:
            await trio.sleep(0.01)

    async def close(self) -> None:
        self._over.set()
        await trio.to_thread.run_sync(self._thread.join)


async def ask_end(client: KafkaClient, epoch: int, current: int) -> tuple[int, int, int]:
    of_topic = codec.OffsetForLeaderEpochRequest.OffsetForLeaderTopic
    asked = of_topic.OffsetForLeaderPartition(partition=0, current_leader_epoch=current, leader_epoch=epoch)
    request = codec.OffsetForLeaderEpochRequest(replica_id=-1, topics=[of_topic(topic="t", partitions=[asked])])
    ((told,),) = (topic.partitions for topic in (await client.ask(request, 3)).topics)
    return told.error_code, told.leader_epoch, told.end_offset


async def test_a_consumer_ahead_of_a_new_leaders_high_watermark_reads_nothing_twice(tmp_path: Path) -> None:
    with trio.fail_after(DEADLINE_S):
        async with open_door(tmp_path / "old") as (house, address):
            async with connect(address) as client:
                await client.make_topic("t")
                for number in range(BATCHES):
                    assert (await client.produce("t", batch(b"%d" % number))).error_code == 0
                    if number + 1 == KNOWN:
                        early = house.log.committed.value
            reader = Reader(address)
            try:
                await reader.has(BATCHES)
                await follower_behind(house.log, tmp_path / "new", early)
            except BaseException:
                await reader.close()
                raise
            old = house.epoch
        try:
            async with open_door(tmp_path / "new", bind=address, holding=True) as (house, _):
                assert house.log.committed_offset("t", 0) == KNOWN
                asked = house.meters.values["kafka_requests"]
                before = asked.get(("OffsetForLeaderEpoch",), 0)
                while asked.get(("OffsetForLeaderEpoch",), 0) < before + 2:  # it asked, was refused, and asked again
                    await trio.sleep(0.01)
                async with connect(address) as client:
                    assert await ask_end(client, old, house.epoch) == (Code.OFFSET_NOT_AVAILABLE, -1, -1)
                    house.holding = False
                    house.log.commit_to(house.log.durable.value)
                    assert await ask_end(client, old, house.epoch) == (Code.NONE, old, BATCHES)
                    assert (await client.produce("t", batch(b"the next"))).error_code == 0
                await reader.has(BATCHES + 1)
        finally:
            await reader.close()
        assert list(reader.values) == [*(b"%d" % number for number in range(BATCHES)), b"the next"]
