"""Produce: batches in, checked and appended at once; the answer when they are as durable as the client asked.

Nothing here waits. `begin` checks every batch of the request (its CRC vouches for the records, which are not parsed),
gives each its place in the log, and leaves the answer with those who wait for the disk (acks 0 and 1) or for the high
watermark (acks=all). Batches of one request stand in the same group, so they cost one fdatasync. The next request of
the connection is read meanwhile.

acks=0 is not answered, as the protocol says; an error then closes the connection, which is how its client learns of it.
"""

from __future__ import annotations

import trio

from chronik_repl.errors import ChronikError, DiskFailed, ProtocolError
from chronik_repl.kafka import batch as batches
from chronik_repl.kafka import one_batch, producers
from chronik_repl.kafka.acks import FOREVER, Acks, Waiting
from chronik_repl.kafka.codec import Head
from chronik_repl.kafka.codes import Code, error_code
from chronik_repl.kafka.connection import Connection
from chronik_repl.kafka.context import Door
from chronik_repl.kafka.hot import Leader, Produced, ProducePartition, decode_produce, encode_produced
from chronik_repl.kafka.metadata import leader_of
from chronik_repl.positions import ORIGIN, Position
from chronik_repl.wal.frame import OVERHEAD
from chronik_repl.wal.state import TopicState

LOWEST, HIGHEST = 0, 12  # advertised; older librdkafka compresses only for servers that say so
LOWEST_SERVED = 3
TIMEOUT_MS_MAX = 600_000
ENOUGH_FOR_S = 0.01
PRODUCE = ("Produce",)  # as a counter's label


class Producing:
    """The Produce API of one server."""

    def __init__(self, door: Door) -> None:
        self._door = door
        self._house = door.house
        self._log = door.house.log
        self._meters = door.meters
        # Counted for every request: the counters themselves, rather than their names.
        self._batches, self._records, self._octets, self._requests, self._seconds = (
            door.meters.values[name]
            for name in (
                "kafka_produced_batches",
                "kafka_produced_records",
                "kafka_produced_bytes",
                "kafka_requests",
                "kafka_request_seconds",
            )
        )
        for counter in (self._batches, self._records, self._octets):
            counter.setdefault((), 0)
        for counter in (self._requests, self._seconds):
            counter.setdefault(PRODUCE, 0)
        self._frame_bytes_max = self._log.settings.frame_bytes_max - OVERHEAD
        self._enough = False
        self._ask_again_at = 0.0
        self._durable = Acks(door.house, door.house.log.durable, self._took)
        self._committed = Acks(door.house, door.house.log.committed, self._took)

    async def run(self) -> None:
        """Answer those who wait, until cancelled. Raises DiskFailed."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._durable.run)
            nursery.start_soon(self._committed.run)

    def _took(self, seconds: float) -> None:
        self._seconds[PRODUCE] += seconds

    def begin_one(self, connection: Connection, one: one_batch.OneBatch, held: int) -> bool:
        """What `begin` would do, if all goes well. False: nothing was done; `begin` says why."""
        version, correlation_id, acks, timeout_ms, echo, name, index, records = one
        topic = self._log.state.topics_raw.get(name)
        if (
            topic is None
            or not 0 <= index < len(topic.partitions)
            or not (acks == 1 or acks == -1)
            or self._refusal(version, acks, False, connection.now) is not None
        ):
            return False
        partition = topic.partitions[index]
        try:
            head = batches.check(records, self._frame_bytes_max - len(name))
        except batches.BadBatch:
            return False
        count = head.record_count
        if head.producer_id != batches.NO_PRODUCER:
            known = producers.check(partition, head.producer_id, head.producer_epoch, head.base_sequence, count - 1)
            if known is not None:
                return False
        try:
            appended = self._log.append_batch(topic.name, index, records, record_count=count)
        except DiskFailed:
            raise
        except ChronikError:
            return False
        self._requests[PRODUCE] += 1
        self._batches[()] += 1
        self._records[()] += count
        self._octets[()] += len(records)
        encoded = one_batch.answer(correlation_id, echo, index, appended.base_offset, partition.start_offset)
        deadline = FOREVER
        if acks == -1:
            deadline = connection.now + min(max(timeout_ms, 0), TIMEOUT_MS_MAX) / 1000
        told = ((topic.name, (Produced(index, 0, appended.base_offset),)),)
        waiting = Waiting(
            connection, held, appended.end, self._house.epoch, encoded, version, correlation_id, told, deadline
        )
        connection.expect(waiting)
        (self._committed if acks == -1 else self._durable).add(waiting)
        return True

    def begin(self, connection: Connection, head: Head, view: memoryview, held: int) -> None:
        """Append what the request holds. `held` bytes of the receiving budget are given back with the answer."""
        request = decode_produce(view, head.body_at, head.version)
        self._requests[PRODUCE] += 1
        acks = request.acks
        refused = self._refusal(head.version, acks, request.transactional_id, connection.now)
        topics: list[tuple[str, list[Produced]]] = []
        end = ORIGIN
        failed = False
        for name, partitions in request.topics:
            results = []
            topic = self._log.state.topics.get(name)
            for partition in partitions:
                if refused is None:
                    done, place = self._append(topic, name, partition)
                    if place > end:
                        end = place
                else:
                    done = Produced(partition.partition, refused)
                if done.code:
                    failed = True
                    self._meters.add("kafka_errors", 1, "Produce", Code(done.code).name)
                results.append(done)
            topics.append((name, results))
        epoch = self._house.epoch
        if acks == 0:
            if failed:
                raise ProtocolError(f"produce with acks=0 failed: {_first_error(topics)}")
            waiting = Waiting(connection, held, end, epoch, b"", head.version, head.correlation_id, ())
            connection.expect(waiting)
            self._durable.add(waiting)
            return
        leader = leader_of(self._door) if failed else None
        encoded = encode_produced(head.version, head.correlation_id, topics, leader)
        if end == ORIGIN:
            connection.answer(held).give(encoded)
            connection.flush()
            return
        deadline = FOREVER
        if acks == -1:
            deadline = connection.now + min(max(request.timeout_ms, 0), TIMEOUT_MS_MAX) / 1000
        waiting = Waiting(connection, held, end, epoch, encoded, head.version, head.correlation_id, topics, deadline)
        connection.expect(waiting)
        (self._committed if acks == -1 else self._durable).add(waiting)

    def _refusal(self, version: int, acks: int, transactional: bool, now: float) -> Code | None:
        """Why the whole request cannot be taken."""
        if version < LOWEST_SERVED:
            return Code.UNSUPPORTED_FOR_MESSAGE_FORMAT
        if acks not in (-1, 0, 1):
            return Code.INVALID_REQUIRED_ACKS
        if transactional:
            return Code.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
        if not self._house.accepting:
            return Code.NOT_LEADER_OR_FOLLOWER
        if acks == -1 and not self._enough_replicas(now):
            return Code.NOT_ENOUGH_REPLICAS
        return None

    def _enough_replicas(self, now: float) -> bool:
        """As the house says; asked again only after a moment, because it counts followers. Who is let in by mistake
        waits, and is told when its time is up."""
        if now >= self._ask_again_at:
            self._enough = self._house.enough_replicas
            self._ask_again_at = now + ENOUGH_FOR_S
        return self._enough

    def _append(self, topic: TopicState | None, name: str, asked: ProducePartition) -> tuple[Produced, Position]:
        index, records = asked
        if topic is None or not 0 <= index < len(topic.partitions):
            return Produced(index, Code.UNKNOWN_TOPIC_OR_PARTITION), ORIGIN
        partition = topic.partitions[index]
        try:
            head = batches.check(records, self._frame_bytes_max - len(name))
        except batches.BadBatch as error:
            return Produced(index, error.code, message=str(error)), ORIGIN
        if head.producer_id != batches.NO_PRODUCER:
            decision = producers.check(
                partition, head.producer_id, head.producer_epoch, head.base_sequence, head.record_count - 1
            )
            if decision is not None:
                if isinstance(decision, Code):
                    return Produced(index, decision), ORIGIN
                self._meters.add("kafka_duplicate_batches")
                done = Produced(index, 0, decision.base_offset, -1, partition.start_offset)
                return done, decision.end
        assert records is not None
        try:
            appended = self._log.append_batch(name, index, records, record_count=head.record_count)
        except DiskFailed:
            raise
        except ChronikError as error:
            return Produced(index, error_code(error), message=str(error)), ORIGIN
        self._batches[()] += 1
        self._records[()] += head.record_count
        self._octets[()] += len(records)
        return Produced(index, 0, appended.base_offset, -1, partition.start_offset), appended.end


def _first_error(topics: list[tuple[str, list[Produced]]]) -> str:
    for topic, partitions in topics:
        for done in partitions:
            if done.code:
                return f"{topic}/{done.partition}: {Code(done.code).name} {done.message or ''}".rstrip()
    return "nothing"


__all__ = ["HIGHEST", "LOWEST", "Leader", "Producing"]
