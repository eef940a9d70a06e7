"""Our codecs of Produce and Fetch say what the library's say, in every version."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chronik_repl.errors import ProtocolError
from chronik_repl.kafka import hot, one_batch
from chronik_repl.kafka.codec import (
    FetchRequest,
    FetchResponse,
    ProduceRequest,
    ProduceResponse,
    decode_head,
    uvarint,
)

NAMES = st.text("abcdefghijklmnopqrstuvwxyz._-0123456789", min_size=1, max_size=200)
INTS = st.integers(-(2**31), 2**31 - 1)
LONGS = st.integers(-(2**63), 2**63 - 1)
PARTITIONS = st.lists(st.tuples(INTS, st.none() | st.binary(max_size=300)), max_size=4)
PRODUCE_TOPICS = st.lists(st.tuples(NAMES, PARTITIONS), max_size=3)


def request_bytes(request: Any, version: int) -> memoryview:
    request.with_header(correlation_id=99, client_id="a client")
    return memoryview(bytes(request.encode(version=version, header=True)))


@pytest.mark.parametrize("version", range(3, 13))
@settings(max_examples=60, deadline=None)
@given(topics=PRODUCE_TOPICS, acks=st.integers(-2, 2), timeout=INTS, transactional=st.none() | NAMES)
def test_produce_requests_are_read_as_the_library_writes_them(
    version: int, topics: Any, acks: int, timeout: int, transactional: str | None
) -> None:
    topic_of = ProduceRequest.TopicProduceData
    partition_of = topic_of.PartitionProduceData
    request = ProduceRequest(
        version=version,
        transactional_id=transactional,
        acks=acks,
        timeout_ms=timeout,
        topic_data=[
            topic_of(name=name, partition_data=[partition_of(index=i, records=r) for i, r in partitions])
            for name, partitions in topics
        ],
    )
    view = request_bytes(request, version)
    head = decode_head(view)
    assert (head.key, head.version, head.correlation_id, head.client_id) == (0, version, 99, "a client")
    read = hot.decode_produce(view, head.body_at, version)
    assert (read.transactional_id, read.acks, read.timeout_ms) == (transactional is not None, acks, timeout)
    assert [
        (name, [(p.partition, None if p.records is None else bytes(p.records)) for p in partitions])
        for name, partitions in read.topics
    ] == topics
    one = one_batch.read(view)
    if version >= 9 and transactional is None and [len(partitions) for _, partitions in topics] == [1]:
        ((name, ((index, records),)),) = topics
        if len(name) <= 126 and records is not None:
            assert one is not None
            assert one[:4] == (version, 99, acks, timeout)
            assert (one[5], one[6], bytes(one[7])) == (name.encode(), index, records)
            told = hot.encode_produced(version, 99, [(name, [hot.Produced(index, 0, 7, -1, 3)])])
            assert one_batch.answer(99, one[4], index, 7, 3) == told
            return
    assert one is None
    for short in range(head.body_at, len(view), 1 + len(view) // 50):
        with pytest.raises(ProtocolError):
            hot.decode_produce(view[:short], head.body_at, version)
    with pytest.raises(ProtocolError):
        hot.decode_produce(memoryview(bytes(view) + b"\0"), head.body_at, version)


PRODUCED = st.builds(
    hot.Produced,
    partition=INTS,
    code=st.sampled_from([0, 3, 6, 7]),
    base_offset=LONGS,
    timestamp_ms=LONGS,
    log_start_offset=LONGS,
    message=st.none() | st.text(max_size=200),
)


@pytest.mark.parametrize("version", range(3, 13))
@settings(max_examples=60, deadline=None)
@given(topics=st.lists(st.tuples(NAMES, st.lists(PRODUCED, max_size=4)), max_size=3), leader=st.booleans())
def test_produce_answers_are_read_by_the_library(version: int, topics: Any, leader: bool) -> None:
    where = hot.Leader(7, 3, "a-host", 9092, "rack") if leader else None
    encoded = hot.encode_produced(version, 12, topics, where)
    read = ProduceResponse.decode(encoded, version=version, header=True, framed=True)
    assert int.from_bytes(encoded[:4], "big") == len(encoded) - 4
    assert read.header.correlation_id == 12
    assert read.throttle_time_ms == 0
    assert [topic.name for topic in read.responses] == [name for name, _ in topics]
    failed = False
    for topic, (_, wrote) in zip(read.responses, topics, strict=True):
        for partition, done in zip(topic.partition_responses, wrote, strict=True):
            assert (partition.index, partition.error_code, partition.base_offset) == done[:3]
            assert partition.log_append_time_ms == done.timestamp_ms
            if version >= 5:
                assert partition.log_start_offset == done.log_start_offset
            if version >= 8:
                assert partition.record_errors == []
                assert partition.error_message == done.message
            if version >= 10 and done.code and leader:
                failed = True
                assert (partition.current_leader.leader_id, partition.current_leader.leader_epoch) == (7, 3)
    if failed:
        (endpoint,) = read.node_endpoints
        assert (endpoint.node_id, endpoint.host, endpoint.port, endpoint.rack) == (7, "a-host", 9092, "rack")


FETCH_PARTITIONS = st.lists(st.tuples(INTS, INTS, LONGS, INTS), max_size=4)


@pytest.mark.parametrize("version", range(4, 13))
@settings(max_examples=60, deadline=None)
@given(
    topics=st.lists(st.tuples(NAMES, FETCH_PARTITIONS), max_size=3),
    numbers=st.tuples(INTS, INTS, INTS, INTS, INTS),
    rack=NAMES,
    forgotten=st.lists(st.tuples(NAMES, st.lists(INTS, max_size=3)), max_size=2),
    cluster=st.none() | NAMES,
)
def test_fetch_requests_are_read_as_the_library_writes_them(
    version: int, topics: Any, numbers: Any, rack: str, forgotten: Any, cluster: str | None
) -> None:
    wait, least, most, session, session_epoch = numbers
    topic_of = FetchRequest.FetchTopic
    request = FetchRequest(
        version=version,
        replica_id=-1,
        max_wait_ms=wait,
        min_bytes=least,
        max_bytes=most,
        isolation_level=1,
        session_id=session,
        session_epoch=session_epoch,
        topics=[
            topic_of(
                topic=name,
                partitions=[
                    topic_of.FetchPartition(
                        partition=index,
                        current_leader_epoch=epoch,
                        fetch_offset=offset,
                        last_fetched_epoch=-1,
                        log_start_offset=-1,
                        partition_max_bytes=size,
                    )
                    for index, epoch, offset, size in partitions
                ],
            )
            for name, partitions in topics
        ],
        forgotten_topics_data=[
            FetchRequest.ForgottenTopic(topic=name, partitions=partitions) for name, partitions in forgotten
        ],
        rack_id=rack,
        **({"cluster_id": cluster} if cluster is not None and version >= 12 else {}),
    )
    view = request_bytes(request, version)
    head = decode_head(view)
    read = hot.decode_fetch(view, head.body_at, version)
    assert (read.max_wait_ms, read.min_bytes, read.max_bytes) == (wait, least, most)
    if version >= 7:
        assert (read.session_id, read.session_epoch) == (session, session_epoch)
    assert read.rack == (rack if version >= 11 else "")
    assert [
        (name, [(p.partition, p.leader_epoch if version >= 9 else 0, p.offset, p.bytes_max) for p in partitions])
        for name, partitions in read.topics
    ] == [(name, [(i, e if version >= 9 else 0, o, s) for i, e, o, s in partitions]) for name, partitions in topics]
    for short in range(head.body_at, len(view), 1 + len(view) // 50):
        with pytest.raises(ProtocolError):
            hot.decode_fetch(view[:short], head.body_at, version)


FETCHED = st.builds(
    hot.FetchedPartition,
    partition=INTS,
    code=st.sampled_from([0, 1, 6]),
    high_watermark=LONGS,
    log_start_offset=LONGS,
    records=st.lists(st.binary(min_size=1, max_size=300), max_size=3),
    preferred_replica=INTS,
)


@pytest.mark.parametrize("version", range(4, 13))
@settings(max_examples=60, deadline=None)
@given(topics=st.lists(st.tuples(NAMES, st.lists(FETCHED, max_size=3)), max_size=3), leader=st.booleans())
def test_fetch_answers_are_read_by_the_library(version: int, topics: Any, leader: bool) -> None:
    where = hot.Leader(7, 3) if leader else None
    encoded = b"".join(hot.encode_fetched(version, 12, topics, where))
    assert int.from_bytes(encoded[:4], "big") == len(encoded) - 4
    read = FetchResponse.decode(encoded, version=version, header=True, framed=True)
    assert read.header.correlation_id == 12
    assert (read.error_code, read.session_id) == (0, 0)
    for topic, (name, wrote) in zip(read.responses, topics, strict=True):
        assert topic.topic == name
        for partition, done in zip(topic.partitions, wrote, strict=True):
            assert (partition.partition_index, partition.error_code) == (done.partition, done.code)
            assert partition.high_watermark == partition.last_stable_offset == done.high_watermark
            assert (partition.records or b"") == b"".join(done.records)
            if version >= 5:
                assert partition.log_start_offset == done.log_start_offset
            if version >= 11:
                assert partition.preferred_read_replica == done.preferred_replica
            if version >= 12 and done.code and leader:
                assert (partition.current_leader.leader_id, partition.current_leader.leader_epoch) == (7, 3)


def test_a_number_of_variable_length_ends_after_five_bytes() -> None:
    assert uvarint(memoryview(b"\xff\xff\xff\xff\x0f"), 0) == (2**32 - 1, 5)
    for endless in (b"\xff" * 6, b"\xff\xff\xff\xff\x10", b"\x80" * 1_000_000):
        with pytest.raises(ProtocolError):
            uvarint(memoryview(endless), 0)


def test_a_request_of_millions_of_partitions_is_refused_before_it_is_built() -> None:
    body = b"\xff\xff" + (1).to_bytes(2, "big") + bytes(4) + (2**31 - 1).to_bytes(4, "big")
    with pytest.raises(ProtocolError, match="array of"):
        hot.decode_produce(memoryview(body + bytes(100)), 0, 3)
