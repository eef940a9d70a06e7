"""A client of the tests' own: one socket, requests by hand, so that it can also do what no real client does."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import trio
from crc32c import crc32c

from chronik_repl.addresses import split_address
from chronik_repl.kafka import codec

_BATCH = struct.Struct(">qiibIhiqqqhii")


def zigzag(value: int) -> bytes:
    value = (value << 1) ^ (value >> 63)
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def batch(
    *values: bytes,
    timestamp_ms: int = 1_000,
    attributes: int = 0,
    producer: tuple[int, int, int] = (-1, -1, -1),
    magic: int = 2,
    count: int | None = None,
) -> bytes:
    """A record batch as a producer makes it."""
    records = b""
    for delta, value in enumerate(values):
        record = b"\0" + zigzag(0) + zigzag(delta) + zigzag(-1) + zigzag(len(value)) + value + zigzag(0)
        records += zigzag(len(record)) + record
    total = len(values) if count is None else count
    tail = struct.pack(">hiqqqhii", attributes, len(values) - 1, timestamp_ms, timestamp_ms, *producer, total) + records
    return struct.pack(">qiibI", 0, len(tail) + 9, -1, magic, crc32c(tail)) + tail


def values_of(records: bytes) -> list[bytes]:
    """The values of all records, uncompressed, in order."""
    at, found = 0, []
    while at < len(records):
        head = _BATCH.unpack_from(records, at)
        end, place = at + 12 + head[1], at + _BATCH.size
        for _ in range(head[12]):
            size, place = _varint(records, place)
            next_record = place + size
            place += 1
            for _ in range(2):
                _, place = _varint(records, place)
            key, place = _varint(records, place)
            length, place = _varint(records, place + max(key, 0))
            found.append(records[place : place + length])
            place = next_record
        assert place == end
        at = end
    return found


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return (value >> 1) ^ -(value & 1), at


class Closed(Exception):
    """The server closed the connection."""


class KafkaClient:
    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self._buffer = bytearray()
        self._correlation = 0
        self._asked: list[tuple[int, Any, int]] = []

    def encode(self, request: Any, version: int) -> bytes:
        self._correlation += 1
        request.with_header(correlation_id=self._correlation, client_id="test")
        self._asked.append((self._correlation, codec.RESPONSES[request.API_KEY], version))
        return bytes(request.encode(version=version, header=True, framed=True))

    async def send(self, request: Any, version: int) -> None:
        await self.stream.send_all(self.encode(request, version))

    async def frame(self) -> bytes:
        """The next answer's bytes, without its length."""
        while len(self._buffer) < 4 or len(self._buffer) < 4 + int.from_bytes(self._buffer[:4], "big"):
            data = await self.stream.receive_some()
            if not data:
                raise Closed
            self._buffer += data
        size = int.from_bytes(self._buffer[:4], "big")
        frame = bytes(self._buffer[4 : 4 + size])
        del self._buffer[: 4 + size]
        return frame

    async def answer(self) -> Any:
        """The answer to the oldest request that has none yet."""
        correlation, message, version = self._asked.pop(0)
        response = message.decode(await self.frame(), version=version, header=True)
        assert response.header.correlation_id == correlation
        return response

    async def ask(self, request: Any, version: int) -> Any:
        await self.send(request, version)
        return await self.answer()

    async def closed(self) -> bool:
        """Whether the server closes the connection, without a further byte."""
        try:
            return not self._buffer and await self.stream.receive_some() == b""
        except trio.BrokenResourceError:
            return True

    # What most tests ask

    def produce_request(
        self, topic: str, records: bytes | None, *, partition: int = 0, acks: int = -1, timeout_ms: int = 5_000
    ) -> Any:
        topic_of = codec.ProduceRequest.TopicProduceData
        return codec.ProduceRequest(
            transactional_id=None,
            acks=acks,
            timeout_ms=timeout_ms,
            topic_data=[
                topic_of(
                    name=topic,
                    partition_data=[topic_of.PartitionProduceData(index=partition, records=records)],
                )
            ],
        )

    async def produce(self, topic: str, records: bytes | None, *, version: int = 9, **options: Any) -> Any:
        """The answer for the one partition."""
        response = await self.ask(self.produce_request(topic, records, **options), version)
        return response.responses[0].partition_responses[0]

    def fetch_request(
        self,
        topic: str,
        offset: int,
        *,
        partition: int = 0,
        wait_ms: int = 0,
        min_bytes: int = 1,
        max_bytes: int = 50_000_000,
        epoch: int = -1,
        rack: str = "",
        session: tuple[int, int] = (0, -1),
    ) -> Any:
        topic_of = codec.FetchRequest.FetchTopic
        return codec.FetchRequest(
            replica_id=-1,
            max_wait_ms=wait_ms,
            min_bytes=min_bytes,
            max_bytes=max_bytes,
            isolation_level=0,
            session_id=session[0],
            session_epoch=session[1],
            topics=[
                topic_of(
                    topic=topic,
                    partitions=[
                        topic_of.FetchPartition(
                            partition=partition,
                            current_leader_epoch=epoch,
                            fetch_offset=offset,
                            last_fetched_epoch=-1,
                            log_start_offset=-1,
                            partition_max_bytes=max_bytes,
                        )
                    ],
                )
            ],
            forgotten_topics_data=[],
            rack_id=rack,
        )

    async def fetch(self, topic: str, offset: int, *, version: int = 11, **options: Any) -> Any:
        response = await self.ask(self.fetch_request(topic, offset, **options), version)
        return response.responses[0].partitions[0]

    async def make_topic(self, name: str, partitions: int = 1, configs: Sequence[tuple[str, str]] = ()) -> int:
        topic_of = codec.CreateTopicsRequest.CreatableTopic
        response = await self.ask(
            codec.CreateTopicsRequest(
                topics=[
                    topic_of(
                        name=name,
                        num_partitions=partitions,
                        replication_factor=-1,
                        assignments=[],
                        configs=[topic_of.CreatableTopicConfig(name=key, value=value) for key, value in configs],
                    )
                ],
                timeout_ms=5_000,
                validate_only=False,
            ),
            6,
        )
        return int(response.topics[0].error_code)

    async def metadata(self, *names: str, create: bool = True, version: int = 9) -> Any:
        topics = [codec.MetadataRequest.MetadataRequestTopic(name=name) for name in names] if names else None
        return await self.ask(codec.MetadataRequest(topics=topics, allow_auto_topic_creation=create), version)

    async def list_offset(self, topic: str, timestamp_ms: int, *, epoch: int = -1, version: int = 6) -> Any:
        topic_of = codec.ListOffsetsRequest.ListOffsetsTopic
        response = await self.ask(
            codec.ListOffsetsRequest(
                replica_id=-1,
                isolation_level=0,
                topics=[
                    topic_of(
                        name=topic,
                        partitions=[
                            topic_of.ListOffsetsPartition(
                                partition_index=0, current_leader_epoch=epoch, timestamp=timestamp_ms
                            )
                        ],
                    )
                ],
            ),
            version,
        )
        return response.topics[0].partitions[0]


@asynccontextmanager
async def connect(address: str) -> AsyncIterator[KafkaClient]:
    host, port = split_address(address)
    stream = await trio.open_tcp_stream(host, port)
    try:
        with trio.fail_after(20):
            yield KafkaClient(stream)
    finally:
        await trio.aclose_forcefully(stream)
